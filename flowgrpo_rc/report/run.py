"""Read a run folder for the report, also of a run that is still going on or was killed."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from flowgrpo_rc.messages import one_line
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
    notes: tuple[str, ...] = ()
    """Files that were left out, and why."""
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
    config, config_text = _config(folder.config)
    probe, notes = _probe(folder.root / "probe.json")
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
        notes=notes,
        # The page shows the last steps alone, and a long run has more lines than memory should hold.
        timeline=tuple(timeline[-STEPS:]),
    )


def _config(path: Path) -> tuple[dict[str, Any] | None, str]:
    """``config.yaml`` and its text; None if there is no such file."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        content = yaml.safe_load(text)
    except FileNotFoundError:
        return None, ""
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise NotARunError(f"{path}: cannot be read ({one_line(error, 200)}); repair or remove it") from error
    if not isinstance(content, dict):
        raise NotARunError(f"{path}: expected a mapping, found {type(content).__name__}; repair or remove it")
    return content, text


def _probe(path: Path) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
    """The result of a probe and no note, or None and why it was left out."""
    fault = "not what flowgrpo-rc probe writes"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        # Another tool's file of that name must not break the page.
        if isinstance(content, dict) and {"steps", "overall", "advice"} <= content.keys():
            return content, ()
    except FileNotFoundError:
        return None, ()
    except (OSError, ValueError) as error:
        fault = one_line(error, 200)
    return None, (f"{path.name} was left out: {fault}.",)
