"""The run folder: where everything a run leaves behind lies."""

import json
import os
from pathlib import Path
from typing import Any

TIMING_PREFIXES = ("timing_s/", "perf/")
"""Metrics that depend on the machine's speed; all others repeat exactly with the same seed and machine."""


class RunFolder:
    """One run: ``summary.png``, ``config.yaml``, ``metrics.jsonl``, samples, plots, checkpoints and the final LoRAs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.metrics, self.summary = root / "metrics.jsonl", root / "summary.png"
        self.samples, self.plots = root / "samples", root / "plots"
        self.checkpoints = root / "checkpoints"
        self.lora, self.lora_ema = root / "lora", root / "lora_ema"

    @classmethod
    def open(cls, root: str, *, fresh: bool) -> "RunFolder":
        """The folder at ``root``; with ``fresh`` a new one beside it (``root-2``, ``root-3``...) if it is in use."""
        path, number = Path(root), 1
        while fresh and (path / "metrics.jsonl").is_file() and (path / "metrics.jsonl").stat().st_size > 0:
            number += 1
            path = Path(f"{root}-{number}")
        return cls(path)

    def create(self) -> None:
        """Make the folder, if it is not there."""
        self.root.mkdir(parents=True, exist_ok=True)

    def write_config(self, config: dict[str, Any]) -> None:
        """Write the resolved configuration."""
        from omegaconf import OmegaConf

        (self.root / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(config)))

    def append(self, row: dict[str, Any]) -> None:
        """Add one line to ``metrics.jsonl``."""
        with self.metrics.open("a") as handle:
            handle.write(json.dumps(row, allow_nan=False) + "\n")

    def rows(self) -> list[dict[str, Any]]:
        """All complete lines of ``metrics.jsonl``; a line cut off by a kill is left out."""
        return read_rows(self.metrics)[0] if self.metrics.is_file() else []

    def grids(self) -> dict[int, Path]:
        """The sample grids by their step, in order."""
        found = {grid.stem.removeprefix("step_"): grid for grid in self.samples.glob("step_*.png")}
        return dict(sorted((int(step), grid) for step, grid in found.items() if step.isdecimal()))

    def forget_after(self, step: int) -> None:
        """Drop the lines and sample grids of later steps: a run resumed at ``step`` makes them again."""
        for drawn, grid in self.grids().items():
            if drawn > step:
                grid.unlink()
        if not self.metrics.is_file():
            return
        kept = [row for row in self.rows() if row["step"] <= step]
        temporary = self.metrics.with_suffix(".writing")
        temporary.write_text("".join(json.dumps(row) + "\n" for row in kept))
        os.replace(temporary, self.metrics)


def read_rows(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The rows of a ``metrics.jsonl``, and how many lines were none."""
    rows, broken = [], 0
    for line in path.read_text(encoding="utf-8-sig", errors="replace").splitlines():
        try:
            row = json.loads(line) if line.strip() else {}
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            broken += 1
        elif row:
            rows.append(row)
    return rows, broken
