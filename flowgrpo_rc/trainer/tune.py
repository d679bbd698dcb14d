"""Try cheaper samplers on a few groups, before training: what an image costs, and what becomes of its reward.

Every setting draws the same prompts with the same windows and noise as the full sampler, so that rewards are compared
image by image. Prompts are the independent unit of the intervals.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from flowgrpo_rc.data import PromptRecord
from flowgrpo_rc.gap.intervals import mean_interval
from flowgrpo_rc.models.base import Conditioning
from flowgrpo_rc.rewards.scoring import PartialScoring
from flowgrpo_rc.rollout import RolloutRequest
from flowgrpo_rc.rollout.base import rows_of
from flowgrpo_rc.rollout.cache import CacheConfig
from flowgrpo_rc.rollout.config import RolloutConfig
from flowgrpo_rc.rollout.seeds import PROBE, START, seed_for
from flowgrpo_rc.rollout.tail import TailConfig

if TYPE_CHECKING:
    from flowgrpo_rc.trainer.trainer import FlowGRPOTrainer

TAILS = (0.5, 0.25)
"""Shares of the steps after the window that are tried."""
GROUPS = 8
"""Prompts for each setting, by default."""
TOLERANCE = 0.25
"""Largest fall of the reward that is accepted, in standard deviations of the full sampler's rewards."""
LEAST_SPREAD = 0.5
"""Least spread of rewards within a prompt, as a share of the full sampler's: advantages are made of it."""
RESCORED = 8
"""Images whose log-probs the actor scores again."""
NO_CACHE = {"cache.name": None, "cache.options": None, "cache.in_window": False}
"""Settings that undo a configured cache."""


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A sampler's figures."""

    overrides: dict[str, Any]
    """Its settings, below ``actor_rollout_ref.rollout``."""
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
    """Why it is not taken; empty if it is shown safe."""

    @property
    def cached(self) -> bool:
        """It has the configured cache."""
        return self.overrides.get("cache.name") is not None

    @property
    def settings(self) -> list[str]:
        """Its settings, ready to paste. All of them: the configuration may have others."""
        told = {None: "null", True: "true", False: "false"}
        return [f"actor_rollout_ref.rollout.{key}={told.get(value, value)}" for key, value in self.overrides.items()]


def samplers(rollout: RolloutConfig, *, clean: bool) -> Iterator[dict[str, Any]]:
    """Settings to try, the full sampler first, below ``actor_rollout_ref.rollout``: no two take the same steps, but for
    the configured cache, with which each is tried again."""
    caches = [{}] if rollout.cache.name is None else [NO_CACHE, {"cache.name": rollout.cache.name}]
    for taken in _steps_taken(rollout, clean=clean):
        for cache in caches:
            yield taken | cache


def _steps_taken(rollout: RolloutConfig, *, clean: bool) -> Iterator[dict[str, Any]]:
    steps = rollout.pipeline.num_inference_steps
    left = steps if clean else steps - min(rollout.window_places) - rollout.window.size
    # Scouts that are drawn again take no stochastic step, and shared noise would give a prompt one image.
    for shared in (False,) if clean or rollout.scout.redraw else (False, True):
        taken = {left}
        yield _overrides(shared)
        for share in TAILS:
            number = TailConfig(steps=share).number(left)
            if number in {0, *taken}:
                continue
            taken.add(number)
            yield _overrides(shared, share)
            # The first and the last step of a multistep solver are Euler's.
            if number > 2:
                yield _overrides(shared, share, "dpm++2m")


def _overrides(shared: bool, steps: float | None = None, solver: str = "euler") -> dict[str, Any]:
    return {"algo.init_same_noise": shared, "tail.steps": steps, "tail.solver": solver}


def with_settings(rollout: RolloutConfig, overrides: Mapping[str, Any]) -> RolloutConfig:
    """The section with a sampler of ``samplers``, in the place of its own."""
    return replace(
        rollout,
        cache=rollout.cache if overrides.get("cache.name") else CacheConfig(),
        tail=TailConfig(steps=overrides["tail.steps"], solver=overrides["tail.solver"]),
        algo=replace(rollout.algo, init_same_noise=overrides["algo.init_same_noise"]),
    )


