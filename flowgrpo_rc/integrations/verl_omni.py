"""Drop-in for verl-omni's `verl_omni.trainer.diffusion.rollout_correction`, installed by being imported.

    actor_rollout_ref.model.external_lib=flowgrpo_rc.integrations.verl_omni

switches a running cluster's workers over: importing this module replaces the functions of verl-omni's module,
wherever verl-omni has them, and the helper of verl that its diffusion loss calls in bypass mode. Where verl-omni is
missing, the import raises.

Unlike the verl drop-in, the k1 band is the documented one: `"lower_upper"` keeps `lower <= r <= upper`, with
`r` train over rollout. Rejection also leaves a `rollout_keep` in the batch, and every metric of this library is
reported, the gap per timestep included.

The section `algorithm.rollout_correction` takes every key of this library and of the dialects that it translates. In
bypass mode verl-omni's loss hands on verl's own keys alone, so that the others act in decoupled mode.
"""

import importlib
import warnings
from typing import Any

from jaxtyping import Float, Shaped
from torch import Tensor

from flowgrpo_rc import batch as trajectory
from flowgrpo_rc.correction import dialects
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
_ASKS = ("rollout_is", "rollout_rs", "rollout_token_veto_threshold", "preset", "use_tis", "use_rs", "rs_veto_threshold")
"""Keys that ask for weights or rejection unless they are null or false."""


def rollout_correction_enabled(rollout_corr_config: Any) -> bool:
    """Whether a configuration asks for weights or rejection, the veto included, in any dialect."""
    if rollout_corr_config is None:
        return False
    asked = (rollout_corr_config.get(key, None) for key in _ASKS)
    return any(value is not None and value is not False and value != "" for value in asked)


def apply_bypass_mode_to_diffusion_batch(batch: Any) -> None:
    """Sets `old_log_probs` to `rollout_log_probs`; ValueError when the batch has none."""
    trajectory.apply_bypass_mode_to_diffusion_batch(batch)


def apply_rollout_correction_to_diffusion_batch(batch: Any, rollout_corr_config: Any) -> tuple[Any, dict[str, float]]:
    """Decoupled mode: adds `rollout_is_weights` (weight times keep) and `rollout_keep`; returns batch and metrics.

    Without weights and rejection the batch stays as it is, as in verl-omni, and the metrics are diagnostics.

    Warns:
        UserWarning: a key that is none of this library's has no effect here.
    """
    config = _read(rollout_corr_config)
    enabled = config.rollout_is is not None or config.plan().can_reject
    before = set(batch.batch.keys())
    batch, metrics = trajectory.apply_rollout_correction_to_diffusion_batch(batch, config)
    if not enabled:
        for key in {trajectory.ROLLOUT_IS_WEIGHTS, trajectory.ROLLOUT_KEEP} - before:
            del batch.batch[key]
    return batch, metrics


def _read(section: Any) -> RolloutCorrectionConfig:
    """verl-omni's section: `rollout_is` is off unless given, and Hydra's own keys (`_target_`) mean nothing.

    Other unknown keys warn and are left out: a later verl-omni may have keys of its own there.
    """
    values = {key: section[key] for key in section if not str(key).startswith("_")}
    known = dialects.known_keys(RolloutCorrectionConfig.__dataclass_fields__)
    for key in [key for key in values if key not in known]:
        near = dialects.nearest(str(key), known)
        warnings.warn(
            f"algorithm.rollout_correction.{key}={values.pop(key)!r} has no effect: {__name__} does not know it; "
            f"nearest known: {near}",
            stacklevel=3,
        )
    if not dialects.decides_weights(values):
        values = {"rollout_is": None, **values}
    return RolloutCorrectionConfig.from_dict(values)


def compute_rollout_corr_metrics_from_logprobs(
    log_prob: Float[Tensor, "..."],
    rollout_log_prob: Float[Tensor, "..."],
    timesteps: Shaped[Tensor, "..."] | None = None,
) -> dict[str, float]:
    """Diagnostics of the current policy against the rollout policy, prefixed `rollout_corr/`.

    `timesteps` of another shape than the log-probs are left out, as in verl-omni.
    """
    aligned = timesteps is not None and timesteps.shape == log_prob.shape
    return compute_offpolicy_metrics(log_prob, rollout_log_prob, timesteps=timesteps if aligned else None)


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
