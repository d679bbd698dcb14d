"""One self-contained HTML page about a run: no script, no request, pictures inline."""

import html
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any

from flowgrpo_rc.report.figures import Figure, figures, picture_uri
from flowgrpo_rc.report.finding import OK, PROBLEM, WATCH, Finding, number, worst
from flowgrpo_rc.report.health import check_health, not_checked
from flowgrpo_rc.report.history import History, finite
from flowgrpo_rc.report.run import Run
from flowgrpo_rc.report.setting import headline, progress, settings, tiles

WORDS = {OK: "Healthy", WATCH: "Watch", PROBLEM: "Problem"}
DOCTYPE = "<!DOCTYPE html>"
"""How a page begins."""
SIGNS = {OK: "✓", WATCH: "!", PROBLEM: "✕"}


def write_report(run: Run, path: str | Path | None = None) -> tuple[Path, list[Finding]]:
    """Writes the page, whole or not at all; by default as ``report.html`` in the run folder.

    Returns:
        The file, and the findings that it shows.

    Raises:
        OSError: the file cannot be written, or is a folder or something else than a page.
    """
    target = run.root / "report.html" if path is None else Path(path)
    if "\0" in str(target):
        raise OSError(f"{str(target)!r}: no path can hold a NUL character; give the name of a file")
    if target.is_dir():
        raise IsADirectoryError(f"{target}: is a folder; give the name of a file")
    if not _may_be_replaced(target):
        raise FileExistsError(f"{target}: is there already and is no page of a report; give another name")
    findings = check_health(run.rows, run.config, broken_lines=run.broken_lines)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.writing")
    page = build_page(run, findings)
    try:
        partial.write_text(page, encoding="utf-8", errors="backslashreplace")
        os.replace(partial, target)
    except OSError:
        with suppress(OSError):
            partial.unlink()
        raise
    return target, findings


def _may_be_replaced(target: Path) -> bool:
    """Whether nothing of this name would be lost: no record of a run, no device or pipe."""
    if not os.path.lexists(target):
        return True
    if not target.is_file():
        return target.is_symlink() and not target.exists()
    with target.open("rb") as file:
        start = file.read(len(DOCTYPE))
    return start in (b"", DOCTYPE.encode())


def build_page(run: Run, findings: Sequence[Finding]) -> str:
    """The page as text. Everything that comes from the run is escaped."""
    history = History(run.rows, run.config)
    name = run.root.resolve().name
    trouble = [f for f in findings if f.level != OK]
    sections = (
        _head(name, history, list(findings)),
        _section("What to do", _findings(trouble)) if trouble else "",
        _section("The run", _setting(history)),
        _section("Figures", _figures(figures(history))),
        _section("Samples", _samples(run)) if run.samples else "",
        _section("Probe before training", _probe(run.probe)) if run.probe else "",
        _section("Notes", "".join(f"<p>{_text(note)}</p>" for note in run.notes)) if run.notes else "",
        _section("All checks", _checks(findings)),
        _section("Numbers", _numbers(history, run)),
    )
    style = resources.files("flowgrpo_rc.report").joinpath("page.css").read_text(encoding="utf-8")
    return (
        f'{DOCTYPE}\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{_text(name)}: {WORDS[worst(findings)].lower()}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        "<main>\n" + "\n".join(part for part in sections if part) + "\n<footer>flowgrpo-rc report; "
        "every check and limit is explained in docs/report.md.</footer>\n</main>\n</body>\n</html>\n"
    )


def _text(value: object) -> str:
    return html.escape(str(value), quote=True)


def _prose(value: str) -> str:
    """Text whose numbers and ranges (``9.1e-4``, ``21-30``) stay on one line."""
    return re.sub(r"(?<![\w.])(\d+-\d+|\d+(?:\.\d+)?e-\d+)", r'<span class="whole">\1</span>', _text(value))


def _section(title: str, body: str) -> str:
    return f"<section>\n<h2>{title}</h2>\n{body}\n</section>"


def _head(name: str, history: History, findings: list[Finding]) -> str:
    level = worst(findings)
    first = next((f for f in findings if f.level == level and level != OK), None)
    well = "Every measured value is in its healthy range." if history.trained else "No training step is logged yet."
    says = f"{_sentence(first.measured)} {first.advice}" if first else well
    numbers = "".join(f"<div><dt>{_text(n)}</dt><dd>{_text(v)}</dd></div>" for n, v in tiles(history))
    return (
        f"<header>\n<h1>{_text(name)} · {_text(progress(history))}</h1>\n"
        f'<div class="verdict {level}" role="status">'
        f"<strong>{SIGNS[level]} {_text(headline(findings, history))}</strong>"
        f"<p>{_prose(says)}</p></div>\n"
        f'<dl class="tiles">{numbers}</dl>\n</header>'
    )


def _sentence(text: str) -> str:
    """With a capital, unless it begins with a metric's name, and a full stop."""
    start = text if "/" in text.split(" ", 1)[0] or "." in text.split(" ", 1)[0] else text[:1].upper() + text[1:]
    return f"{start}."


def _level(level: str) -> str:
    return f'<span class="level {level}">{SIGNS[level]} {WORDS[level]}</span>'


def _findings(findings: Iterable[Finding]) -> str:
    items = (
        f"<li><header>{_level(f.level)}<h3>{_text(f.title)}</h3><code>{_text(f.check)}</code></header>"
        f'<p>{_prose(_sentence(f.measured))} <span class="soft">{_prose(_sentence(f.band))}</span></p>'
        f'<p class="do">{_prose(f.advice)}</p></li>'
        for f in findings
    )
    return f'<ul class="findings">{"".join(items)}</ul>'


