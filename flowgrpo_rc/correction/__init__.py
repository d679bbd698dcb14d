"""Rollout correction: importance weights, rejection and diagnostics for a rollout/training mismatch.

Names resolve on first use, so that reading a configuration does not import torch.
"""

from typing import TYPE_CHECKING

from flowgrpo_rc.lazy import lazy_names

if TYPE_CHECKING:
    from flowgrpo_rc.correction.numerics.compute import NonFiniteLogProbError as NonFiniteLogProbError
    from flowgrpo_rc.correction.numerics.compute import compute_offpolicy_metrics as compute_offpolicy_metrics
    from flowgrpo_rc.correction.numerics.compute import compute_rollout_correction as compute_rollout_correction
    from flowgrpo_rc.correction.numerics.compute import (
        compute_rollout_correction_and_rejection_mask as compute_rollout_correction_and_rejection_mask,
    )
    from flowgrpo_rc.correction.numerics.compute import (
        compute_rollout_correction_weights as compute_rollout_correction_weights,
    )
    from flowgrpo_rc.correction.numerics.compute import compute_rollout_rejection_mask as compute_rollout_rejection_mask
    from flowgrpo_rc.correction.numerics.moments import MetricAccumulator as MetricAccumulator
    from flowgrpo_rc.correction.numerics.moments import Moments as Moments
    from flowgrpo_rc.correction.numerics.moments import RolloutCorrection as RolloutCorrection
    from flowgrpo_rc.correction.numerics.moments import slime_metrics as slime_metrics
    from flowgrpo_rc.correction.options.config import RolloutCorrectionConfig as RolloutCorrectionConfig
    from flowgrpo_rc.correction.options.explanation import Explanation as Explanation
    from flowgrpo_rc.correction.options.explanation import explain as explain
    from flowgrpo_rc.correction.plan import SAFETY_BOUND as SAFETY_BOUND

__getattr__, __dir__ = lazy_names(__name__)
