"""Read a run folder for the report, also of a run that is still going on or was killed."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from flowgrpo_rc.report.history import History
from flowgrpo_rc.report.timeline import STEPS
from flowgrpo_rc.run_folder import RunFolder, read_rows


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
        NotARunError: no such folder, no ``metrics.jsonl`` in it, or no complete line in that.
    """
    import yaml

    folder = RunFolder(Path(root))
    if not folder.root.is_dir():
        raise NotARunError(f"{root}: no such folder; give a run folder, e.g. outputs/PROJECT/EXPERIMENT")
    if not folder.metrics.is_file():
        raise NotARunError(f"{root}: not a run folder, it holds no metrics.jsonl; give the folder that a run writes")
    rows, broken = read_rows(folder.metrics)
    if not rows:
        raise NotARunError(f"{folder.metrics}: no complete line in it; wait until a step is done")
    config_text = folder.config.read_text(encoding="utf-8") if folder.config.is_file() else ""
    probe = folder.root / "probe.json"
    timeline = read_rows(folder.timeline)[0] if folder.timeline.is_file() else []
    # The first grid shows the untrained model, the last one the present.
    grids = list(folder.grids().values())
    return Run(
        root=folder.root,
        rows=rows,
        broken_lines=broken,
        config=yaml.safe_load(config_text),
        config_text=config_text,
        samples=[grids[0], grids[-1]] if len(grids) > 1 else grids,
        probe=json.loads(probe.read_text(encoding="utf-8")) if probe.is_file() else None,
        # The page shows the last steps alone, and a long run has more lines than memory should hold.
        timeline=tuple(timeline[-STEPS:]),
    )
