"""The gap of a prompt writer: engine and actor on the tokens of some rewrites, judged as the probe judges images."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flowgrpo_rc.actor.mode import ModeInForce
from flowgrpo_rc.gap.safety import JudgedFigure, StepGap, decisive, judge_all
from flowgrpo_rc.gap.statistics import GapSample, apply_limits, step_gap


@dataclass(frozen=True)
class TokenGap:
    """The measured gap, and the verdict on the configured mode."""

    gap: StepGap
    """Of all tokens; ``images`` are rewrites, and a token is a step of one dimension."""
    effective_sample_size: float
    """Of the weights ``pi_actor/pi_rollout`` of whole rewrites, as a share of the rewrites (Kish)."""
    judged: tuple[JudgedFigure, ...]
    """Each figure that has a limit."""

    @property
    def decisive(self) -> JudgedFigure:
        """The worst figure, whose verdict is that on the configuration."""
        return decisive(self.judged)

    def to_dict(self) -> dict[str, Any]:
        """Plain, for JSON."""
        return {**asdict(self), "verdict": self.decisive.verdict}


def token_gap(mode: ModeInForce, log_ratio: Float[Tensor, "n T"], mask: Bool[Tensor, "n T"]) -> TokenGap:
    """Judge ``log_ratio``, ``log pi_actor - log pi_engine`` of each token with equal weights, in nats, where ``mask``
    is true.

    Args:
        mode: the correction and the clip band of tokens.
        log_ratio: rows are rewrites, which are the independent unit of the intervals.
        mask: the tokens of each.
    """
    gap = torch.where(mask, log_ratio.double(), 0.0)
    ones = torch.ones_like(gap)
    nothing = torch.zeros_like(gap)
    # A token is a step of one dimension; the divergence is estimated by k3 under the engine.
    sample = GapSample(nothing, gap, nothing, ones, ones, 1, gap.exp() - 1 - gap)
    tokens = apply_limits(mode, sample, mask=mask).part(mask)
    overall = step_gap(tokens, None)
    whole = gap.sum(1).exp()
    ess = float(whole.sum() ** 2 / whole.square().sum() / len(whole))
    return TokenGap(overall, ess, tuple(judge_all(mode, overall, 1, of_tokens=True).values()))
