"""A run folder as the report reads it; also one whose run is still going on, or was killed."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowgrpo_rc.trainer.run_folder import RunFolder


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


def read_run(root: str | Path) -> Run:
    """Reads a run folder.

    Raises:
        NotARunError: no such folder, no ``metrics.jsonl`` in it, no complete line in that, or a ``config.yaml`` or
            ``probe.json`` that is none.
    """
    folder = RunFolder(Path(root))
    if not folder.root.is_dir():
        raise NotARunError(f"{root}: no such folder; give a run folder, e.g. outputs/PROJECT/EXPERIMENT")
    if not folder.metrics.is_file():
        raise NotARunError(f"{root}: not a run folder, it holds no metrics.jsonl; give the folder that a run writes")
    rows, broken = read_rows(folder.metrics)
    if not rows:
        raise NotARunError(f"{folder.metrics}: no complete line in it; wait until the first step is done")
    grids = sorted(folder.samples.glob("step_*.png"))
    return Run(
        root=folder.root,
        rows=rows,
        broken_lines=broken,
        config=_mapping(folder.root / "config.yaml"),
        samples=[grids[0], grids[-1]] if len(grids) > 1 else grids,
        probe=_mapping(folder.root / "probe.json"),
    )


def read_rows(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The rows of a ``metrics.jsonl``, and how many lines were none."""
    rows, broken = [], 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line) if line.strip() else {}
        except json.JSONDecodeError:
            row = None
        if not isinstance(row, dict):
            broken += 1
        elif row:
            rows.append(row)
    return rows, broken


def _mapping(path: Path) -> dict[str, Any] | None:
    """A YAML or JSON file that holds a mapping; None where there is no such file."""
    import yaml

    if not path.is_file():
        return None
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise NotARunError(f"{path}: cannot be read ({str(error).splitlines()[0]}); repair or remove it") from error
    if not isinstance(content, dict):
        raise NotARunError(f"{path}: expected a mapping, found {type(content).__name__}; repair or remove it")
    return content
