"""FlowGRPO with rollout correction, in one loop. Read ``train_step`` first: each of its stages is one call. Validation,
checkpoints, outputs for people and the building of the parts are in the modules beside this one."""

import os
import select
import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

import numpy as np
import torch
from accelerate.utils import gather_object
from jaxtyping import Int
from tensordict import TensorDict
from torch import Tensor

from flowgrpo_rc.actor import NonFiniteUpdateError
from flowgrpo_rc.actor.mode import ModeInForce
from flowgrpo_rc.actor.noising import noise_images
from flowgrpo_rc.actor.rows import correction_numbers
from flowgrpo_rc.batch import Key, MiniBatch, OldPolicy, correct_old_policy
from flowgrpo_rc.correction import MetricAccumulator
from flowgrpo_rc.data import PromptRecord
from flowgrpo_rc.evaluation.export_names import formats_of
from flowgrpo_rc.gap.rescoring import Rescoring
from flowgrpo_rc.models.base import Conditioning
from flowgrpo_rc.models.lora import ADAPTER_FILE
from flowgrpo_rc.report.history import History
from flowgrpo_rc.rewards import RewardResult
from flowgrpo_rc.rollout import RolloutRequest, Trajectories
from flowgrpo_rc.rollout.base import MeasuresMemory
from flowgrpo_rc.run_folder import RunFolder, RunFolderError
from flowgrpo_rc.trainer import launch
from flowgrpo_rc.trainer.checkpoint import (
    CheckpointError,
    CheckpointStore,
    command_to_continue,
    random_states,
    resume_run,
    save_run,
)
from flowgrpo_rc.trainer.config import FlowGRPOConfig
from flowgrpo_rc.trainer.console import surviving_console
from flowgrpo_rc.trainer.interrupt import stop_request
from flowgrpo_rc.trainer.logging import RunLogger, announcement
from flowgrpo_rc.trainer.outputs import RunOutputs
from flowgrpo_rc.trainer.preferences import PreferenceQueue
from flowgrpo_rc.trainer.replay import Replay
from flowgrpo_rc.trainer.rollout_queue import BatchRequest, RolloutQueue, image_numbers, noising_seeds
from flowgrpo_rc.trainer.scoring import (
    batch_advantages,
    best_and_worst,
    chosen_scouts,
    image_metrics,
    reward_statistics,
)
from flowgrpo_rc.trainer.setup import Run
from flowgrpo_rc.trainer.timer import StageTimer, Timeline, peak_memory, speed
from flowgrpo_rc.trainer.validation import validate

if TYPE_CHECKING:
    from flowgrpo_rc.gap.probe import ProbedRun


