"""Rollout correction: importance weights, rejection and diagnostics for a rollout/training mismatch.

Names resolve on first use, so that reading a configuration does not import torch.
"""

import importlib
from typing import TYPE_CHECKING

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

_HOME = {
    "RolloutCorrectionConfig": "options.config",
    "Explanation": "options.explanation",
    "explain": "options.explanation",
    "slime_metrics": "numerics.slime",
    "MetricAccumulator": "numerics.accumulator",
    "Moments": "numerics.moments",
    "SAFETY_BOUND": "plan",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_HOME.get(name, 'numerics.compute')}")
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