def _setting(history: History) -> str:
    pairs = settings(history)
    if not pairs:
        return (
            '<div class="panel">There is no config.yaml here: checks against the clip band were left out, and the '
            f"log-probs taken for those of {'SDE steps' if history.sde else 'tokens'}.</div>"
        )
    return f'<div class="panel"><dl class="setting">{"".join(_pair(n, v) for n, v in pairs)}</dl></div>'


def _pair(name: str, value: str) -> str:
    return f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>"


def _figures(drawn: Sequence[Figure]) -> str:
    items = (
        f"<figure><h3>{_text(f.title)}</h3>{_picture(f)}<figcaption>{_text(f.caption)}</figcaption></figure>"
        for f in drawn
    )
    return (
        f'<div class="figures">{"".join(items)}</div>' if drawn else "<p>No metric that a figure shows was logged.</p>"
    )


def _picture(figure: Figure) -> str:
    """Both renderings; of a figure that cannot be drawn, what it would show in words."""
    if not figure.light:
        return f"<p>{_text(figure.alt)}</p>"
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{figure.dark}">'
        f'<img src="{figure.light}" alt="{_text(figure.alt)}"></picture>'
    )


def _samples(run: Run) -> str:
    titles = ("Before", "Now") if len(run.samples) > 1 else ("Now",)
    items = []
    for title, path in zip(titles, run.samples, strict=True):
        step = path.stem.removeprefix("step_").lstrip("0") or "0"
        uri, fault = picture_uri(path)
        if uri is None:
            items.append(f'<p class="soft">{_text(path.name)} {_text(fault)}.</p>')
            continue
        alt = f"Validation images at step {step}, each with its prompt and its reward"
        picture = f'<div class="grid" tabindex="0"><img src="{uri}" alt="{_text(alt)}"></div>'
        items.append(f"<figure><h3>{title}: step {_text(step)}</h3>{picture}</figure>")
    return f'<div class="samples">{"".join(items)}</div>'


def _probe(probe: dict[str, Any]) -> str:
    """The table of ``flowgrpo-rc probe``; what is missing in it stays empty."""
    advice = probe.get("advice") or {}
    columns = (("timestep", "timestep"), ("mean |l|", "abs_mean"), ("90 %", "abs_q90"), ("largest", "abs_max"))
    columns += (("nats", "nats"), ("clipped", "clipped"))
    rows = [
        [_cell(step.get(key)) if step.get("timestep") is not None or key != "timestep" else "all" for _, key in columns]
        for step in [*(probe.get("steps") or []), probe.get("overall") or {}]
    ]
    level = OK if advice.get("safe") else PROBLEM
    if advice.get("verdict") == "not shown safe":
        level = WATCH
    reasons = "".join(f"<p>{_text(reason)}</p>" for reason in advice.get("reasons", ()))
    says = {OK: "Safe", WATCH: "Not shown safe", PROBLEM: "Not safe"}[level]
    verdict = f'<p><span class="level {level}">{says}</span></p>{reasons}'
    return f'<div class="panel">{verdict}{_table([name for name, _ in columns], rows)}</div>'


def _cell(value: Any) -> str:
    known = finite(value)
    return "" if known is None else number(known)


def _checks(findings: Sequence[Finding]) -> str:
    rows = "".join(
        f"<tr><td>{_level(f.level)}</td><td>{_text(f.title)}<br><code>{_text(f.check)}</code></td>"
        f"<td>{_prose(f.measured)}</td><td>{_prose(f.band)}</td></tr>"
        for f in findings
    )
    heads = "".join(f'<th scope="col">{name}</th>' for name in ("", "Check", "Measured", "Limits"))
    left = not_checked(findings)
    rest = ", ".join(_text(check.title.lower()) for check in left)
    missing = f'<p class="soft">Not checked, as this run has nothing to measure for it: {rest}.</p>' if left else ""
    table = f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
    return f"<details><summary>{len(findings)} checks with their limits</summary><div>{table}{missing}</div></details>"


def _numbers(history: History, run: Run) -> str:
    rows = []
    for name in sorted(history.names):
        series = history.series(name)
        if series is not None and series.metric == name:
            values = (series.values[0], series.values[-1], min(series.values), max(series.values))
            rows.append([name, *map(number, values)])
    table = _table(["metric", "first", "last", "lowest", "highest"], rows, code=True)
    found = f"<details><summary>All {len(rows)} metrics</summary><div>{table}</div></details>"
    if run.config is None:
        return found
    try:
        source = _text((run.root / "config.yaml").read_text(encoding="utf-8", errors="replace"))
    except OSError:  # removed since it was read
        return found
    return f"{found}<details><summary>Configuration</summary><div><pre>{source}</pre></div></details>"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, code: bool = False) -> str:
    """The first column is text, the others are numbers."""
    cells = [f'<th scope="col"{" class=n" * (i > 0)}>{_text(name)}</th>' for i, name in enumerate(heads)]
    lines = []
    for first, *others in rows:
        name = f"<code>{_text(first)}</code>" if code else _text(first)
        numbers = "".join(f'<td class="n">{_text(cell)}</td>' for cell in others)
        lines.append(f"<tr><td>{name}</td>{numbers}</tr>")
    return f"<table><thead><tr>{''.join(cells)}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