class FlowGRPOTrainer:
    """One run: ``fit()`` trains, ``train_step()`` is one batch of it.

    Args:
        config: the validated configuration.

    Raises:
        RunFolderInUseError: another run writes the run folder; raised before anything is loaded or changed.
        ValueError, FileNotFoundError, ImportError: see ``Run``; raised before the model is loaded where
            that is possible.
        CheckpointError: the checkpoint to resume from is damaged or of another model; nothing was changed.
    """

    def __init__(self, config: FlowGRPOConfig) -> None:
        trainer = config.trainer
        self.config = config
        with surviving_console(), ExitStack() as refused:  # a run that is refused leaves nothing behind
            self.folder = RunFolder.open(
                trainer.default_local_dir, fresh=trainer.resume_mode == "disable", lock=launch.rank() == 0
            )
            refused.callback(self.folder.abandon)
            # The lock comes before the load, which may take minutes.
            self.run = Run(config, str(self.folder.root))
            refused.callback(self.run.close_engines)
            refused.callback(self.run.end_rewards)
            self._set_up()
            refused.pop_all()

    def _set_up(self) -> None:
        config = self.config
        trainer = config.trainer
        run = self.run
        self.accelerator = run.accelerator
        self._main = self.accelerator.is_main_process
        if not self._main:
            self.folder = run.folder
        self._fitted = False
        self.timer = StageTimer(self.accelerator.device)
        self.logger = RunLogger(self.folder, self.accelerator, list(trainer.logger), run.total_steps)
        self.outputs = RunOutputs(self.folder, self.logger.alert)
        # Before the resume, which restores the guard's state.
        run.guard.say = self.logger.alert
        if run.writer is not None:
            run.writer.guard.say = self.logger.alert
        run.replay.say = self.logger.alert
        if self.folder.lock is not None and self.folder.lock.problem is not None:
            self.logger.alert(
                f"{self.folder.root}: not locked ({self.folder.lock.problem}); start no second run in this folder"
            )
        self.checkpoints = CheckpointStore(self.folder.checkpoints, trainer.max_actor_ckpt_to_keep)
        # After everything that can be refused: from here on the run folder changes.
        source, self.step = resume_run(run, self.checkpoints, self.folder, self.logger.alert)
        self._saved_step = -1 if source is None else self.step
        if source is not None:
            self.logger.say(f"Resumed from {source} at step {self.step}")
        self.timeline = Timeline(run.engine, self.accelerator)
        self.mode = run.guard.mode
        """The mode in force: the configured one, or the one that the guard has replaced it by."""
        self.adapter = run.adapter
        # The engine starts with the base model; even an untrained adapter has to arrive once.
        self.adapter.push(self.step)
        if run.writer is not None:
            run.writer.push(self.step)
        configured = ModeInForce.configured(config.actor_rollout_ref.actor)
        self.rollouts = (PreferenceQueue if config.data.preferences else RolloutQueue)(run, configured)
        rollout, prompts = config.actor_rollout_ref.rollout, config.prompts
        bands = (run.clip_bands, run.rejection_bands)
        self.rescoring = Rescoring(rollout, configured, prompts, run.actor, self.adapter, *bands)
        self.replay = Replay(run, self._set_limits, self._naming, self._gather)

    def train_step(self) -> dict[str, float]:
        """Roll out one batch of prompts, reward it, correct it, learn from it; returns the step's metrics."""
        learns_images = not self.config.algorithm.prompt_writer.learns_alone
        with self.timer("rollout"):
            request = self.rollouts.next(self.step)
        with request.scoring as scoring:
            with self.timer("rollout"):
                batch, images = self._rollout(request)
            # Before the rewards, which may still be computed in a thread while the probe uses the GPU. Scouts that are
            # drawn again have recorded nothing.
            probes = request.scouts is None and learns_images
            sync_metrics = self._probe(batch, request) if probes else {}
            with self.timer("reward"):
                # While servers and threads still score.
                metrics = image_metrics(images, batch[Key.GROUP], self._gather)
                scored = scoring.result(images)
                self.timer.beside("reward_work", scoring.seconds)
                metrics |= reward_statistics(scored, self._gather)
        if self.run.rollout_dump is not None:
            with self.timer("dump"):
                self.outputs.rollout(self.run, self.step, images, request, scored)
        if self.run.writer is not None and request.rewrites is not None:
            with self.timer("writer"):
                metrics |= self.run.writer.learn(request.rewrites, scored.total, self._gather)
        if learns_images:
            metrics |= self._learn(batch, request, scored)
        self.step += 1
        with self.timer("sync"):
            metrics |= self.adapter.metrics()
            # The engine proves that it holds this adapter before it draws the next batch.
            self.adapter.push(self.step)
            if self.run.writer is not None:
                self.run.writer.push(self.step)
        rollout = self.config.actor_rollout_ref.rollout
        if not self.config.data.preferences:
            metrics |= rollout.forwards_metrics(clean=not self.config.records_steps)
        metrics |= sync_metrics
        if learns_images:
            # The guard judges the metrics of this step and sets the mode of the next one.
            metrics |= self.run.guard(metrics, self.step)
            self.mode = self.run.guard.mode
        return metrics | self._peak_memory()

    def _learn(self, batch: TensorDict, request: BatchRequest, scored: RewardResult) -> dict[str, float]:
        """Correct the images of a batch and learn from them, and from those of the replay buffer; returns metrics."""
        prompts, cond = request.prompts, request.request.conditioning
        metrics: dict[str, float] = {}
        scouts = self.config.actor_rollout_ref.rollout.scout
        rows = torch.arange(len(batch))
        advantage_metrics: dict[str, float] = {}
        if scouts.n:
            # Before any work on the images that are left out.
            rows, batch, advantage_metrics = self._choose(scored, batch, request)
        with self.timer("score"):
            if self.mode.objective.clean:
                self._noise(batch, request, rows)
            old = self._score(batch, cond)
        with self.timer("correct"):
            old, gap = self._correct(batch, old)
        if not scouts.n:
            # After the correction: a rejection-aware baseline leaves rejected images out of their group.
            with self.timer("advantage"):
                batch[Key.ADVANTAGES], advantage_metrics = self._advantages(scored, batch, old)
        with self.timer("update"), self._naming(batch, prompts):
            minis = self._mini_batches(batch, old)
            update = self.run.actor.update(batch, cond, minis, self.mode, gap=gap, keep_old=bool(self.run.replay))
        if self.run.replay:
            with self.timer("replay"):
                metrics |= self.replay.learn(self.step, self.mode)
                self.replay.keep(self.step, self.adapter.behind, batch, request, update, self.mode)
        return metrics | advantage_metrics | update.metrics

    def _rollout(self, request: BatchRequest) -> tuple[TensorDict, np.ndarray]:
        """The recorded steps and the images of the batch; its scoring receives images as they are finished."""
        batch, images = self.rollouts.draw()
        batch[Key.GROUP] = request.group
        return batch, images.numpy()

    def _noise(self, batch: TensorDict, request: BatchRequest, rows: Int[Tensor, " B"]) -> None:
        """Noise the clean images of a batch; ``rows`` are their places among all that were drawn."""
        numbers = image_numbers(request.group, self.config.actor_rollout_ref.rollout.drawn)
        clean = self.config.actor_rollout_ref.actor.clean
        seeds = noising_seeds(self.config.rollout_seed, request.step, numbers[rows], request.group[rows], clean)
        asked = request.request
        size = (asked.conditioning.height, asked.conditioning.width)
        noise_images(batch, seeds, clean, self.run.model, size, asked.num_inference_steps)

    def _choose(
        self, scored: RewardResult, batch: TensorDict, request: BatchRequest
    ) -> tuple[Int[Tensor, " M"], TensorDict, dict[str, float]]:
        """Choose the scouts that are learned from, by advantages within all of them. Returns their places among all
        that were drawn, their batch with advantages, and metrics."""
        rollout = self.config.actor_rollout_ref.rollout
        with self.timer("advantage"):
            batch[Key.ADVANTAGES], metrics = self._advantages(scored, batch, None)
            where = (self.config.rollout_seed, self.step)
            rows = chosen_scouts(batch[Key.ADVANTAGES], batch[Key.GROUP], rollout.n, rollout.scout.select, *where)
        if request.scouts is None:
            batch = batch[rows]
        else:
            batch, redrawn = self._redraw(request, rows, scored)
            metrics |= redrawn | self._probe(batch, request)
        # Their baseline is the mean of all, so that this shows what the choice shifts.
        learned = self._gather(batch[Key.ADVANTAGES]).double()
        metrics["scout/advantage_mean"] = float(learned.mean())
        metrics["scout/advantage_std"] = float(learned.std(correction=0))
        return rows, batch, metrics

    def _redraw(
        self, request: BatchRequest, rows: Int[Tensor, " M"], scored: RewardResult
    ) -> tuple[TensorDict, dict[str, float]]:
        """The batch of the scouts that are kept, drawn as they are learned from, with their new rewards in ``scored``
        and advantages; and the change of their rewards."""
        with self.timer("rollout"):
            batch, images = self.rollouts.redraw(request, rows)
            batch[Key.GROUP] = request.group[rows]
        with self.timer("reward"):
            again = request.scoring.again(rows, images.numpy())
            change = self._gather(torch.from_numpy(again.total - scored.total[rows.numpy()])).double()
        for whole, part in ((scored.total, again.total), *((scored.parts[n], again.parts[n]) for n in scored.parts)):
            whole[rows.numpy()] = part
        with self.timer("advantage"):
            everyone = TensorDict({Key.GROUP: request.group}, batch_size=[len(request.group)])
            batch[Key.ADVANTAGES] = self._advantages(scored, everyone, None)[0][rows]
        return batch, {
            "scout/reward_change": float(change.mean()),
            "scout/reward_change_abs": float(change.abs().mean()),
        }

    def _probe(self, batch: TensorDict, request: BatchRequest) -> dict[str, float]:
        """Metrics of the gap, from some images that are scored again."""
        with self.timer("probe"), self._naming(batch, request.prompts):
            return self.rescoring(batch, request.request.conditioning, self.step)

    def generate(self, request: RolloutRequest) -> Trajectories:
        """Sample, and check that the engine used the requested adapter, schedule, guidance and noise."""
        return self.run.generate(request)

    def _score(self, batch: TensorDict, cond: Conditioning) -> OldPolicy | None:
        """The old policy: the rollout's in bypass mode, an average's, else the actor's, of the last rows of the batch.
        The rows before, which may be all, are the first mini-batch: the update's own forward supplies their old policy.
        """
        self._set_limits(batch)
        if self.mode.bypasses:
            # No pass of the actor: the engine's own log-probs are the old policy's.
            return OldPolicy.of_rollout(batch)
        # Without a lag the policy that drew is the old one, which a buffer keeps unless the objective has none.
        differs = self.adapter.behind or (bool(self.run.replay) and not self.mode.objective.needs_old)
        if self.mode.objective.clean and differs and self.mode.rollout_correction.corrects:
            # The policy that drew scores its images at the same noise.
            with self.adapter.actor_at_rollout_version():
                batch[Key.ROLLOUT_LOG_PROBS] = self.run.actor.score(batch, cond).log_probs
        elif not self.mode.objective.needs_old:
            return None
        if self.adapter.old is not None:
            with self.adapter.actor_at_old_policy():
                return self.run.actor.score(batch, cond)
        start = len(batch) // self.config.mini_batches if self.config.first_mini_batch_is_free else 0
        return self.run.actor.score(batch[start:], cond) if start < len(batch) else None

    def _set_limits(self, batch: TensorDict) -> None:
        """Add calibrated limits, where the mode in force has some."""
        if self.run.rejection_bands is not None:
            batch[Key.ROLLOUT_RS_BOUNDS] = self.run.rejection_bands.bounds(batch[Key.TIMESTEPS])
        if self.mode.bypasses and self.run.clip_bands is not None:
            batch[Key.CLIP_WIDTHS] = self.run.clip_bands.widths(batch[Key.TIMESTEPS])

    def _correct(self, batch: TensorDict, old: OldPolicy | None) -> tuple[OldPolicy | None, MetricAccumulator]:
        """Decoupled mode: weights and rejection of the scored rows. In bypass mode the loss computes them."""
        gap = MetricAccumulator()
        # Clean images that the present policy drew, or whose correction is off, have nothing to be compared with.
        compares = Key.ROLLOUT_LOG_PROBS in batch.keys()  # noqa: SIM118  (a TensorDict iterates over its rows)
        if old is not None and not self.mode.bypasses and compares:
            numbers = correction_numbers(batch)[len(batch) - len(old) :]
            old, moments = correct_old_policy(old, numbers, self.mode.rollout_correction)
            gap.add(moments)
        return old, gap

    def _advantages(
        self, scored: RewardResult, batch: TensorDict, old: OldPolicy | None
    ) -> tuple[Tensor, dict[str, float]]:
        keep = None
        if self.config.algorithm.rejection_aware_baseline:
            # Such a run has no free mini-batch, so that every row is scored and corrected by now.
            assert old is not None
            assert old.keep is not None
            keep = old.keep.any(1)
        rank = self.accelerator.process_index
        return batch_advantages(self.config, scored, batch[Key.GROUP], keep, self._gather, rank)

    def _mini_batches(self, batch: TensorDict, old: OldPolicy | None) -> list[MiniBatch]:
        """The rows of each optimizer step, with their old policy where they have been scored."""
        size = len(batch)
        start = size - (0 if old is None else len(old))
        parts = torch.arange(size).chunk(self.config.mini_batches)
        if self.mode.objective.paired:
            parts = [best_and_worst(rows, batch[Key.ADVANTAGES], batch[Key.GROUP]) for rows in parts]
        return [MiniBatch(rows, None if old is None or rows[0] < start else old.rows(rows - start)) for rows in parts]

    @contextmanager
    def _naming(self, batch: TensorDict, prompts: list[PromptRecord]) -> Iterator[None]:
        """Add step and prompts to the error of samples that are not finite, which every process raises."""
        try:
            yield
        except NonFiniteUpdateError as error:
            own = [prompts[int(batch[Key.PROMPT_INDEX][i])].prompt for i in error.samples[:8]]
            # Every process raises this error, so that all of them can take part in the gather.
            texts = dict.fromkeys(gather_object(own))
            named = f"step {self.step + 1}: {error}; their prompts: {', '.join(map(repr, texts)) or 'unknown'}"
            raise NonFiniteUpdateError(named, error.samples) from error

    def fit(self) -> RunFolder:
        """Train to the last step; validate, save, log and draw on the way. Returns the run folder, unlocked.

        An interrupt (Ctrl-C, SIGTERM, SIGHUP) ends the run after the step in flight, with a checkpoint. A console that
        fails does not end it. On several processes, start the script with ``torchrun``, which ends all of them where
        one fails.

        Raises:
            RunFolderError: something could not be written; the message names what was kept.
            RuntimeError: it has been called before.
        """
        if self._fitted:
            raise RuntimeError(
                "fit() ends a trainer, whose engine is closed. Make another FlowGRPOTrainer(config); with "
                "trainer.resume_mode=auto it goes on where this one stopped"
            )
        self._fitted = True
        with surviving_console():
            try:
                if self._main:
                    for moved in self.folder.write_config(self.config.to_dict()):
                        self.logger.alert(f"Moved aside in {self.folder.root}: {moved}")
                self._announce()
                self.logger.start(self.step, self.config)
                with stop_request(self._announce_stop) as stop:
                    try:
                        self._loop(stop)
                    finally:
                        self.rollouts.abandon()
                    self._finish()
            except Exception as error:
                foreseen = type(error).__module__.startswith("flowgrpo_rc") or isinstance(error, OSError)
                # A line on what remains, before the error's own line or, where nobody foresaw it, its traceback.
                if self._main and (not foreseen or self.logger.quiet) and not isinstance(error, RunFolderError):
                    newest = self.checkpoints.newest_complete()
                    then = "there is no checkpoint"
                    if newest is not None:
                        then = f"{newest} remains; continue with trainer.resume_mode=auto"
                    print(f"The run failed after step {self.step} of {self.run.total_steps}; {then}", file=sys.stderr)
                raise
            finally:
                self.run.close_engines()
                self.run.end_rewards()
                if self._main:
                    self.run.replay.end()
                self.logger.close()
                self.folder.close()
            # After a failure this would wait for processes that are in another collective.
            self.accelerator.end_training()
        return self.folder

    def _loop(self, stop: Event) -> None:
        """Train to the last step or to a request to stop."""
        trainer = self.config.trainer
        images = self.config.prompts * self.config.actor_rollout_ref.rollout.drawn
        if self.step == 0 and trainer.val_before_train and self.run.val_prompts:
            self._log(self._validate() | self.timer.take())
        # A request to one process stops all of them: they must end at the same step.
        while self.interrupted and not bool(self._gather(torch.tensor([stop.is_set()])).any()):
            profiled = self.step + 1 in trainer.profile_steps
            with self.outputs.profile(self.step + 1, self.accelerator) if profiled else nullcontext():
                metrics = self.train_step()
            # Before the validation: after one that fails on one process, the others may wait for it for ever.
            line, engine_metrics = self.timeline.take(self.timer.take_spans())
            last = not self.interrupted
            try:
                if self.run.val_prompts and (last or _due(self.step, trainer.test_freq)):
                    metrics |= self._validate()
            finally:  # the step is done, and its row is written even if its validation fails
                with self.timer("log"):
                    times = self.timer.take()
                    times |= speed(times, images, self.accelerator.num_processes, self.run.seconds_at_peak)
                    self._log(metrics | times | engine_metrics)
                    if self._main:
                        self.outputs.timeline({"step": self.step, **line})
            if last or _due(self.step, trainer.save_freq):
                with self.timer("save"):
                    self.save(last=last)
        if self.interrupted:
            # A run that was stopped right after a save has nothing new to save.
            if self.step != self._saved_step:
                self.save(last=True)
            self.logger.always(
                f"Stopped after step {self.step} of {self.run.total_steps}; continue with trainer.resume_mode=auto "
                f"trainer.default_local_dir={self.folder.root}"
            )

    def _log(self, metrics: dict[str, float]) -> None:
        try:
            self.logger.log(self.step, metrics)
        except RunFolderError as error:
            newest = self.checkpoints.newest_complete() or "none"
            raise RunFolderError(
                f"{error}. Kept: the rows before it, and the newest complete checkpoint ({newest}); free some space "
                "and start again with trainer.resume_mode=auto"
            ) from error

    def _validate(self) -> dict[str, float]:
        writes = nullcontext() if self.run.writer is None else self.run.writer.adapter.for_validation()
        with self.timer("validate"), self.adapter.for_validation(), writes:
            found = validate(self.run, self.generate)
        if self.run.validation_dump is not None:
            with self.timer("dump"):
                self.outputs.images(self.run.validation_dump, self.step, found.own)
        if self._main and found.shown:
            grid = self.outputs.grid(self.step, found.shown)
            if grid is not None:
                self.logger.picture(self.step, grid)
        return found.metrics

    def save(self, *, last: bool = False) -> None:
        """Write ``checkpoints/step_N``, on the main process, or raise ``CheckpointError``. With ``last``, where no step
        follows, ``fit`` reports the error at the end, after the final adapter is written."""
        self._saved_step = self.step
        # Rewards may draw from the global generators of every process.
        states = gather_object([random_states()])
        if self._main:
            try:
                save_run(self.run, self.checkpoints, self.step, states)
            except CheckpointError as error:
                if not last:
                    raise
                self.outputs.unwritten.append(("the last checkpoint", error))
        self.accelerator.wait_for_everyone()

    def _announce(self) -> None:
        say = self.logger.say
        rc = self.mode.rollout_correction
        where, *lines = announcement(self.config, rc, self.folder.root, self.accelerator.num_processes)
        if self.folder.beside is not None:
            where += f" ({self.folder.beside} holds another run"
            command = command_to_continue(self.folder.beside, self.run.total_steps, self.accelerator.num_processes)
            where += ")" if command is None else f"; this continues it: {command})"
        self.logger.always(where)
        for text in lines:
            say(text)
        for dump in (self.run.rollout_dump, self.run.validation_dump):
            if self.step == 0 and dump is not None and dump.used:
                self.logger.alert(f"{dump.root} has images of an earlier run; this run's replace those of equal steps")
        if "tensorboard" in self.config.trainer.logger:
            say(f"TensorBoard: tensorboard --logdir {shlex.quote(str(self.folder.root))}")
        if self.run.encoding is not None:
            say(f"Prompts: {self.run.encoding}; in {self.run.store.folder}")
        say(f"Kernels of the actor: {self.run.kernels_in_words()}")
        if self.run.actor.recomputes:
            say("Gradient checkpointing is on: activations are recomputed in the backward pass, to save memory")
        if not self.interrupted:
            say(
                f"This run is already at step {self.step} of {self.run.total_steps}; raise "
                "trainer.total_training_steps to go on, or start afresh with trainer.resume_mode=disable"
            )

    def _finish(self) -> None:
        """Write the final adapter, the plots, the before/after picture and the closing table. Raises ``RunFolderError``
        with all that could not be written, during the run too, and what was kept."""
        adapters: list[Path] = []
        if self._main:
            adapters = self.outputs.adapters(self.run)
            history = History(self.folder.rows(), self.config.to_dict(), timeline=self.folder.timeline_lines())
            files = [*self.outputs.pictures(history), self.folder.metrics, *adapters]
            self.logger.summary(history, [str(path) for path in files])
            if self.folder.lora / ADAPTER_FILE in adapters:
                form = formats_of(type(self.run.model.pipe).__name__)[1]
                run = shlex.quote(str(self.folder.root))
                self.logger.say(f"For other programs: flowgrpo-rc export-lora {run} --format {form}")
        self.accelerator.wait_for_everyone()
        self.outputs.raise_unwritten(self.step, [self.folder.metrics, *adapters, self.checkpoints.newest_complete()])

    def _announce_stop(self) -> None:
        """Called by a signal's handler, which may neither use a buffered stream nor wait for a reader."""
        if self._main:
            with suppress(OSError, ValueError):  # standard error may be closed
                if select.select([], [2], [], 0)[1]:
                    os.write(2, b"\nStopping after this step, with a checkpoint; Ctrl-C again ends at once\n")

    def probed_run(self) -> "ProbedRun":
        """The parts of this run that ``flowgrpo_rc.gap.probe`` measures, before the first step."""
        # Training needs nothing of the probe's research.
        from flowgrpo_rc.gap.probe import ProbedRun

        parts = self.config.actor_rollout_ref
        return ProbedRun(
            model=parts.model,
            rollout=parts.rollout,
            mode=ModeInForce.configured(parts.actor),
            actor=self.run.actor,
            prompts=self.run.train_prompts,
            condition=lambda prompts: self.run.conditioning(prompts, parts.rollout.pipeline),
            generate=self.generate,
            device=self.accelerator.device,
            seed=self.config.trainer.seed,
            scored_share=self.config.scored_share,
        )

    def _peak_memory(self) -> dict[str, float]:
        """The most memory that any process has held, and the engines' own figures."""
        own = peak_memory(self.accelerator.device)
        if isinstance(self.run.engine, MeasuresMemory):
            own |= self.run.engine.memory_metrics()
        everywhere = self._gather(torch.tensor([list(own.values())]))
        return dict(zip(own, everywhere.amax(0).tolist(), strict=True))

    @property
    def interrupted(self) -> bool:
        """True until the run has reached its last step."""
        return self.step < self.run.total_steps

    def _gather(self, values: Tensor) -> Tensor:
        """``values`` of all processes in rank order, on the host."""
        # Accelerate would move the values to the device and back.
        if self.accelerator.num_processes == 1:
            return values.cpu()
        return self.accelerator.gather(values.to(self.accelerator.device)).cpu()


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
