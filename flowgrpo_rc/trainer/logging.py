"""The log of a run: its first lines, ``metrics.jsonl``, trackers, a progress bar and the closing table."""

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from flowgrpo_rc.correction import RolloutCorrectionConfig
from flowgrpo_rc.correction.options.explanation import in_force
from flowgrpo_rc.messages import one_line
from flowgrpo_rc.report.checks_gap import GAP
from flowgrpo_rc.report.checks_images import HACKING_CHECKS
from flowgrpo_rc.report.finding import OK, fixed, number
from flowgrpo_rc.report.health import check_health
from flowgrpo_rc.report.history import History
from flowgrpo_rc.report.page import headline
from flowgrpo_rc.report.summary import closing_table
from flowgrpo_rc.run_folder import RunFolder
from flowgrpo_rc.trainer.agreement import flatten
from flowgrpo_rc.trainer.config import FlowGRPOConfig
from flowgrpo_rc.trainer.console import surviving_console

NOTED = (
    ("reward", ("reward/mean",), ""),
    ("held-out", ("val/reward/mean",), ""),
    ("kl", ("actor/ppo_kl",), "+.1e"),
    ("clipped", ("actor/pg_clipfrac",), ".0%"),
    ("gap", (GAP[2], GAP[1]), ".1e"),
)
"""Columns of a step's line: a name, candidates for the metric, the first that was logged, and its format; without one
``fixed`` with three decimals."""


class NonFiniteMetricError(RuntimeError):
    """A metric is NaN or infinite; raised before it is written and before the next checkpoint."""


