"""Try cheaper samplers on a few groups, before training: what an image costs, and what becomes of its reward.

Every setting draws the same prompts with the same windows and noise as the full sampler, so that rewards are compared
image by image. Prompts are the independent unit of the intervals.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch

from flowgrpo_rc.gap.intervals import mean_interval
from flowgrpo_rc.rewards.scoring import PartialScoring
from flowgrpo_rc.rollout import RolloutRequest
from flowgrpo_rc.rollout.base import rows_of
from flowgrpo_rc.rollout.config import RolloutConfig
from flowgrpo_rc.rollout.seeds import PROBE, START, seed_for
from flowgrpo_rc.rollout.tail import TailConfig
from flowgrpo_rc.sde import progressive_places

if TYPE_CHECKING:
    from flowgrpo_rc.trainer.trainer import FlowGRPOTrainer

TAILS = (0.5, 0.25)
"""Shares of the steps after the window that are tried."""
TAIL_SOLVERS = ("euler", "dpm++2m")
GROUPS = 8
"""Prompts for each setting, by default."""
TOLERANCE = 0.25
"""Largest fall of the reward that is accepted, in standard deviations of the full sampler's rewards."""
LEAST_SPREAD = 0.5
"""Least spread of rewards within a prompt, as a share of the full sampler's: advantages are made of it."""
RESCORED = 8
"""Images whose log-probs the actor scores again."""


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A sampler's figures."""

    overrides: dict[str, Any]
    """Settings below ``actor_rollout_ref.rollout``; empty for the full sampler."""
    changes: dict[str, Any]
    """The same, of all that differs from the configuration."""
    forwards: float
    """Transformer forwards that draw an image."""
    seconds: float
    """Time of drawing an image."""
    reward: float
    shift: float
    """Mean difference of the reward from the full sampler's, image by image, and its 95 % interval."""
    low: float
    high: float
    spread: float
    """Standard deviation of the rewards within a prompt, root mean square over prompts."""
    gap: float | None
    """Mean ``|log pi_actor - log pi_engine|`` of steps of the window; ``None`` without a window."""
    objections: tuple[str, ...] = ()
    """Why it is not shown safe; empty if it is."""

    @property
    def settings(self) -> list[str]:
        """Its changes of the configuration, ready to paste."""
        told = {None: "null", True: "true", False: "false"}
        return [f"actor_rollout_ref.rollout.{key}={told.get(value, value)}" for key, value in self.changes.items()]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def samplers(rollout: RolloutConfig, *, clean: bool) -> Iterator[dict[str, Any]]:
    """Settings to try, the full sampler first, below ``actor_rollout_ref.rollout``; each differs in its forwards or
    solver from all before."""
    steps = rollout.pipeline.num_inference_steps
    window = rollout.window
    left = steps if clean else steps - window.first - window.size
    starts = (False,) if clean else (False, True)
    for shared in starts:
        same = {"algo.init_same_noise": True} if shared else {}
        yield same
        for steps_taken in dict.fromkeys(TailConfig(steps=share).number(left) for share in TAILS):
            if not 0 < steps_taken < left:
                continue
            share = next(one for one in TAILS if TailConfig(steps=one).number(left) == steps_taken)
            for solver in TAIL_SOLVERS:
                # A multistep solver's first and last step are Euler's.
                if solver == "euler" or steps_taken > 2:
                    yield same | {"tail.steps": share} | ({} if solver == "euler" else {"tail.solver": solver})


def with_settings(rollout: RolloutConfig, overrides: Mapping[str, Any]) -> RolloutConfig:
    """The section with a sampler of ``samplers``, in the place of its own."""
    tail = {key.removeprefix("tail."): value for key, value in overrides.items() if key.startswith("tail.")}
    same = bool(overrides.get("algo.init_same_noise"))
    return replace(rollout, tail=TailConfig(**tail), algo=replace(rollout.algo, init_same_noise=same))


def changes(configured: RolloutConfig, chosen: RolloutConfig) -> dict[str, Any]:
    """Settings of a sampler that differ."""
    names = {"tail.steps": ("tail", "steps"), "tail.solver": ("tail", "solver")}
    names["algo.init_same_noise"] = ("algo", "init_same_noise")
    both = {
        name: [getattr(getattr(one, section), field) for one in (configured, chosen)]
        for name, (section, field) in names.items()
    }
    return {name: new for name, (old, new) in both.items() if old != new}


