"""Requests of rollouts, and their queue: batches are submitted up to ``rollout.ahead`` batches before the actor learns
from them."""

from collections import deque
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int, UInt8
from tensordict import TensorDict
from torch import Tensor

from flowgrpo_rc.actor.config import CleanImagesConfig
from flowgrpo_rc.actor.mode import ModeInForce
from flowgrpo_rc.batch import Key
from flowgrpo_rc.data import PromptRecord
from flowgrpo_rc.rollout import RolloutPool, RolloutRequest
from flowgrpo_rc.rollout.base import rows_of
from flowgrpo_rc.rollout.pool import PendingRollout
from flowgrpo_rc.rollout.proof import HeldAdapter, check_rollout
from flowgrpo_rc.rollout.seeds import IMAGE, NOISING, START, WINDOW, generator_for, seed_for
from flowgrpo_rc.sde import draw_window_start, progressive_window_start
from flowgrpo_rc.trainer.scoring import RolloutScoring
from flowgrpo_rc.trainer.setup import Run
from flowgrpo_rc.trainer.writing import Rewrites


@dataclass(frozen=True)
class BatchRequest:
    """The images of this process in one batch, before they are drawn."""

    step: int  # number of batches that are learned from before it
    prompts: list[PromptRecord]  # the prompts; each is a row of the request's conditioning
    chosen: list[int]  # their places in the training data
    group: Int[Tensor, " B"]  # for each image the position of its prompt in the batch of all processes
    request: RolloutRequest  # the images as they are learned from
    scoring: RolloutScoring  # takes the images and returns their rewards
    rewrites: Rewrites | None = None  # the prompt writer's, which are ``prompts`` then
    scouts: RolloutRequest | None = None  # the images as they are drawn first, where those that are kept are redrawn

    @property
    def asked(self) -> RolloutRequest:
        """The request that is drawn first."""
        return self.scouts or self.request


