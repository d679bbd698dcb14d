"""Scouts: more images of a prompt than are learned from. Importing this loads no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from flowgrpo_rc.dtypes import DTYPES
from flowgrpo_rc.field_docs import documented_fields
from flowgrpo_rc.rollout.engines import QUANTIZATIONS
from flowgrpo_rc.section import NonNegativeInt, PositiveInt, Section, one_of

SELECTIONS = ("extremes", "spread", "random")


@documented_fields
@dataclass(kw_only=True, slots=True)
class ScoutEngineConfig(Section):
    """The section ``rollout.scout.engine``: where scouts that are drawn again have an engine of their own, with other
    weights than ``rollout``'s. Null takes the value of ``rollout``."""

    section = "actor_rollout_ref.rollout.scout.engine"

    dtype: Annotated[str, one_of(DTYPES)] | None = None
    """Precision of the scouts' transformer and adapter."""
    quantization: Annotated[str, one_of(QUANTIZATIONS)] | None = None
    """Rounding of the scouts' weights."""
    quantization_skip: list[str] | None = None
    """Linear layers of the scouts that stay as they are."""
    merge_adapter: bool | None = None
    """Add the adapter to the scouts' weights."""

    @property
    def given(self) -> dict[str, Any]:
        """The fields that are set; without any, the run's engine draws scouts too."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


@documented_fields
@dataclass(kw_only=True, slots=True)
class ScoutConfig(Section):
    """The section ``rollout.scout``: ``n`` images of every prompt are drawn and rewarded, and ``rollout.n`` of them
    are learned from. Advantages are those within all ``n``."""

    section = "actor_rollout_ref.rollout.scout"

    n: NonNegativeInt = 0
    """Images that are drawn for every prompt, more than ``rollout.n``; 0 draws ``rollout.n`` and learns from all."""
    select: Annotated[str, one_of(SELECTIONS)] = "extremes"
    """Images that are learned from: as many of the best as of the worst, or one more (``extremes``), those whose
    advantages have the largest variance (``spread``, arXiv 2504.13818), or ``random`` ones, as a control."""
    redraw: bool = False
    """Draw the scouts without stochastic steps, and those that are learned from once more, from the same noise and as
    training does (Sol-RL, arXiv 2604.06916). Their new rewards take the places of the scouts'."""
    steps: PositiveInt | None = None
    """Denoising steps of scouts that are drawn again; null takes training's."""
    engine: ScoutEngineConfig = field(default_factory=ScoutEngineConfig)

    def problems(self) -> Iterator[str]:
        """Settings that would have no effect."""
        if self.redraw and not self.n:
            yield "redraw: got true with n=0, which draws no scouts; set n to more than rollout.n, or redraw to false"
        if self.steps is not None and not self.redraw:
            yield f"steps: got {self.steps} with redraw=false, where scouts are learned from; set redraw to true"
        for name, value in self.engine.given.items() if not self.redraw else ():
            yield (
                f"engine.{name}: got {value} with redraw=false, where scouts are learned from; set redraw to true, or "
                f"rollout.{name} in its place"
            )
