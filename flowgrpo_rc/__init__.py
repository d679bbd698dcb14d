"""FlowGRPO for flow-matching image models, with the rollout/training log-prob gap measured and corrected.

Names load on first use: importing this package loads neither torch nor diffusers.
"""

from typing import TYPE_CHECKING

from flowgrpo_rc.lazy import lazy_names

if TYPE_CHECKING:
    from flowgrpo_rc.actor.actor import DiffusionActor as DiffusionActor
    from flowgrpo_rc.actor.config import DiffusionActorConfig as DiffusionActorConfig
    from flowgrpo_rc.actor.config import DiffusionLossConfig as DiffusionLossConfig
    from flowgrpo_rc.batch import apply_bypass_mode_to_diffusion_batch as apply_bypass_mode_to_diffusion_batch
    from flowgrpo_rc.batch import (
        apply_rollout_correction_to_diffusion_batch as apply_rollout_correction_to_diffusion_batch,
    )
    from flowgrpo_rc.cli.compose import compose as compose
    from flowgrpo_rc.correction.numerics.compute import compute_rollout_correction as compute_rollout_correction
    from flowgrpo_rc.correction.numerics.compute import (
        compute_rollout_correction_and_rejection_mask as compute_rollout_correction_and_rejection_mask,
    )
    from flowgrpo_rc.correction.options.config import RolloutCorrectionConfig as RolloutCorrectionConfig
    from flowgrpo_rc.loss.advantages import group_advantages as group_advantages
    from flowgrpo_rc.loss.diffusion import diffusion_loss as diffusion_loss
    from flowgrpo_rc.loss.tokens import token_loss as token_loss
    from flowgrpo_rc.models.config import ModelConfig as ModelConfig
    from flowgrpo_rc.models.load import load_model as load_model
    from flowgrpo_rc.prompt import Prompt as Prompt
    from flowgrpo_rc.reference_files import reference_image as reference_image
    from flowgrpo_rc.report.health import check_health as check_health
    from flowgrpo_rc.rollout.config import RolloutConfig as RolloutConfig
    from flowgrpo_rc.trainer.config import FlowGRPOConfig as FlowGRPOConfig
    from flowgrpo_rc.trainer.policy import ImagePolicy as ImagePolicy
    from flowgrpo_rc.trainer.trainer import FlowGRPOTrainer as FlowGRPOTrainer

__version__ = "0.1.0"

__getattr__, __dir__ = lazy_names(__name__)
