"""One self-contained HTML page about a run: no script, no request, pictures inline as data URIs.

``page.html`` is its jinja2 template, ``page.css`` its style; this module gathers the values, and words for the run.
"""

import base64
import io
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from flowgrpo_rc.messages import one_line
from flowgrpo_rc.report import health
from flowgrpo_rc.report.finding import OK, PROBLEM, WATCH, Finding, number, worst
from flowgrpo_rc.report.health import check_health
from flowgrpo_rc.report.history import LOSS, ROLLOUT, History, finite
from flowgrpo_rc.report.panel import SETTINGS, Panel, draw_panel
from flowgrpo_rc.report.panels import logged_panels
from flowgrpo_rc.report.summary import key_numbers
from flowgrpo_rc.report.timeline import STEPS
from flowgrpo_rc.run_folder import RunFolder, read_rows, write_whole

UNFINISHED = "running or interrupted"
# First line of a page.
DOCTYPE = "<!DOCTYPE html>"
WORDS = {OK: "Healthy", WATCH: "Watch", PROBLEM: "Problem"}
SIGNS = {OK: "✓", WATCH: "!", PROBLEM: "✕"}
PROBE_VERDICTS = {OK: "Safe", WATCH: "Not shown safe", PROBLEM: "Not safe"}
# Columns of the probe's table after the timestep, with their keys.
PROBE_COLUMNS = {"mean |l|": "abs_mean", "90 %": "abs_q90", "largest": "abs_max", "nats": "nats", "clipped": "clipped"}
# Inches of a figure; small, so that the text is still legible if the picture fills a phone's width.
SIZE = (4.3, 2.75)
# Pixels of a sample grid; a larger one is scaled down, so that the page stays small enough to mail.
LONGEST_SIDE = 4096
LEAST_STEPS = 12
"""Training steps below which a run is not called healthy: checks compare windows of up to 10 steps."""


class NotARunError(ValueError):
    """The folder holds no run to report on; the message names what is missing."""


@dataclass(frozen=True)
class Run:
    """The records of a run folder."""

    root: Path
    rows: list[dict[str, Any]]
    broken_lines: int
    """Lines of ``metrics.jsonl`` that could not be read."""
    config: dict[str, Any] | None
    """``config.yaml``; None if there is none."""
    samples: list[Path]
    """Sample grids: the first and the last."""
    probe: dict[str, Any] | None
    """``probe.json``, if ``flowgrpo-rc probe --out`` wrote it here."""
    config_text: str = ""
    """``config.yaml`` as it is written."""
    timeline: tuple[dict[str, Any], ...] = ()
    """Last lines of ``timeline.jsonl``."""

    @cached_property
    def history(self) -> History:
        """The rows as time series."""
        return History(self.rows, self.config, self.broken_lines, self.timeline)


def read_run(root: str | Path) -> Run:
    """Read a run folder.

    Raises:
        NotARunError: no such folder, no ``metrics.jsonl`` in it, no complete line in that, or an unreadable
            ``config.yaml``.
    """
    folder = RunFolder(Path(root))
    if not folder.root.is_dir():
        raise NotARunError(f"{root}: no such folder; give a run folder, e.g. outputs/PROJECT/EXPERIMENT")
    if not folder.metrics.is_file():
        raise NotARunError(f"{root}: not a run folder, it holds no metrics.jsonl; give the folder that a run writes")
    rows, broken = read_rows(folder.metrics)
    if not rows:
        raise NotARunError(f"{folder.metrics}: no complete line in it; wait until a step is done")
    config, config_text = _read(folder.config, yaml.safe_load)
    file = folder.root / "probe.json"
    try:
        probe, _ = _read(file, json.loads)
        if probe is not None and not {"steps", "overall", "advice"} <= probe.keys():
            raise NotARunError(f"{file}: is not what flowgrpo-rc probe writes; remove or rename it")
    except NotARunError as error:
        # Another tool's file of that name must not cost the page.
        probe = None
        warnings.warn(f"probe.json was left out: {error}", stacklevel=2)
    timeline = read_rows(folder.timeline)[0] if folder.timeline.is_file() else []
    # The first grid shows the untrained model, the last one the present.
    grids = list(folder.grids().values())
    return Run(
        root=folder.root,
        rows=rows,
        broken_lines=broken,
        config=config,
        config_text=config_text,
        samples=[grids[0], grids[-1]] if len(grids) > 1 else grids,
        probe=probe,
        # The page shows the last steps alone, and a long run has more lines than memory should hold.
        timeline=tuple(timeline[-STEPS:]),
    )