class RunLogger:
    """Writes every step's metrics; on processes other than the main one it only checks them."""

    def __init__(self, folder: RunFolder, accelerator: Any, trackers: list[str], total_steps: int) -> None:
        from rich.console import Console

        self._folder = folder
        self._accelerator = accelerator
        self._trackers = trackers
        self._main = accelerator.is_main_process
        self._total = total_steps
        # No markup: file names may have brackets and colons.
        self.quiet = not (self._main and "console" in trackers)
        """True without the tracker ``console``, and on processes other than the main one."""
        self._console = Console(quiet=self.quiet, highlight=False, markup=False, emoji=False)
        self._progress: Any = None
        self._task: Any = None
        self._settings: dict[str, Any] = {}
        self._said: set[tuple[str, str]] = set()
        """Check and level of the findings of reward hacking that were printed."""

    def start(self, first_step: int, config: FlowGRPOConfig) -> None:
        """Open trackers and the progress bar."""
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._settings = config.to_dict()
        others = [name for name in self._trackers if name != "console"]
        if others:
            try:
                settings = flatten(config.to_dict())
                self._accelerator.init_trackers(
                    config.trainer.project_name,
                    # TensorBoard stores no lists and no ``None``.
                    config={k: v if isinstance(v, int | float | str) else str(v) for k, v in settings.items()},
                    init_kwargs={"wandb": {"name": config.trainer.experiment_name, "dir": str(self._folder.root)}},
                )
            except Exception as error:  # trackers raise errors of every kind, and none may end the run
                self._report_lost(", ".join(others), error)
        if self._console.is_terminal and not self.quiet:
            columns = (MofNCompleteColumn(), BarColumn(24), TimeRemainingColumn(), TextColumn("{task.fields[note]}"))
            self._progress = Progress(*columns, console=self._console)
            self._task = self._progress.add_task("training", total=self._total, completed=first_step, note="")
            self._progress.start()

    def say(self, text: str) -> None:
        """Print a line on the terminal of the main process."""
        with surviving_console():
            self._console.print(text, soft_wrap=True)

    def always(self, text: str) -> None:
        """Print a line on the terminal of the main process, also without the tracker ``console``."""
        if self._main and self.quiet:
            with surviving_console():
                print(text, flush=True)
        self.say(text)

    def alert(self, text: str) -> None:
        """Print an important line; without the tracker ``console`` it is a warning."""
        if self._main and self.quiet:
            warnings.warn(text, stacklevel=2)
        self.say(text)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record one step. Raises ``NonFiniteMetricError`` with the names of metrics that are NaN or infinite, and
        ``RunFolderError`` if ``metrics.jsonl`` cannot be written; trackers did not receive the row either."""
        # Before the row is written: records are never taken back.
        bad = [name for name, value in metrics.items() if not math.isfinite(value)]
        if bad:
            raise NonFiniteMetricError(f"step {step}: non-finite metrics: {', '.join(sorted(bad))}")
        # Metrics are equal on all processes by now; one of them writes.
        if self._main:
            self._folder.append({"step": step, **metrics})
        self._send(lambda tracker: tracker.log(metrics, step=step))
        noted = []
        for name, sources, form in NOTED:
            value = next((metrics[source] for source in sources if source in metrics), None)
            if value is not None:
                noted.append(f"{name} {format(value, form) if form else fixed(value, 3)}")
        note = "  ".join(noted)
        if self._progress is not None:
            self._progress.update(self._task, completed=step, note=note)
        # Without a bar, about twenty lines per run and one per validation.
        is_due = step % max(1, self._total // 20) == 0
        if (is_due and self._progress is None) or "val/reward/mean" in metrics:
            self.say(f"step {step}/{self._total}  {note}")
        if is_due and self._main:
            self._warn_of_hacking(step)

    def _warn_of_hacking(self, step: int) -> None:
        """Print a line once when a check for reward hacking leaves its healthy range, and when it is a problem."""
        history = History(self._folder.rows(), self._settings)
        for finding in filter(None, (check.run(history) for check in HACKING_CHECKS)):
            if finding.level != OK and (finding.check, finding.level) not in self._said:
                self._said.add((finding.check, finding.level))
                self.alert(f"step {step}: {finding.level}: {finding.measured}. {finding.advice}")

    def picture(self, step: int, path: Path) -> None:
        """Send the sample grid of a validation to the trackers."""
        if self._accelerator.trackers:
            image = np.asarray(Image.open(path).convert("RGB"))[None]
            # Channels last, which TensorBoard does not expect.
            layout = {"tensorboard": {"dataformats": "NHWC"}}
            self._send(lambda one: one.log_images({"val/samples": image}, step=step, **layout.get(one.name, {})))

    def _send(self, send: Callable[[Any], object]) -> None:
        """Call ``send`` with each tracker; one that fails is reported, and left out from then on."""
        for tracker in list(self._accelerator.trackers):  # a copy, since one that fails is removed
            try:
                send(tracker)
            except Exception as error:  # see ``start``
                self._accelerator.trackers.remove(tracker)
                self._report_lost(tracker.name, error)

    def summary(self, history: History, files: list[str]) -> None:
        """Print the closing table, with the findings about the run and the files to open next; without the tracker
        ``console`` one line."""
        self._stop_progress()
        if self.quiet:
            held_out = history.series("val/reward/mean")
            reward = ""
            if held_out is not None:
                ends = dict.fromkeys((0, len(held_out) - 1))
                reward = f"; held-out reward {' -> '.join(number(held_out.values[i]) for i in ends)}"
            last = history.steps[-1] if history.steps else 0
            # One that was stopped has printed so.
            if last >= self._total:
                self.always(f"Ended at step {last} of {self._total}{reward}; {self._folder.lora}")
            return
        self._console.print(closing_table(history, title=f"Run {self._folder.root}"))
        self.say(headline(check_health(history.rows, history.config), history))
        self._console.print("Open next:")
        for file in files:
            self._console.print(f"  {file}", soft_wrap=True)

    def close(self) -> None:
        """Close the progress bar and the trackers."""
        self._stop_progress()
        for tracker in self._accelerator.trackers:
            try:
                tracker.finish()
            except Exception as error:  # see ``start``
                self._report_lost(tracker.name, error)
        # Accelerate's ``end_training`` would finish them again.
        self._accelerator.trackers.clear()

    def _report_lost(self, name: str, error: Exception) -> None:
        self.alert(f"error: {name} takes no more metrics ({one_line(error)}); {self._folder.metrics} has them all")

    def _stop_progress(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def announcement(config: FlowGRPOConfig, rc: RolloutCorrectionConfig, root: Path, processes: int) -> list[str]:
    """First lines of a run, one each: batch arithmetic, rewards, rollouts, guidance, correction ``rc`` and replay."""
    rollout = config.actor_rollout_ref.rollout
    window = rollout.window
    actor = config.actor_rollout_ref.actor
    writer = config.algorithm.prompt_writer
    requests = config.data.train_batch_size
    rewrites, prompts = config.rewrites, config.prompts
    mini = actor.ppo_mini_batch_size
    # Per process, as the micro-batch is.
    images = mini * rewrites * rollout.n // processes
    model = config.actor_rollout_ref.model
    clean = actor.diffusion_loss.objective.clean
    row = "places" if clean else "SDE steps"
    size = actor.rows_per_image(window.size)
    micro = f"{min(actor.ppo_micro_batch_size_per_gpu, images)} images x {size} {row}"
    if actor.ppo_micro_batch_rows is not None:
        micro = f"{min(actor.ppo_micro_batch_rows, images * size)} rows ({row} of images)"
    steps = f"{rollout.algo.sde_type}, window {window.size} in [{window.first}, {window.stop}) of "
    if not config.records_steps:
        steps = "without SDE steps, "
    # At 1 and below the negative prompt has no weight.
    guidance = "none"
    if rollout.pipeline.true_cfg_scale > 1:
        batched = model.batch_guidance
        forwards = "one forward for both halves" if batched else "a forward for each half"
        gradient = "the update's gradient goes through both halves"
        if actor.detach_unconditional:
            gradient = "the update's gradient leaves the unconditional half out (detach_unconditional)"
        guidance = f"true_cfg_scale={rollout.pipeline.guidance_in_words}, {forwards}; {gradient}"
    base = "" if model.quantization is None else f"; actor {model.dtype}, its base in {model.quantization}"
    lag = f", {rollout.staleness} batches behind the actor" if rollout.staleness else ""
    scouts = f"; {rollout.n} of {rollout.scout.n} images a prompt are learned from" if rollout.scout.n else ""
    if rollout.scout.redraw:
        scouts += f", drawn again after {rollout.scout_steps} steps as scouts"
    if rollout.has_scouts_engine:
        scouts += f" in {rollout.of_scouts.precision_in_words}"
    learned = (
        f"{requests // mini * actor.ppo_epochs} optimizer step(s) of {mini * rewrites * rollout.n} images, "
        f"micro-batches of {micro}{scouts}"
    )
    correction = [f"Rollout correction: {in_force(rc)}; guard: {rc.guard}"]
    if writer.learns_alone:
        learned = "the image model does not learn"
        correction = []
    written = [] if writer.path is None else [writer.in_words(requests)]
    replay = config.algorithm.replay
    again = [f"Replay: {replay.in_words(requests // mini, rollout.staleness)}"] if replay.batches else []
    return [
        f"Run folder: {root}",
        f"Each step: {prompts} prompts x {rollout.drawn} images = {prompts * rollout.drawn} images of "
        f"{rollout.pipeline.width}x{rollout.pipeline.height} on {processes} process(es); {learned}",
        *written,
        f"Reward: {config.reward.in_words()}",
        f"Rollouts: {rollout.name}, {rollout.precision_in_words}{lag}, {steps}"
        f"{rollout.forwards_in_words(clean=not config.records_steps)}{base}",
        f"Guidance: {guidance}",
        *correction,
        *again,
    ]
