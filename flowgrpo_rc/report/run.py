"""A run folder as the report reads it; also one whose run is still going on, or was killed."""

import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from flowgrpo_rc.messages import one_line, reason
from flowgrpo_rc.report.history import History
from flowgrpo_rc.report.timeline import STEPS
from flowgrpo_rc.run_folder import RunFolder, read_rows


class NotARunError(ValueError):
    """The folder holds no run to report on; the message names what is missing."""


@dataclass(frozen=True)
class Run:
    """What a run folder holds."""

    root: Path
    rows: list[dict[str, Any]]
    broken_lines: int
    """Lines of ``metrics.jsonl`` that could not be read."""
    config: dict[str, Any] | None
    """``config.yaml``; None where there is none."""
    samples: list[Path]
    """Sample grids: the first and the last."""
    probe: dict[str, Any] | None
    """``probe.json``, if ``flowgrpo-rc probe --out`` wrote it here."""
    notes: tuple[str, ...] = ()
    """What was left out, and why."""
    config_text: str = ""
    """``config.yaml`` as it is written."""
    timeline: tuple[dict[str, Any], ...] = ()
    """Lines of ``timeline.jsonl``."""

    @cached_property
    def history(self) -> History:
        """The rows as time series."""
        return History(self.rows, self.config, self.broken_lines, self.timeline)


def read_run(root: str | Path) -> Run:
    """Reads a run folder.

    Raises:
        NotARunError: no such folder, no ``metrics.jsonl`` in it, no complete line in that, or a ``config.yaml`` that
            is none.
    """
    shown = _printable(str(root))
    # os.path, as pathlib raises for what no file system takes as a path.
    if not os.path.isdir(root):
        raise NotARunError(f"{shown}: no such folder; give a run folder, e.g. outputs/PROJECT/EXPERIMENT")
    folder = RunFolder(Path(root))
    if not folder.metrics.is_file():
        found = "its metrics.jsonl is no file" if os.path.lexists(folder.metrics) else "it holds no metrics.jsonl"
        raise NotARunError(f"{shown}: not a run folder, {found}; give the folder that a run writes")
    try:
        rows, broken = read_rows(folder.metrics)
    except OSError as error:
        raise _refused(folder.metrics, f"cannot be read ({_why(error)})") from error
    rows, notes = _usable(rows)
    if not rows:
        raise NotARunError(f"{_printable(str(folder.metrics))}: no complete line in it; wait until a step is done")
    config, config_text = _mapping(folder.config)
    probe, left_out = _probe(folder.root / "probe.json")
    timeline, unread = _timeline(folder.timeline)
    grids = list(folder.grids().values())
    return Run(
        root=folder.root,
        rows=rows,
        broken_lines=broken,
        config=config,
        config_text=config_text,
        samples=[grids[0], grids[-1]] if len(grids) > 1 else grids,
        probe=probe,
        notes=(*notes, *left_out, *unread),
        timeline=timeline,
    )


LONGEST_NAME = 200
"""Characters of a metric's name; a longer one is no name but a damaged line."""
LARGEST_CONFIG = 5_000_000
"""Bytes of a ``config.yaml``; a run writes some thousands."""
MOST_SETTINGS = 100_000
"""Values in it, each counted as often as aliases repeat it."""


def _usable(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Rows with names that can be printed and drawn, and what was left out of them."""
    names = {name for row in rows for name in row}
    shown = {name: _printable(name) for name in names if len(name) <= LONGEST_NAME}
    kept = [{shown[name]: value for name, value in row.items() if name in shown} for row in rows]
    left_out = len(names) - len(shown)
    note = f"{left_out} metrics whose names are longer than {LONGEST_NAME} characters were left out."
    return [row for row in kept if row], (note,) if left_out else ()


def _timeline(path: Path) -> tuple[tuple[dict[str, Any], ...], tuple[str, ...]]:
    """The last lines of a timeline and no note, or none and why it was left out."""
    if not os.path.lexists(path):
        return (), ()
    try:
        if not path.is_file():
            raise OSError("is no file")
        rows, _ = read_rows(path)
        return tuple(rows[-STEPS:]), ()
    except OSError as error:
        return (), (f"{path.name} was left out: {_why(error)}.",)


def _printable(text: str) -> str:
    """With escapes for what no console and no font can show: control characters, and half of a surrogate pair."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def _why(error: Exception) -> str:
    """The error in a line that can be printed."""
    if isinstance(error, RecursionError):
        return "it nests too deeply"
    return _printable(reason(error) if isinstance(error, OSError) else one_line(error, 200))


def _refused(path: Path, fault: str) -> NotARunError:
    return NotARunError(f"{_printable(str(path))}: {fault}; repair or remove it")


def _mapping(path: Path) -> tuple[dict[str, Any] | None, str]:
    """A YAML file that holds a mapping, and its text; None where there is nothing of that name."""
    import yaml

    if not os.path.lexists(path):
        return None, ""
    if not path.is_file():
        raise _refused(path, "is no file")
    try:
        if path.stat().st_size > LARGEST_CONFIG:
            raise ValueError(f"larger than {LARGEST_CONFIG} bytes")
        text = path.read_text(encoding="utf-8")
        content = yaml.safe_load(text)
        if isinstance(content, dict):
            _count_settings(content)
    # Values raise errors of their own classes: a date that does not exist, an integer of too many digits, `!!int ''`.
    except Exception as error:
        raise _refused(path, f"cannot be read ({_why(error)})") from error
    if not isinstance(content, dict):
        raise _refused(path, f"expected a mapping, found {type(content).__name__}")
    return content, text


def _count_settings(content: dict[Any, Any]) -> None:
    """Aliases let a small file stand for billions of values, or for one that holds itself."""
    count = 0
    waiting: list[tuple[Any, int]] = [(content, 0)]
    while waiting:
        node, depth = waiting.pop()
        parts = list(node.values()) if isinstance(node, dict) else list(node)
        count += len(parts)
        if count > MOST_SETTINGS:
            raise ValueError(f"it stands for more than {MOST_SETTINGS} values")
        if depth > 100:
            raise RecursionError
        waiting += [(part, depth + 1) for part in parts if isinstance(part, (dict, list, tuple, set))]


def _probe(path: Path) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
    """A probe's result and no note, or None and why it was left out."""
    if not path.is_file():
        return None, ()
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
        if _is_probe(content):
            return content, ()
        fault = "not what flowgrpo-rc probe writes"
    except (RecursionError, ValueError, OSError) as error:
        fault = _why(error)
    return None, (f"{path.name} was left out: {fault}.",)


def _is_probe(content: Any) -> bool:
    """Whether it has the shape that the page shows."""
    if not isinstance(content, dict):
        return False
    steps = content.get("steps") or []
    advice = content.get("advice") or {}
    drift = content.get("drift") or {}
    if not all(isinstance(part, dict) for part in (advice, drift, content.get("overall") or {})):
        return False
    drifts = drift.get("timesteps") or []
    if not (isinstance(steps, list) and isinstance(drifts, list)):
        return False
    if not all(isinstance(one, dict) and isinstance(one.get("interval") or {}, dict) for one in (drift, *drifts)):
        return False
    return all(isinstance(step, dict) for step in steps) and isinstance(advice.get("reasons", []), list)
