"""A run folder as the report reads it; also one whose run is still going on, or was killed."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowgrpo_rc.trainer.run_folder import RunFolder, read_rows


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


def read_run(root: str | Path) -> Run:
    """Reads a run folder.

    Raises:
        NotARunError: no such folder, no ``metrics.jsonl`` in it, no complete line in that, or a ``config.yaml`` that
            is none.
    """
    folder = RunFolder(Path(root))
    if not folder.root.is_dir():
        raise NotARunError(f"{root}: no such folder; give a run folder, e.g. outputs/PROJECT/EXPERIMENT")
    if not folder.metrics.is_file():
        raise NotARunError(f"{root}: not a run folder, it holds no metrics.jsonl; give the folder that a run writes")
    rows, broken = read_rows(folder.metrics)
    if not rows:
        raise NotARunError(f"{folder.metrics}: no complete line in it; wait until the first step is done")
    probe, notes = _probe(folder.root / "probe.json")
    grids = list(folder.grids().values())
    return Run(
        root=folder.root,
        rows=rows,
        broken_lines=broken,
        config=_mapping(folder.root / "config.yaml"),
        samples=[grids[0], grids[-1]] if len(grids) > 1 else grids,
        probe=probe,
        notes=notes,
    )


def _mapping(path: Path) -> dict[str, Any] | None:
    """A YAML file that holds a mapping; None where there is no such file."""
    import yaml

    if not path.is_file():
        return None
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError) as error:
        raise NotARunError(f"{path}: cannot be read ({str(error).splitlines()[0]}); repair or remove it") from error
    if not isinstance(content, dict):
        raise NotARunError(f"{path}: expected a mapping, found {type(content).__name__}; repair or remove it")
    return content


def _probe(path: Path) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
    """A probe's result and no note, or None and why it was left out."""
    if not path.is_file():
        return None, ()
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
        if _is_probe(content):
            return content, ()
        reason = "not what flowgrpo-rc probe writes"
    except (ValueError, OSError, RecursionError) as error:
        reason = str(error)
    return None, (f"{path.name} was left out: {reason}.",)


def _is_probe(content: Any) -> bool:
    """Whether it has the shape that the page shows."""
    if not isinstance(content, dict):
        return False
    steps, overall, advice = content.get("steps") or [], content.get("overall") or {}, content.get("advice") or {}
    if not (isinstance(steps, list) and isinstance(overall, dict) and isinstance(advice, dict)):
        return False
    return all(isinstance(step, dict) for step in steps) and isinstance(advice.get("reasons", []), list)
