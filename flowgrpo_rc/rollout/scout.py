"""Scouts: more images of a prompt than are learned from. Importing this loads no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from flowgrpo_rc.field_docs import documented_fields
from flowgrpo_rc.section import NonNegativeInt, PositiveInt, Section, one_of

SELECTIONS = ("extremes", "spread", "random")


@documented_fields
@dataclass(kw_only=True, slots=True)
class ScoutConfig(Section):
    """The section ``rollout.scout``: ``n`` images of every prompt are drawn and rewarded, and ``rollout.n`` of them
    are learned from. Advantages are those within all ``n``."""

    section = "actor_rollout_ref.rollout.scout"

    n: NonNegativeInt = 0
    """Images that are drawn for every prompt, more than ``rollout.n``; 0 draws ``rollout.n`` and learns from all."""
    select: Annotated[str, one_of(SELECTIONS)] = "extremes"
    """Images that are learned from: as many of the best as of the worst (``extremes``), those whose advantages have the
    largest variance (``spread``, arXiv 2504.13818), or ``random`` ones, as a control."""
    redraw: bool = False
    """Draw the scouts without stochastic steps, and those that are learned from once more, from the same noise and as
    training does (Sol-RL, arXiv 2604.06916). Their new rewards take the places of the scouts'."""
    steps: PositiveInt | None = None
    """Denoising steps of scouts that are drawn again; null takes training's."""

    def problems(self) -> Iterator[str]:
        """Settings that would have no effect."""
        if self.redraw and not self.n:
            yield "redraw: got true with n=0, which draws no scouts; set n to more than rollout.n, or redraw to false"
        if self.steps is not None and not self.redraw:
            yield f"steps: got {self.steps} with redraw=false, where scouts are learned from; set redraw to true"