def _read(path: Path, parse: Callable[[str], Any]) -> tuple[dict[str, Any] | None, str]:
    """Content of a file with one mapping, and its text; None if there is no such file."""
    if not path.is_file():
        return None, ""
    try:
        text = path.read_text(encoding="utf-8")
        content = parse(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise NotARunError(f"{path}: cannot be read ({one_line(error, 200)}); repair or remove it") from error
    if not isinstance(content, dict):
        raise NotARunError(f"{path}: expected a mapping, found {type(content).__name__}; repair or remove it")
    return content, text


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
    # A typo must not cost a run its records; an earlier page or an empty file may be replaced.
    may_go = target.is_file() and target.read_bytes()[: len(DOCTYPE)] in (b"", DOCTYPE.encode())
    if target.exists() and not may_go:
        raise FileExistsError(f"{target}: is there already and is no page of a report; give another name")
    findings = check_health(run.rows, run.config, broken_lines=run.broken_lines)
    target.parent.mkdir(parents=True, exist_ok=True)
    page = build_page(run, findings)
    write_whole(target, lambda partial: partial.write_text(page, encoding="utf-8"))
    return target, findings


def build_page(run: Run, findings: Sequence[Finding]) -> str:
    """Render the page. Everything from the run is escaped."""
    from jinja2 import Environment
    from markupsafe import Markup

    files = resources.files("flowgrpo_rc.report")
    # The template escapes every value except ``Markup``.
    environment = Environment(autoescape=True, keep_trailing_newline=True)
    environment.filters |= {"sentence": _sentence}
    template = environment.from_string(files.joinpath("page.html").read_text(encoding="utf-8"))
    history = run.history
    checked = {finding.check for finding in findings}
    return template.render(
        style=Markup(files.joinpath("page.css").read_text(encoding="utf-8")),
        words=WORDS,
        signs=SIGNS,
        name=run.root.resolve().name,
        verdict=worst(findings),
        headline=headline(findings, history),
        progress=progress(history),
        key_numbers=key_numbers(history),
        findings=findings,
        trouble=[finding for finding in findings if finding.level != OK],
        early=worst(findings) == OK and len(history.trained) < LEAST_STEPS,
        not_checked=[check.title for check in health.CHECKS if check.name not in checked],
        settings=settings(history),
        history=history,
        run=run,
        figures=figures(history),
        samples=_samples(run),
        probe=_probe(run.probe) if run.probe else None,
        metrics=_metrics(history),
    )


def headline(findings: Sequence[Finding], history: History) -> str:
    """The verdict in a few words; the worst findings come first."""
    level = worst(findings)
    count = sum(f.level == level for f in findings)
    reached, _, state = progress(history).partition(", ")
    if level == PROBLEM:
        more = f" and {count - 1} more" if count > 1 else ""
        return f"Problem: {findings[0].title.lower()}{more}"
    if level == WATCH:
        return f"Watch: {count} of {len(findings)} checks left the healthy range"
    if not history.trained:
        return "Nothing to judge yet"
    checks = f"{count} {'check' if count == 1 else 'checks'}"
    unmeasured = len(health.CHECKS) - len({finding.check for finding in findings})
    rest = f"{unmeasured} had nothing to measure"
    if len(history.trained) < LEAST_STEPS:
        return f"Too early to judge, {reached}: {checks} healthy so far, {rest} yet"
    # A healthy beginning is no healthy run.
    if state == UNFINISHED:
        return f"Healthy so far, {reached}: {checks}, {rest} yet"
    return f"Healthy: nothing to do in {checks}; {rest}"


def progress(history: History) -> str:
    """``step 8 of 30, running or interrupted``."""
    last = history.steps[-1]
    total = finite(history.setting("trainer.total_training_steps"))
    if total is None:
        return f"step {last}"
    return f"step {last} of {total:.0f}, {UNFINISHED if last < total else 'finished'}"


def settings(history: History) -> list[tuple[str, str]]:
    """Names and values: engine, actor, batch, correction. Empty without a configuration."""
    if history.config is None:
        return []

    def rollout(key: str) -> Any:
        return history.setting(f"{ROLLOUT}.{key}")

    engine = f"{rollout('name')} in {rollout('dtype')}"
    if quantized := rollout("quantization"):
        engine += f", {quantized}"
    for key, word in {"merge_adapter": "adapter merged", "torch_compile": "compiled"}.items():
        if rollout(key) is True:
            engine += f", {word}"
    if history.staleness:
        engine += f", adapter {history.staleness} batches old"
    mode = history.setting(f"{LOSS}.loss_mode", "")
    actor = f"{history.setting('actor_rollout_ref.model.dtype')}, {mode}, {_limit(history)}"
    if history.setting("actor_rollout_ref.actor.detach_unconditional", False) is True:
        actor += ", no gradient through the unconditional half"
    drawn = "prompts"
    if history.setting("algorithm.prompt_writer.path") is not None:
        drawn = f"requests x {history.setting('algorithm.prompt_writer.rewrites')} prompts"
    rows = drawn.partition(" ")[0]
    mini = history.setting("actor_rollout_ref.actor.ppo_mini_batch_size")
    batch = f"{history.setting('data.train_batch_size')} {drawn} x {rollout('n')} images, "
    batch += f"mini-batches of {mini} {rows}; "
    batch += f"{rollout('algo.sde_window_size')} of {rollout('pipeline.num_inference_steps')} steps are "
    batch += f"{rollout('algo.sde_type')}"
    model = f"{history.setting('actor_rollout_ref.model.path')}"
    return [("Model", model), ("Engine", engine), ("Actor", actor), ("Batch", batch), *_correction(history)]


def _limit(history: History) -> str:
    limit = history.mode.objective.limit
    if not history.mode.objective.clips:
        return f"{limit.key} {history.setting(f'{LOSS}.{limit.key}')}"
    width = history.clip_width
    if history.setting(f"{LOSS}.clip_ratio") == "auto":
        return f"clip_ratio auto, now {number(width)}" if width else "clip_ratio auto"
    return f"clip_ratio {number(width)}" if width else "no clip_ratio"


def _correction(history: History) -> list[tuple[str, str]]:
    """``explain`` of the rollout correction, one pair per line; a refused section is quoted."""
    from flowgrpo_rc.correction.options.explanation import CleanImages, explain

    mode = history.configured_mode
    if mode is None:
        return [("Correction", f"{history.setting('algorithm.rollout_correction')}, which this version refuses")]
    clean = CleanImages(mode.objective.needs_old, mode.objective.has_limit, history.averages_old_policy)
    lines = explain(mode.rollout_correction, clean if mode.objective.clean else None).text.splitlines()
    return [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines)]


