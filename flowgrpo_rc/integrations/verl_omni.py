"""Drop-in for verl-omni's `verl_omni.trainer.diffusion.rollout_correction`, installed by being imported.

    actor_rollout_ref.model.external_lib=flowgrpo_rc.integrations.verl_omni

switches a running cluster's workers over: importing this module replaces the functions of verl-omni's module,
wherever verl-omni has them, and the helper of verl that its diffusion loss calls in bypass mode. Where verl-omni is
missing, the import raises.

Unlike the verl drop-in, the k1 band is the documented one: `"lower_upper"` keeps `lower <= r <= upper`, with
`r` train over rollout. Rejection also leaves a `rollout_keep` in the batch, and every metric of this library is
reported, the gap per timestep included.
"""

import importlib
from typing import Any

from jaxtyping import Float, Shaped
from torch import Tensor

from flowgrpo_rc import batch as trajectory
from flowgrpo_rc.correction.compute import compute_offpolicy_metrics, run_plan
from flowgrpo_rc.correction.config import RolloutCorrectionConfig
from flowgrpo_rc.correction.thresholds import ThresholdSpec, make_plan
from flowgrpo_rc.integrations._replace import Replacement
from flowgrpo_rc.integrations.verl import data_proto

__all__ = [
    "apply_bypass_mode_to_diffusion_batch",
    "apply_rollout_correction_to_diffusion_batch",
    "compute_rollout_corr_metrics_from_logprobs",
    "compute_rollout_correction_and_rejection_mask",
    "installed",
    "rollout_correction_enabled",
]

_HOME = "verl_omni.trainer.diffusion.rollout_correction"
_LOSSES = "verl_omni.workers.utils.losses"
_HELPER = "compute_rollout_correction_and_rejection_mask"


def rollout_correction_enabled(rollout_corr_config: Any) -> bool:
    """Whether a configuration asks for weights or rejection."""
    if rollout_corr_config is None:
        return False
    return any(bool(rollout_corr_config.get(key, None)) for key in ("rollout_is", "rollout_rs"))


def apply_bypass_mode_to_diffusion_batch(batch: Any) -> None:
    """Sets `old_log_probs` to `rollout_log_probs`; ValueError when the batch has none."""
    trajectory.apply_bypass_mode_to_diffusion_batch(batch)


def apply_rollout_correction_to_diffusion_batch(batch: Any, rollout_corr_config: Any) -> tuple[Any, dict[str, float]]:
    """Decoupled mode: adds `rollout_is_weights` (weight times keep) and `rollout_keep`; returns batch and metrics.

    Without `rollout_is` and `rollout_rs` the batch stays as it is, as in verl-omni, and the metrics are diagnostics.
    """
    known = RolloutCorrectionConfig.__dataclass_fields__
    options = {key: rollout_corr_config[key] for key in known if key in rollout_corr_config}
    config = RolloutCorrectionConfig.from_dict({"rollout_is": None, **options})
    enabled = config.rollout_is is not None or config.plan().can_reject
    before = set(batch.batch.keys())
    batch, metrics = trajectory.apply_rollout_correction_to_diffusion_batch(batch, config)
    if not enabled:
        for key in {trajectory.ROLLOUT_IS_WEIGHTS, trajectory.ROLLOUT_KEEP} - before:
            del batch.batch[key]
    return batch, metrics


def compute_rollout_corr_metrics_from_logprobs(
    log_prob: Float[Tensor, "..."], rollout_log_prob: Float[Tensor, "..."]
) -> dict[str, float]:
    """Diagnostics of the current policy against the rollout policy, prefixed `rollout_corr/`."""
    return compute_offpolicy_metrics(log_prob, rollout_log_prob)


def compute_rollout_correction_and_rejection_mask(
    old_log_prob: Float[Tensor, "B T"],
    rollout_log_prob: Float[Tensor, "B T"],
    response_mask: Shaped[Tensor, "B T"],
    rollout_is: str | None = None,
    rollout_is_threshold: ThresholdSpec = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: ThresholdSpec = None,
) -> tuple[Any, Tensor, dict[str, float]]:
    """verl's helper as verl-omni's diffusion loss calls it, with the documented k1 band."""
    plan = make_plan(
        None if rollout_is_threshold is None else rollout_is,
        2.0 if rollout_is_threshold is None else rollout_is_threshold,
        rollout_is_batch_normalize,
        rollout_rs=rollout_rs,
        rollout_rs_threshold=rollout_rs_threshold,
    )
    result = run_plan(old_log_prob, rollout_log_prob, response_mask, plan=plan)
    weights = None if result.weights is None else data_proto({"rollout_is_weights": result.weights})
    return weights, result.mask, result.metrics


def _install() -> Replacement:
    try:
        home = importlib.import_module(_HOME)
    except ImportError as error:
        raise ImportError(f"This drop-in replaces functions of verl-omni, which cannot be imported: {error}") from error
    replacement = Replacement()
    functions = (
        rollout_correction_enabled,
        apply_bypass_mode_to_diffusion_batch,
        apply_rollout_correction_to_diffusion_batch,
        compute_rollout_corr_metrics_from_logprobs,
    )
    replacement.apply(home, {f.__name__: f for f in functions}, package="verl_omni")
    losses = importlib.import_module(_LOSSES)
    if hasattr(losses, _HELPER):
        replacement.apply(losses, {_HELPER: compute_rollout_correction_and_rejection_mask}, package="verl_omni")
    return replacement


installed: Replacement = _install()
"""What was replaced; `installed.undo()` restores verl-omni's functions."""