def tune(trainer: FlowGRPOTrainer, groups: int) -> list[Tried]:
    """Try every sampler on ``groups`` prompts, whose images are ``rollout.n``; the full sampler comes first.

    Raises:
        RolloutError, RewardError: the engine or a reward function failed.
    """
    config = trainer.config.actor_rollout_ref
    clean = config.actor.diffusion_loss.objective.clean
    found: list[Tried] = []
    rewards: list[torch.Tensor] = []
    request = _request(trainer, groups, clean=clean)
    # Not timed: the first forward of a process chooses its kernels. One prompt's images.
    warm_up = replace(request, **_sampler(trainer, {}, request))
    trainer.generate(rows_of(warm_up, torch.arange(config.rollout.n)))
    for overrides in samplers(config.rollout, clean=clean):
        asked = replace(request, **_sampler(trainer, overrides, request))
        began = time.perf_counter()
        answer = trainer.generate(asked)
        seconds = (time.perf_counter() - began) / len(asked.seeds)
        rewards.append(_rewards(trainer, answer.images.numpy(), groups))
        gap = None
        if not clean and answer.batch is not None:
            some = answer.batch[: min(RESCORED, len(answer.batch))]
            scored = trainer.run.actor.rescore(some, asked.conditioning)["log_probs"]
            gap = float((scored - some["rollout_log_probs"]).abs().mean())
        chosen = with_settings(config.rollout, overrides)
        figures = {
            "overrides": overrides,
            "changes": changes(config.rollout, chosen),
            "forwards": sum(chosen.forwards_per_image(clean=clean)),
            "seconds": seconds,
            "gap": gap,
        }
        found.append(judged(figures, rewards[-1], rewards[0], len(trainer.run.train_prompts)))
    return found


def cheapest(found: Sequence[Tried]) -> Tried:
    """The sampler with the fewest forwards of those that are shown safe; of equals the one with the higher reward."""
    return min((one for one in found if not one.objections), key=lambda one: (one.forwards, -one.reward))


def judged(figures: dict[str, Any], rewards: torch.Tensor, full: torch.Tensor, distinct: int) -> Tried:
    """A sampler with its rewards ``(groups, n)`` beside the full sampler's, and what speaks against it.

    Args:
        figures: the other fields of ``Tried``.
        distinct: prompts, after which they repeat.
    """
    spread, spread_of_full = (float(one.var(1).mean().sqrt()) for one in (rewards, full))
    figures = figures | {"reward": float(rewards.mean()), "spread": spread}
    if not figures["overrides"]:
        return Tried(**figures, shift=0.0, low=0.0, high=0.0)
    difference = (rewards - full).flatten()
    prompts = torch.arange(len(rewards)).remainder(distinct).repeat_interleave(rewards.shape[1])
    interval = mean_interval(difference, prompts)
    objections = []
    least = -TOLERANCE * float(full.std())
    if not interval.low >= least:
        objections.append(f"the reward may fall by {-interval.low:.3g}, and {-least:.3g} is accepted")
    if spread_of_full == 0:
        objections.append("the full sampler's images of a prompt all have the same reward, which shows nothing")
    elif spread < LEAST_SPREAD * spread_of_full:
        objections.append(f"rewards of a prompt spread by {spread:.3g}, the full sampler's by {spread_of_full:.3g}")
    return Tried(
        **figures, shift=float(difference.mean()), low=interval.low, high=interval.high, objections=tuple(objections)
    )


def _request(trainer: FlowGRPOTrainer, groups: int, *, clean: bool) -> RolloutRequest:
    """The first prompts, with the window at each of its places in turn."""
    rollout = trainer.config.actor_rollout_ref.rollout
    prompts = trainer.run.train_prompts
    records = [prompts[i % len(prompts)] for i in range(groups)]
    index = torch.arange(groups).repeat_interleave(rollout.n)
    recorded: dict[str, Any] = {"window_starts": None, "record_clean": True}
    if not clean:
        window = rollout.window
        places = range(window.first, window.stop - window.size + 1)
        if rollout.algo.sample_strategy == "progressive":
            places = progressive_places(window)
        starts = torch.tensor(list(places)).repeat(math.ceil(groups / len(places)))[:groups]
        recorded = {
            "window_starts": starts[index],
            "window_size": window.size,
            "noise_level": rollout.algo.noise_level,
            "sde_type": rollout.algo.sde_type,
        }
    return RolloutRequest(
        conditioning=trainer.run.conditioning(records, rollout.pipeline),
        prompt_index=index,
        num_inference_steps=rollout.pipeline.num_inference_steps,
        seeds=[seed_for(trainer.config.rollout_seed, PROBE, 1, i) for i in range(len(index))],
        **recorded,
    )


def _sampler(trainer: FlowGRPOTrainer, overrides: Mapping[str, Any], request: RolloutRequest) -> dict[str, Any]:
    """Fields of a request that a sampler changes."""
    rollout = with_settings(trainer.config.actor_rollout_ref.rollout, overrides)
    start_seeds = None
    if rollout.algo.init_same_noise:
        groups = request.prompt_index.tolist()
        start_seeds = [seed_for(trainer.config.rollout_seed, START, 1, group) for group in groups]
    return {
        "tail": rollout.request_tail,
        "cache": rollout.request_cache,
        "start_seeds": start_seeds,
        "request_id": uuid4().hex,
    }


def _rewards(trainer: FlowGRPOTrainer, images: Any, groups: int) -> torch.Tensor:
    """Rewards ``(groups, n)`` of the request's images."""
    rollout = trainer.config.actor_rollout_ref.rollout
    prompts = trainer.run.train_prompts
    records = [prompts[i % len(prompts)] for i in range(groups) for _ in range(rollout.n)]
    scoring = PartialScoring(
        trainer.run.reward,
        [record.prompt for record in records],
        [record.metadata for record in records],
        rollout.micro_batch_size,
    )
    total = torch.as_tensor(scoring.result(images).total, dtype=torch.float64)
    return total.view(groups, rollout.n)
