"""Objectives of the actor: group advantages, policy-gradient terms, KL, and their composition to a loss.

Floor 2: imports ``batch`` and floor 1 (``correction/``, ``sde/``) only. Names load on first use: the tables that
configurations are validated against (``objectives``, ``aggregation``) need no torch.
"""

from typing import TYPE_CHECKING

from flowgrpo_rc.lazy import lazy_names

if TYPE_CHECKING:
    from flowgrpo_rc.loss.advantages import GroupAdvantages as GroupAdvantages
    from flowgrpo_rc.loss.advantages import group_advantages as group_advantages
    from flowgrpo_rc.loss.advantages import normalised_sum as normalised_sum
    from flowgrpo_rc.loss.diffusion import diffusion_loss as diffusion_loss
    from flowgrpo_rc.loss.diffusion import diffusion_loss_sums as diffusion_loss_sums
    from flowgrpo_rc.loss.objectives import OBJECTIVES as OBJECTIVES
    from flowgrpo_rc.loss.objectives import Objective as Objective
    from flowgrpo_rc.loss.policy import PolicyTerms as PolicyTerms
    from flowgrpo_rc.loss.policy import ppo_clip as ppo_clip
    from flowgrpo_rc.loss.policy import reinforce as reinforce
    from flowgrpo_rc.loss.sums import LossMetrics as LossMetrics
    from flowgrpo_rc.loss.sums import LossSums as LossSums
    from flowgrpo_rc.loss.tokens import token_loss as token_loss
    from flowgrpo_rc.loss.tokens import token_loss_sums as token_loss_sums

__getattr__, __dir__ = lazy_names(__name__)
