"""Rollout correction: importance weights, rejection and diagnostics for a rollout/training mismatch.

Names resolve on first use, so that reading a configuration does not import torch.
"""

from typing import TYPE_CHECKING

from flowgrpo_rc.lazy import lazy_names

if TYPE_CHECKING:
    from flowgrpo_rc.correction.numerics.accumulator import MetricAccumulator
    from flowgrpo_rc.correction.numerics.compute import (
        NonFiniteLogProbError,
        RolloutCorrection,
        compute_offpolicy_metrics,
        compute_rollout_correction,
        compute_rollout_correction_and_rejection_mask,
        compute_rollout_correction_weights,
        compute_rollout_rejection_mask,
    )
    from flowgrpo_rc.correction.numerics.moments import Moments
    from flowgrpo_rc.correction.numerics.slime import slime_metrics
    from flowgrpo_rc.correction.options.config import RolloutCorrectionConfig
    from flowgrpo_rc.correction.options.explanation import Explanation, explain
    from flowgrpo_rc.correction.plan import SAFETY_BOUND

__all__ = [
    "Explanation",
    "MetricAccumulator",
    "Moments",
    "NonFiniteLogProbError",
    "RolloutCorrection",
    "RolloutCorrectionConfig",
    "SAFETY_BOUND",
    "compute_offpolicy_metrics",
    "compute_rollout_correction",
    "compute_rollout_correction_and_rejection_mask",
    "compute_rollout_correction_weights",
    "compute_rollout_rejection_mask",
    "explain",
    "slime_metrics",
]

__getattr__, __dir__ = lazy_names(__name__)
