"""Rollout requests: the prompts, noise seeds and SDE windows of each batch."""

import torch
from jaxtyping import Int
from torch import Tensor

from flowgrpo_rc.actor.mode import ModeInForce
from flowgrpo_rc.data import PromptRecord
from flowgrpo_rc.models.base import Conditioning
from flowgrpo_rc.rollout import RolloutRequest
from flowgrpo_rc.rollout.config import PipelineConfig
from flowgrpo_rc.rollout.seeds import IMAGE, WINDOW, generator_for, seed_for
from flowgrpo_rc.sde import draw_window_start, progressive_window_start
from flowgrpo_rc.trainer.encoding import PromptSet
from flowgrpo_rc.trainer.rollout_queue import BatchRequest
from flowgrpo_rc.trainer.scoring import BatchScoring
from flowgrpo_rc.trainer.setup import Run


def encode_prompts(run: Run, prompts: list[PromptRecord], pipeline: PipelineConfig) -> Conditioning:
    """Embeddings of ``prompts``, one row each, with negative prompts when guidance is on."""
    chosen = PromptSet(prompts, pipeline)
    negative = chosen.negative(run.model)
    length = pipeline.max_sequence_length
    return Conditioning(
        run.encoder(chosen.positive, length),
        run.encoder(negative, length) if negative else None,
        pipeline.true_cfg_scale,
        pipeline.guidance_scale,
        pipeline.height,
        pipeline.width,
    )


def image_numbers(group: Int[Tensor, " B"], n: int) -> Int[Tensor, " B"]:
    """Numbers of the images in the batch of all processes; ``group`` has the positions of their prompts."""
    return group * n + torch.arange(n).repeat(len(group) // n)


class RolloutRequests:
    """Makes this process's request of each step; ``requests(step)`` is called once a step, in order.

    Args:
        run: has the prompts, the encoder and the configuration.
        scoring: rewards the images of each batch.
        mode: the configured mode.
    """

    def __init__(self, run: Run, scoring: BatchScoring, mode: ModeInForce) -> None:
        self._run = run
        self._scoring = scoring
        # In bypass mode the engine is the old policy, and objectives that compare means need its means. The guard may
        # change the mode before the batch is learned from, so that the configured mode decides.
        self._record_means = mode.objective.needs_old_means and mode.bypasses

    def __call__(self, step: int) -> BatchRequest:
        """The request of a step: the next prompts of the data."""
        run = self._run
        rollout = run.config.actor_rollout_ref.rollout
        prompts, positions = self._next_prompts()
        group = positions.repeat_interleave(rollout.n)
        # Seeds depend on step and image alone, so that any number of processes and any resume draws the same noise.
        seeds = [seed_for(run.config.rollout_seed, IMAGE, step, i) for i in image_numbers(group, rollout.n).tolist()]
        request = RolloutRequest(
            conditioning=encode_prompts(run, prompts, rollout.pipeline),
            prompt_index=torch.arange(len(prompts)).repeat_interleave(rollout.n),
            num_inference_steps=rollout.pipeline.num_inference_steps,
            seeds=seeds,
            window_starts=torch.tensor(self.window_starts(positions.tolist(), step)).repeat_interleave(rollout.n),
            window_size=rollout.window.size,
            noise_level=rollout.algo.noise_level,
            sde_type=rollout.algo.sde_type,
            record_means=self._record_means,
        )
        records = [record for record in prompts for _ in range(rollout.n)]
        return BatchRequest(step, prompts, group, request, self._scoring(records))

    def _next_prompts(self) -> tuple[list[PromptRecord], Int[Tensor, " P"]]:
        """This process's prompts of the next batch, and their positions in it.

        Each mini-batch is split over the processes, so that an optimizer step sees the same images with any number of
        processes.
        """
        run = self._run
        processes = run.accelerator.num_processes
        mini = run.config.actor_rollout_ref.actor.ppo_mini_batch_size
        positions = torch.arange(run.config.data.train_batch_size).view(-1, processes, mini // processes)
        own = positions[:, run.accelerator.process_index].flatten()
        chosen = next(run.sampler)
        return [run.train_prompts[int(chosen[i])] for i in own.tolist()], own

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