def tune(trainer: FlowGRPOTrainer, groups: int) -> list[Tried]:
    """Try every sampler on ``groups`` prompts, whose images are ``rollout.n``; the full sampler comes first.

    Raises:
        RolloutError, RewardError: the engine or a reward function failed.
    """
    config = trainer.config.actor_rollout_ref
    clean = not trainer.config.records_steps
    prompts = trainer.run.train_prompts
    records = [prompts[i % len(prompts)] for i in range(groups)]
    conditioning = trainer.run.conditioning(records, config.rollout.pipeline)
    found: list[Tried] = []
    full: torch.Tensor | None = None
    for overrides in samplers(config.rollout, clean=clean):
        rollout = with_settings(config.rollout, overrides)
        request = _request(rollout, conditioning, groups, trainer.config.rollout_seed, clean=clean)
        if full is None:
            # Not timed: the first forward of a process chooses its kernels. One prompt's images.
            trainer.generate(rows_of(request, torch.arange(rollout.n)))
        began = time.perf_counter()
        answer = trainer.generate(request)
        seconds = (time.perf_counter() - began) / len(request.seeds)
        rewards = _rewards(trainer, answer.images.numpy(), records)
        full = rewards if full is None else full
        gap = None
        if not clean and answer.batch is not None:
            some = answer.batch[: min(RESCORED, len(answer.batch))]
            scored = trainer.run.actor.rescore(some, request.conditioning)["log_probs"]
            gap = float((scored - some["rollout_log_probs"]).abs().mean())
        forwards = sum(rollout.forwards_per_image(clean=clean))
        figures = {"overrides": overrides, "forwards": forwards, "seconds": seconds, "gap": gap}
        # The sampler before is the same one without the cache.
        without = found[-1].seconds if overrides.get("cache.name") else None
        found.append(judged(figures, rewards, full, len(prompts), without))
    return found


def cheapest(found: Sequence[Tried]) -> Tried:
    """The sampler with the fewest forwards of those that are shown safe; of equals one with a cache, then the one with
    the highest reward."""
    safe = [one for one in found if not one.objections]
    return min(safe, key=lambda one: (one.forwards, not one.cached, -one.reward))


def judged(
    figures: dict[str, Any], rewards: torch.Tensor, full: torch.Tensor, distinct: int, without: float | None = None
) -> Tried:
    """A sampler with its rewards ``(groups, n)`` beside the full sampler's, and what speaks against it.

    Args:
        figures: the other fields of ``Tried``.
        distinct: prompts, after which they repeat.
        without: seconds an image of the same sampler without its cache; ``None`` without a cache.
    """
    spread, spread_of_full = (float(one.var(1).mean().sqrt()) for one in (rewards, full))
    figures = figures | {"reward": float(rewards.mean()), "spread": spread}
    if rewards is full:
        return Tried(**figures, shift=0.0, low=0.0, high=0.0)
    difference = (rewards - full).flatten()
    prompts = torch.arange(len(rewards)).remainder(distinct).repeat_interleave(rewards.shape[1])
    interval = mean_interval(difference, prompts)
    objections = []
    least = -TOLERANCE * float(full.std())
    if without is not None and figures["seconds"] >= without:
        objections.append("the cache saved no time")
    if not interval.low >= least:
        objections.append(f"the reward may fall by {-interval.low:.3g}, and {-least:.3g} is accepted")
    if spread_of_full == 0:
        objections.append("the full sampler's images of a prompt all have the same reward, which shows nothing")
    elif spread < LEAST_SPREAD * spread_of_full:
        objections.append(f"rewards of a prompt spread by {spread:.3g}, the full sampler's by {spread_of_full:.3g}")
    return Tried(
        **figures, shift=float(difference.mean()), low=interval.low, high=interval.high, objections=tuple(objections)
    )


def _request(
    rollout: RolloutConfig, conditioning: Conditioning, groups: int, seed: int, *, clean: bool
) -> RolloutRequest:
    """``rollout.n`` images of each prompt, with the window at each of its places in turn."""
    index = torch.arange(groups).repeat_interleave(rollout.n)
    recorded = rollout.request_fields(clean=clean)
    if not clean:
        places = rollout.window_places
        recorded["window_starts"] = torch.tensor([places[group % len(places)] for group in index.tolist()])
    if rollout.algo.init_same_noise:
        recorded["start_seeds"] = [seed_for(seed, START, 1, group) for group in index.tolist()]
    seeds = [seed_for(seed, PROBE, 1, i) for i in range(len(index))]
    return RolloutRequest(conditioning=conditioning, prompt_index=index, seeds=seeds, **recorded)


def _rewards(trainer: FlowGRPOTrainer, images: np.ndarray, records: Sequence[PromptRecord]) -> torch.Tensor:
    """Rewards ``(groups, n)`` of the images of these prompts."""
    rollout = trainer.config.actor_rollout_ref.rollout
    each = [record for record in records for _ in range(rollout.n)]
    prompts = [record.prompt for record in each]
    metadata = [record.metadata for record in each]
    scoring = PartialScoring(trainer.run.reward, prompts, metadata, rollout.micro_batch_size)
    total = torch.as_tensor(scoring.result(images).total, dtype=torch.float64)
    return total.view(len(records), rollout.n)
