"""One self-contained HTML page about a run: no script, no request, pictures inline.

``page.html`` is its jinja2 template, ``page.css`` its style; this module gathers the values.
"""

import html
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from flowgrpo_rc.report.figures import figures, picture_uri
from flowgrpo_rc.report.finding import OK, PROBLEM, WATCH, Finding, number, worst
from flowgrpo_rc.report.health import check_health, not_checked
from flowgrpo_rc.report.history import History, finite
from flowgrpo_rc.report.run import Run
from flowgrpo_rc.report.setting import headline, progress, settings
from flowgrpo_rc.report.summary import key_numbers
from flowgrpo_rc.run_folder import write_whole

# First line of a page.
DOCTYPE = "<!DOCTYPE html>"
WORDS = {OK: "Healthy", WATCH: "Watch", PROBLEM: "Problem"}
SIGNS = {OK: "✓", WATCH: "!", PROBLEM: "✕"}
PROBE_VERDICTS = {OK: "Safe", WATCH: "Not shown safe", PROBLEM: "Not safe"}
# Columns of the probe's table after the timestep, with their keys.
PROBE_COLUMNS = {"mean |l|": "abs_mean", "90 %": "abs_q90", "largest": "abs_max", "nats": "nats", "clipped": "clipped"}


def write_report(run: Run, path: str | Path | None = None) -> tuple[Path, list[Finding]]:
    """Write the page, whole or not at all; by default as ``report.html`` in the run folder.

    Returns:
        The file, and the findings that it shows.

    Raises:
        OSError: the file cannot be written, or is a folder or something else than a page.
    """
    target = run.root / "report.html" if path is None else Path(path)
    if target.is_dir():
        raise IsADirectoryError(f"{target}: is a folder; give the name of a file")
    if not _may_be_replaced(target):
        raise FileExistsError(f"{target}: is there already and is no page of a report; give another name")
    findings = check_health(run.rows, run.config, broken_lines=run.broken_lines)
    target.parent.mkdir(parents=True, exist_ok=True)
    page = build_page(run, findings)
    # A prompt or a path may hold half a surrogate pair, which UTF-8 cannot encode.
    write_whole(target, lambda partial: partial.write_text(page, encoding="utf-8", errors="backslashreplace"))
    return target, findings


def _may_be_replaced(target: Path) -> bool:
    """Return true unless ``target`` is something else than a page; a typo must not cost a run its records."""
    if not target.exists():
        return True
    if not target.is_file():
        return False
    with target.open("rb") as file:
        start = file.read(len(DOCTYPE))
    return start in (b"", DOCTYPE.encode())


def build_page(run: Run, findings: Sequence[Finding]) -> str:
    """Render the page. Everything from the run is escaped."""
    from jinja2 import Environment
    from markupsafe import Markup

    files = resources.files("flowgrpo_rc.report")
    # The template escapes every value except ``Markup``.
    environment = Environment(autoescape=True, keep_trailing_newline=True)
    environment.filters |= {"prose": lambda text: Markup(_prose(text)), "sentence": _sentence}
    template = environment.from_string(files.joinpath("page.html").read_text(encoding="utf-8"))
    history = run.history
    return template.render(
        style=Markup(files.joinpath("page.css").read_text(encoding="utf-8")),
        words=WORDS,
        signs=SIGNS,
        name=run.root.resolve().name,
        verdict=worst(findings),
        headline=headline(list(findings), history),
        progress=progress(history),
        key_numbers=key_numbers(history),
        findings=findings,
        trouble=[finding for finding in findings if finding.level != OK],
        not_checked=[check.title for check in not_checked(findings)],
        settings=settings(history),
        history=history,
        run=run,
        figures=figures(history),
        samples=_samples(run),
        probe=_probe(run.probe) if run.probe else None,
        metrics=_metrics(history),
    )


def _prose(text: str) -> str:
    """Escaped text whose numbers and ranges (``9.1e-4``, ``21-30``) stay on one line."""
    return re.sub(r"(?<![\w.])(\d+-\d+|\d+(?:\.\d+)?e-\d+)", r'<span class="whole">\1</span>', html.escape(text))


def _sentence(text: str) -> str:
    """Add a full stop, and a capital unless the text begins with a metric's name."""
    first = text.split(" ", 1)[0]
    start = text if "/" in first or "." in first else text[:1].upper() + text[1:]
    return f"{start}."


def _samples(run: Run) -> list[dict[str, str | None]]:
    """The grids, each as a picture or with the reason for its absence."""
    found = []
    titles = ("Before", "Now")[-len(run.samples) :]
    for title, path in zip(titles, run.samples, strict=False):
        uri, fault = picture_uri(path)
        step = path.stem.removeprefix("step_").lstrip("0") or "0"
        found.append({"title": title, "step": step, "uri": uri, "file": path.name, "fault": fault})
    return found


def _probe(probe: Mapping[str, Any]) -> dict[str, Any]:
    """Verdict and table of ``flowgrpo-rc probe``; values missing in an older file stay empty."""
    advice = probe["advice"]
    level = OK if advice.get("safe") else PROBLEM
    if advice.get("verdict") == "not shown safe":
        level = WATCH
    rows = []
    for step in [*probe["steps"], probe["overall"]]:
        timestep = "all" if step.get("timestep") is None else _cell(step["timestep"])
        rows.append([timestep, *(_cell(step.get(key)) for key in PROBE_COLUMNS.values())])
    drift = probe.get("drift") or {}
    # One per step, in their order, and the one of all together.
    drifts = [*drift["timesteps"], drift] if drift else []
    for row, one in zip(rows, drifts, strict=False):
        row.append(_with_interval(one))
    return {
        "level": level,
        "verdict": PROBE_VERDICTS[level],
        "reasons": advice.get("reasons", ()),
        "heads": ["timestep", *PROBE_COLUMNS, *(["drift"] if drift else [])],
        "rows": rows,
    }


def _with_interval(figure: Mapping[str, Any]) -> str:
    ends = figure["interval"]
    return f"{_cell(figure['value'])} ({_cell(ends['low'])} to {_cell(ends['high'])})"


def _cell(value: Any) -> str:
    known = finite(value)
    return "" if known is None else number(known)


def _metrics(history: History) -> list[list[str]]:
    """Name, first, last, lowest and highest value of every metric that has numbers."""
    rows = []
    for name in sorted(history.names):
        series = history.series(name)
        # A rollout_corr/ name also finds the actor's metric, which has a row of its own.
        if series is not None and series.metric == name:
            values = (series.values[0], series.values[-1], min(series.values), max(series.values))
            rows.append([name, *map(number, values)])
    return rows
