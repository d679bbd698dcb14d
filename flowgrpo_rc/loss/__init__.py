"""Objectives of the actor: group advantages, policy-gradient terms, KL, and their composition to a loss.

Floor 2: imports ``batch`` and floor 1 (``correction/``, ``sde/``) only. Names load on first use: the tables that
configurations are validated against (``objectives``, ``aggregation``) need no torch.
"""

from typing import TYPE_CHECKING

from flowgrpo_rc.lazy import lazy_names

if TYPE_CHECKING:
    from flowgrpo_rc.loss.advantages import GroupAdvantages, group_advantages
    from flowgrpo_rc.loss.core import LossSums
    from flowgrpo_rc.loss.diffusion import diffusion_loss, diffusion_loss_sums
    from flowgrpo_rc.loss.metrics import LossMetrics
    from flowgrpo_rc.loss.objectives import OBJECTIVES, Objective
    from flowgrpo_rc.loss.policy import PolicyTerms, ppo_clip, reinforce
    from flowgrpo_rc.loss.tokens import token_loss, token_loss_sums

__all__ = [
    "GroupAdvantages",
    "LossMetrics",
    "LossSums",
    "OBJECTIVES",
    "Objective",
    "PolicyTerms",
    "diffusion_loss",
    "diffusion_loss_sums",
    "group_advantages",
    "ppo_clip",
    "reinforce",
    "token_loss",
    "token_loss_sums",
]

__getattr__, __dir__ = lazy_names(__name__)