def image_numbers(group: Int[Tensor, " B"], n: int) -> Int[Tensor, " B"]:
    """Numbers of the images in the batch of all processes; ``group`` has the positions of their prompts."""
    return group * n + torch.arange(n).repeat(len(group) // n)


def noising_seeds(
    seed: int, step: int, numbers: Int[Tensor, " B"], group: Int[Tensor, " B"], config: CleanImagesConfig
) -> list[int]:
    """Seeds of the noise that clean images get anew: one for each group, or for each image."""
    addresses = group if config.shared_noise else numbers
    return [seed_for(seed, NOISING, step, address) for address in addresses.tolist()]


class RolloutQueue:
    """Submits batches up to ``rollout.ahead`` batches early, and returns their images in order.

    A ``RolloutPool`` draws them while the actor learns from earlier batches. Any other engine draws a batch when it is
    wanted, with the same numbers. ``mode`` is the configured one.
    """

    def __init__(self, run: Run, mode: ModeInForce) -> None:
        self._run = run
        # Of the images that are drawn first.
        self._engine = run.scouts_engine or run.engine
        self._adapter = run.adapter
        self._reward = run.reward
        rollout = run.config.actor_rollout_ref.rollout
        self._ahead = rollout.ahead
        # In bypass mode the engine is the old policy, and objectives that compare means need its means. The guard may
        # change the mode before the batch is learned from, so that the configured mode decides.
        self._record_means = mode.objective.needs_old_means and mode.bypasses
        self._queue: deque[tuple[BatchRequest, HeldAdapter, PendingRollout | None]] = deque()

    def next(self, step: int) -> BatchRequest:
        """The batch of this step, after the batches that are due by then have been submitted."""
        first = self._queue[-1][0].step + 1 if self._queue else step
        # The batch of this step is drawn also beyond the run's last one.
        end = max(step + 1, min(step + self._ahead + 1, self._run.total_steps))
        for due in range(first, end):
            batch = self.request(due)
            pending = self._submit(batch)
            self._queue.append((batch, self._held, pending))
        return self._queue[0][0]

    @property
    def _held(self) -> HeldAdapter:
        """The adapter that the engine of the images that are drawn first must hold."""
        return self._adapter.held if self._engine is self._run.engine else self._adapter.held_by_scouts

    def _submit(self, batch: BatchRequest) -> PendingRollout | None:
        """Have a pool begin to draw; ``None`` where the batch is drawn when it is wanted."""
        if not isinstance(self._engine, RolloutPool):
            return None
        try:
            self._adapter.give_for(batch.step)
            return self._engine.submit(batch.asked, batch.scoring.take_ahead)
        except BaseException:
            batch.scoring.abandon()  # it is not in the queue, where ``abandon`` would find it
            raise

    def draw(self) -> tuple[TensorDict, UInt8[Tensor, "B H W 3"]]:
        """Wait for the images of the batch that ``next`` returned last, and remove it. Its scoring takes images as they
        arrive. Returns the recorded steps, the clean latents, or of scouts the prompts alone, and the images.

        Raises:
            RolloutSyncError: they were drawn with another adapter or other settings than requested.
        """
        batch, held, pending = self._queue.popleft()
        # A pool has drawn since the request; its adapter is the one of that time.
        if pending is not None:
            answer = pending.result(batch.scoring.take)
        else:
            self._adapter.give_for(batch.step)
            answer = self._engine.generate(replace(batch.asked, on_images=batch.scoring.take))
            held = self._held
        rollout = self._run.config.actor_rollout_ref.rollout
        dtype = (rollout if batch.scouts is None else rollout.of_scouts).dtype
        check_rollout(batch.asked, answer, self._run.model, held, dtype)
        # Scouts, and images that are not learned from, are drawn without a batch; a rollout records its steps.
        if answer.batch is None:
            index = batch.request.prompt_index.clone()
            return TensorDict({Key.PROMPT_INDEX: index}, batch_size=[len(index)]), answer.images
        return answer.batch, answer.images

    def redraw(self, batch: BatchRequest, rows: Int[Tensor, " M"]) -> tuple[TensorDict, UInt8[Tensor, "M H W 3"]]:
        """Draw some images of a batch as they are learned from, from the noise of their scouts; returns as ``draw``."""
        answer = self._run.generate(rows_of(batch.request, rows))
        assert answer.batch is not None
        return answer.batch, answer.images

    def abandon(self) -> None:
        """Stop the scoring of all batches in the queue."""
        for batch, _, _ in self._queue:
            batch.scoring.abandon()

    def request(self, step: int) -> BatchRequest:
        """The request of a step: the next prompts of the data. Called once a step, in order. Each mini-batch is split
        over the processes, so that an optimizer step sees the same images with any number of processes."""
        run = self._run
        rollout = run.config.actor_rollout_ref.rollout
        processes = run.accelerator.num_processes
        mini = run.config.actor_rollout_ref.actor.ppo_mini_batch_size
        # Positions in the batch of this process's prompts.
        positions = torch.arange(run.config.data.train_batch_size).view(-1, processes, mini // processes)
        positions = positions[:, run.accelerator.process_index].flatten()
        batch = next(run.sampler)
        chosen = [int(batch[i]) for i in positions.tolist()]
        scored = prompts = [run.train_prompts[place] for place in chosen]
        rewrites = None
        if run.writer is not None:
            rewrites = run.writer.write(step, prompts, positions.tolist())
            scored, prompts = rewrites.scored, rewrites.drawn
            count = len(prompts) // len(positions)
            positions = (positions[:, None] * count + torch.arange(count)).flatten()
        group = positions.repeat_interleave(rollout.drawn)
        # Seeds depend on step and image alone, so that any number of processes and any resume draws the same noise.
        numbers = image_numbers(group, rollout.drawn).tolist()
        seeds = [seed_for(run.config.rollout_seed, IMAGE, step, number) for number in numbers]
        recorded = rollout.request_fields(clean=not run.config.records_steps)
        if not run.config.records_steps:
            # A prompt writer that learns alone needs no latents.
            recorded["record_clean"] = not run.config.algorithm.prompt_writer.learns_alone
        else:
            starts = torch.tensor(self.window_starts(positions.tolist(), step))
            recorded |= {
                "window_starts": starts.repeat_interleave(rollout.drawn),
                "record_means": self._record_means,
                "start_seeds": self._start_seeds(step, group) if rollout.algo.init_same_noise else None,
            }
        request = RolloutRequest(
            conditioning=run.conditioning(prompts, rollout.pipeline),
            prompt_index=torch.arange(len(prompts)).repeat_interleave(rollout.drawn),
            seeds=seeds,
            **recorded,
        )
        records = [record for record in scored for _ in range(rollout.drawn)]
        ahead = rollout.ahead > 0 and isinstance(self._engine, RolloutPool)
        overlaps = run.config.reward.overlap
        scoring = RolloutScoring(self._reward, records, rollout.micro_batch_size, overlaps=overlaps, ahead=ahead)
        scouts = None
        if rollout.scout.redraw:
            scouts = RolloutRequest(
                request.conditioning,
                request.prompt_index,
                rollout.scout_steps,
                request.seeds,
                window_starts=None,
                cache=request.cache,
            )
        return BatchRequest(step, prompts, chosen, group, request, scoring, rewrites, scouts)

    def _start_seeds(self, step: int, group: Int[Tensor, " B"]) -> list[int]:
        """Seeds of the starting noise that the images of a prompt share."""
        return [seed_for(self._run.config.rollout_seed, START, step, one) for one in group.tolist()]

    def window_starts(self, groups: list[int], step: int) -> list[int]:
        """First stochastic step of each prompt group of a step's batch."""
        rollout = self._run.config.actor_rollout_ref.rollout
        algo = rollout.algo
        if algo.sample_strategy == "progressive":
            return [progressive_window_start(rollout.window, step, algo.iters_per_group)] * len(groups)
        seed = self._run.config.rollout_seed
        if algo.sde_window_seed is not None:  # one place for all groups
            seed = algo.sde_window_seed
            groups = [0] * len(groups)
        return [draw_window_start(rollout.window, generator_for(seed, WINDOW, step, g)) for g in groups]
