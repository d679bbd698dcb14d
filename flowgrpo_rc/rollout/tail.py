"""The tail of a rollout: its deterministic steps after the SDE window, by another solver or in fewer steps.

A step's log-prob depends on nothing after it, so that a tail changes the picture that is rewarded and no log-prob.
Importing this loads no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated

from flowgrpo_rc.field_docs import documented_fields
from flowgrpo_rc.section import PositiveFloat, Section, one_of

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

SOLVERS = ("euler", "heun", "dpm++2m")
"""Solvers of the tail's steps. ``heun`` runs the transformer twice, but for a step that ends at noise level 0."""


@documented_fields
@dataclass(kw_only=True, slots=True)
class TailConfig(Section):
    """The section ``rollout.tail``: the steps after the stochastic ones, in training's rollouts. Without stochastic
    steps, as for objectives on clean images, all steps are the tail. Validation takes every step, by Euler."""

    section = "actor_rollout_ref.rollout.tail"

    solver: Annotated[str, one_of(SOLVERS)] = "euler"
    """``euler``, or of second order ``heun`` and ``dpm++2m`` (DPM-Solver++, multistep, midpoint)."""
    steps: PositiveFloat | None = None
    """Steps of the tail, evenly spaced among those of the schedule; below 1 a share of those that are left,
    rounded up. Null takes every step."""

    def problems(self) -> Iterator[str]:
        """A number of steps that is none."""
        if self.steps is not None and self.steps > 1 and self.steps != int(self.steps):
            yield f"steps: got {self.steps:g}; give a whole number of steps, or below 1 a share of those that are left"

    @property
    def is_whole(self) -> bool:
        """Every step is taken, by Euler."""
        return self.solver == "euler" and self.steps is None

    def number(self, left: int) -> int:
        """Steps in place of the ``left`` ones of the schedule."""
        if self.steps is None:
            return left
        if self.steps >= 1:
            return min(int(self.steps), left)
        # 0.07 * 100 is a rounding above 7.
        return math.ceil(self.steps * left - 1e-9)

    def forwards(self, left: int) -> int:
        """Transformer forwards of the tail."""
        steps = self.number(left)
        return max(0, 2 * steps - 1) if self.solver == "heun" else steps

    def levels(self, num_steps: int, end: int) -> list[int]:
        """Indices of the noise levels that an image passes through whose window ends at level ``end``: all of them up
        to there, then those of the tail, ``num_steps`` at last."""
        left = num_steps - end
        number = self.number(left)
        # Rounded half up, in whole numbers.
        tail = [end + (2 * i * left + number) // (2 * number) for i in range(number)]
        return [*range(end), *tail, num_steps]


@dataclass(frozen=True)
class Course:
    """For every step ``k`` of the schedule and every image, from noise level ``k`` to which level it goes, and how.
    All on the host."""

    moves: Bool[Tensor, "N b"]
    """The image takes a step from level ``k``; else it has passed it by."""
    next_level: Int[Tensor, "N b"]
    """Index of the level that the step ends at; ``k`` for an image that does not move."""
    corrects: Bool[Tensor, "N b"]
    """Heun's step: the mean of the velocities at both ends."""
    extrapolates: Float[Tensor, "N b"]
    """Factor ``h / (2 h_before)`` of a multistep step; 0 where it is one of Euler's."""

    @classmethod
    def of(cls, starts: Sequence[int], window: int, sigmas: Sequence[float], tail: TailConfig) -> Course:
        """The course of images whose windows of ``window`` steps begin at ``starts``, over the levels ``sigmas``."""
        import torch

        num_steps = len(sigmas) - 1
        shape = (num_steps, len(starts))
        moves = torch.zeros(shape, dtype=torch.bool)
        corrects = moves.clone()
        next_level = torch.arange(num_steps)[:, None].repeat(1, len(starts))
        extrapolates = torch.zeros(shape)
        for row, start in enumerate(starts):
            end = start + window
            levels = tail.levels(num_steps, end)
            for i, (level, following) in enumerate(pairwise(levels)):
                moves[level, row] = True
                next_level[level, row] = following
                # Both solvers of second order end with Euler's step, as in diffusers: level 0 has no velocity.
                if level < end or following == num_steps:
                    continue
                corrects[level, row] = tail.solver == "heun"
                if tail.solver == "dpm++2m" and level > end:
                    before = sigmas[levels[i - 1]]
                    extrapolates[level, row] = _multistep_factor(before, sigmas[level], sigmas[following])
        return cls(moves, next_level, corrects, extrapolates)


def _multistep_factor(before: float, sigma: float, following: float) -> float:
    """``h / (2 h_before)`` with ``h`` the difference of ``log((1-s)/s)`` over a step: DPM-Solver++(2M), algorithm 2 of
    arXiv 2211.01095, on the path ``(1-s) x0 + s e``."""
    if before >= 1:  # infinitely far
        return 0.0
    before, sigma, following = (math.log((1 - level) / level) for level in (before, sigma, following))
    return (following - sigma) / (2 * (sigma - before))


def corrected_velocity(
    velocity: Float[Tensor, " b *L"],
    latents: Float[Tensor, " b *L"],
    sigma: Float[Tensor, " b"],
    extrapolates: Float[Tensor, " b"],
    before: Float[Tensor, " b *L"],
) -> tuple[Float[Tensor, " b *L"], Float[Tensor, " b *L"]]:
    """The velocity with which Euler's step is a multistep step, and the estimate ``x - s v`` of the clean image.

    The step goes to ``(s'/s) x + (1 - s'/s) D`` with ``D = x0 + c (x0 - before)``: Euler's with ``(x - D) / s``.

    Args:
        extrapolates: ``c``, of ``Course``.
        before: the estimate at the level before.
    """
    s = spread(sigma, latents)
    clean = latents - s * velocity.float()
    return velocity - spread(extrapolates, latents) * (clean - before) / s, clean


def spread(values: Tensor, over: Tensor) -> Tensor:
    """``values`` ``(b,)`` in a shape that broadcasts over ``(b, *L)``."""
    return values.view(-1, *[1] * (over.ndim - 1))