def _sentence(text: str) -> str:
    """Add a full stop, and a capital unless the text begins with a metric's name."""
    first = text.split(" ", 1)[0]
    start = text if "/" in first or "." in first else text[:1].upper() + text[1:]
    return f"{start}."


def figures(history: History) -> list[dict[str, str]]:
    """Title, picture, values in words and caption of every panel."""
    return [
        {
            "title": panel.title,
            "alt": f"{panel.title}: {panel.words(history)}",
            "caption": panel.caption,
            "uri": render(panel, history),
        }
        for panel in logged_panels(history)
    ]


def render(panel: Panel, history: History) -> str:
    """One panel as an SVG data URI for light pages, which dark ones invert; the same bytes for the same run."""
    import matplotlib
    from matplotlib.figure import Figure

    buffer = io.BytesIO()
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=SIZE, layout="constrained")
        draw_panel(panel, history, figure)
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _data_uri("image/svg+xml", buffer)


def picture_uri(path: Path) -> str:
    """A PNG file as a data URI."""
    from PIL import Image

    buffer = io.BytesIO()
    with Image.open(path) as image:
        image.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
        image.save(buffer, format="PNG")
    return _data_uri("image/png", buffer)


def _data_uri(kind: str, content: io.BytesIO) -> str:
    return f"data:{kind};base64,{base64.b64encode(content.getvalue()).decode('ascii')}"


def _samples(run: Run) -> list[dict[str, str]]:
    titles = ("Before", "Now")[-len(run.samples) :]
    return [
        {"title": title, "step": path.stem.removeprefix("step_").lstrip("0") or "0", "uri": picture_uri(path)}
        for title, path in zip(titles, run.samples, strict=False)
    ]


def _probe(probe: Mapping[str, Any]) -> dict[str, Any]:
    """Verdict and table of ``flowgrpo-rc probe``; values missing in an older file stay empty."""
    advice = probe["advice"]
    level = OK if advice.get("safe") else PROBLEM
    if advice.get("verdict") == "not shown safe":
        level = WATCH
    steps = [*probe["steps"], {**probe["overall"], "timestep": None}]
    rows = [[_cell(step.get(key)) for key in ("timestep", *PROBE_COLUMNS.values())] for step in steps]
    rows[-1][0] = "all"
    heads = ["timestep", *PROBE_COLUMNS]
    if drift := probe.get("drift"):
        heads.append("drift")
        # One per step, in their order, and the one of all together.
        for row, one in zip(rows, [*drift["timesteps"], drift], strict=False):
            low, high = _cell(one["interval"]["low"]), _cell(one["interval"]["high"])
            row.append(f"{_cell(one['value'])} ({low} to {high})")
    verdict = PROBE_VERDICTS[level]
    return {"level": level, "verdict": verdict, "reasons": advice.get("reasons", ()), "heads": heads, "rows": rows}


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
