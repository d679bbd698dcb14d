"""The mode in force: the correction and the objective by which the next update learns. Needs no torch.

A run starts in its configured mode. The guard may move it from bypass to decoupled mode and back: then the trainer
holds another value of this class and passes it to everything that depends on the mode.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flowgrpo_rc.actor.config import DiffusionActorConfig, DiffusionLossConfig
from flowgrpo_rc.correction.options.config import RolloutCorrectionConfig
from flowgrpo_rc.loss.objectives import Objective


@dataclass(frozen=True)
class ModeInForce:
    """Rollout correction, objective and KL term. It has the fields of a configuration that ``diffusion_loss`` reads."""

    rollout_correction: RolloutCorrectionConfig
    diffusion_loss: DiffusionLossConfig
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.0
    kl_loss_type: str = "gaussian"

    @classmethod
    def configured(cls, actor: DiffusionActorConfig) -> ModeInForce:
        """The mode of the section ``actor_rollout_ref.actor``."""
        kl = (actor.use_kl_loss, actor.kl_loss_coef, actor.kl_loss_type)
        return cls(actor.rollout_correction, actor.diffusion_loss, *kl)

    @property
    def objective(self) -> Objective:
        """The objective's row in the table of objectives."""
        return self.diffusion_loss.objective

    @property
    def bypasses(self) -> bool:
        """Bypass mode: the rollout engine's log-probs are the old policy's."""
        return self.rollout_correction.bypass_mode

    @property
    def has_limit(self) -> bool:
        """True if the objective's limit acts; REINFORCE in bypass mode has none."""
        return self.objective.has_limit and self.rollout_correction.loss_type == "ppo_clip"

    @property
    def limits_the_gap(self) -> bool:
        """True if the limit is centred on the engine's log-probs, so that the gap alone can exceed it."""
        return self.bypasses and self.has_limit

    @property
    def couples_steps(self) -> bool:
        """True if the weight or rejection of a step depends on the other steps of its image. Then an image's whole
        window must be scored before any of its steps can be learned from."""
        rc = self.rollout_correction
        # Bypass with PPO has no weights in its loss, so sequence weights couple nothing there.
        uses_weights = not self.bypasses or rc.loss_type == "reinforce"
        return rc.plan().couples_elements(uses_weights=uses_weights)

    def decoupled(self) -> ModeInForce:
        """The same objective in decoupled mode, where the limit is centred at the actor's own log-probs. A calibrated
        clip band gets its least width: without a gap at the limit's centre it needs no room for one."""
        loss = self.diffusion_loss
        if loss.clip_ratio == "auto":
            loss = replace(loss, clip_ratio=loss.auto_clip_min)
        return replace(
            self, diffusion_loss=loss, rollout_correction=replace(self.rollout_correction, bypass_mode=False)
        )
