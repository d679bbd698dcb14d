"""Objectives of the actor: group advantages, policy-gradient terms, KL, and their composition.

Floor 2: imports floor 1 (``correction/``, ``sde/``) only.
"""

from flowgrpo_rc.loss.advantages import GroupAdvantages, group_advantages
from flowgrpo_rc.loss.diffusion_loss import LossSums, diffusion_loss, diffusion_loss_sums
from flowgrpo_rc.loss.metrics import LossMetrics
from flowgrpo_rc.loss.policy import PolicyTerms, ppo_clip, reinforce

__all__ = [
    "GroupAdvantages",
    "LossMetrics",
    "LossSums",
    "PolicyTerms",
    "diffusion_loss",
    "diffusion_loss_sums",
    "group_advantages",
    "ppo_clip",
    "reinforce",
]
