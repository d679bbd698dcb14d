"""Scouts: more images of a prompt than are learned from. Importing this loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from flowgrpo_rc.field_docs import documented_fields
from flowgrpo_rc.section import NonNegativeInt, Section, one_of

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
