"""What people watch: metrics.jsonl, accelerate's trackers, a progress bar, and a closing table."""

import math
import warnings
from typing import Any

from flowgrpo_rc.run_folder import RunFolder
from flowgrpo_rc.trainer.console import surviving_console
from flowgrpo_rc.trainer.plots import GAP, GAP_MAX


class NonFiniteMetricError(RuntimeError):
    """A metric is NaN or infinite; raised before it is written and before the next checkpoint."""


class RunLogger:
    """Writes every step's metrics everywhere they are wanted; does nothing but count on other ranks."""

    def __init__(self, folder: RunFolder, accelerator: Any, trackers: list[str], total_steps: int) -> None:
        from rich.console import Console

        self._folder, self._accelerator, self._trackers = folder, accelerator, trackers
        self._main, self._total = accelerator.is_main_process, total_steps
        self._console = Console(
            quiet=not (self._main and "console" in trackers),
            highlight=False,
            markup=False,  # the names of files are text, whatever brackets and colons they have
            emoji=False,
        )
        self._progress: Any = None
        self._task: Any = None

    def start(self, first_step: int, config: dict[str, Any], project: str, experiment: str) -> None:
        """Open trackers and the progress bar."""
        if any(t != "console" for t in self._trackers):
            try:
                self._accelerator.init_trackers(
                    project,
                    config=_flat(config),
                    init_kwargs={"wandb": {"name": experiment, "dir": str(self._folder.root)}},
                )
            except Exception as error:  # trackers raise errors of every kind, and none may cost the run
                self._lost(", ".join(t for t in self._trackers if t != "console"), error)
        if self._console.is_terminal and not self._console.quiet:
            self._progress = _progress_bar(self._console)
            self._task = self._progress.add_task("training", total=self._total, completed=first_step, note="")
            self._progress.start()

    def say(self, text: str) -> None:
        """A line on the terminal of the main process."""
        with surviving_console():
            self._console.print(text, soft_wrap=True)

    def alert(self, text: str) -> None:
        """What no run may miss: a line on the terminal, or without the tracker ``console`` a warning."""
        if self._main and self._console.quiet:
            warnings.warn(text, stacklevel=2)
        self.say(text)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record one step.

        Raises:
            NonFiniteMetricError: a metric is NaN or infinite, by name.
            RunFolderError: ``metrics.jsonl`` cannot be written; trackers have not been told either.
        """
        bad = [name for name, value in metrics.items() if not math.isfinite(value)]
        if bad:
            raise NonFiniteMetricError(f"step {step}: non-finite metrics: {', '.join(sorted(bad))}")
        if self._main:
            self._folder.append({"step": step, **metrics})
        for tracker in list(getattr(self._accelerator, "trackers", ())):
            try:
                tracker.log(metrics, step=step)
            except Exception as error:  # see ``start``
                self._accelerator.trackers.remove(tracker)
                self._lost(tracker.name, error)
        self._show(step, metrics)

    def close(self) -> None:
        """Close the progress bar and the trackers."""
        self._stop_progress()
        trackers = list(getattr(self._accelerator, "trackers", ()))
        for tracker in trackers:
            try:
                tracker.finish()
            except Exception as error:  # see ``start``
                self._lost(tracker.name, error)
        if trackers:
            self._accelerator.trackers.clear()
        self._accelerator.end_training()

    def _lost(self, name: str, error: Exception) -> None:
        reason = " ".join(str(error).split()) or type(error).__name__
        self.alert(f"error: {name} takes no more metrics ({reason}); {self._folder.metrics} has them all")

    def _stop_progress(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _show(self, step: int, metrics: dict[str, float]) -> None:
        note, validated = _note(metrics), "val/reward/mean" in metrics
        if self._progress is not None:
            self._progress.update(self._task, completed=step, note=note)
        if validated or (self._progress is None and step % max(1, self._total // 20) == 0):
            self.say(f"step {step}/{self._total}  {note}")

    def summary(self, rows: list[dict[str, Any]], files: list[str]) -> None:
        """The closing table: what changed, what to worry about, what to open next."""
        from rich.table import Table

        self._stop_progress()
        table = Table(title=f"Run {self._folder.root}", show_header=True)
        for column in ("", "first", "last"):
            table.add_column(column, justify="left" if not column else "right")
        entries = (
            ("held-out reward (fixed noise)", ("val/reward/mean",), ".3f"),
            ("training reward", ("reward/mean",), ".3f"),
            ("mean |log-prob gap|, rollout vs training", GAP, ".2e"),
            ("largest |log-prob gap|", GAP_MAX, ".2e"),
            ("share of ratios outside the clip band", ("actor/pg_clipfrac",), ".1%"),
            ("rejected", tuple(f"{p}rollout_corr/rollout_rs_masked_fraction" for p in ("actor/", "")), ".1%"),
            ("KL from the previous policy (ppo_kl)", ("actor/ppo_kl",), ".1e"),
        )
        for label, names, form in entries:
            values = [row[n] for row in rows for n in names if n in row]
            if values:
                table.add_row(label, format(values[0], form), format(values[-1], form))
        seconds = [row["timing_s/step"] for row in rows if "timing_s/step" in row]
        if seconds:
            table.add_row("seconds per step (median)", "", f"{sorted(seconds)[len(seconds) // 2]:.2f}")
        self._console.print(table)
        self._console.print("Open next:")
        for file in files:
            self._console.print(f"  {file}", soft_wrap=True)


def _note(metrics: dict[str, float]) -> str:
    parts = [f"reward {metrics['reward/mean']:.3f}"] if "reward/mean" in metrics else []
    if "val/reward/mean" in metrics:
        parts.append(f"held-out {metrics['val/reward/mean']:.3f}")
    if "actor/ppo_kl" in metrics:
        parts.append(f"kl {metrics['actor/ppo_kl']:+.1e}  clipped {metrics['actor/pg_clipfrac']:.0%}")
    gap = next((metrics[n] for n in GAP if n in metrics), None)
    return "  ".join([*parts, *([f"gap {gap:.1e}"] if gap is not None else [])])


def _progress_bar(console: Any) -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        MofNCompleteColumn(),
        BarColumn(24),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
    )


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as ``a.b.c: value`` with values that every tracker stores."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            flat |= _flat(value, f"{name}.")
        else:
            flat[name] = value if isinstance(value, (int, float, str, bool)) else str(value)
    return flat
