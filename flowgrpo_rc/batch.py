"""The trajectory batch, and the two places where rollout correction touches it.

A batch is a `TensorDict`, a dict of tensors, or any object with a `.batch` mapping (verl's `DataProto`). Its
keys are in `BATCH_KEYS`: `B` images, `W` trained SDE steps, latent shape `L`.
"""

from collections.abc import Mapping, MutableMapping
from typing import Any, TypeVar, cast

from torch import Tensor

from flowgrpo_rc.correction.mapping import as_mapping, optional, response_mask
from flowgrpo_rc.correction.numerics.compute import RolloutCorrection, compute_rollout_correction
from flowgrpo_rc.correction.numerics.metrics import metrics_from_moments
from flowgrpo_rc.correction.numerics.moments import merge_over_ranks
from flowgrpo_rc.correction.options.config import RolloutCorrectionConfig

LATENTS = "latents"
NEXT_LATENTS = "next_latents"
TIMESTEPS = "timesteps"
SIGMAS = "sigmas"
NEXT_SIGMAS = "next_sigmas"
ROLLOUT_LOG_PROBS = "rollout_log_probs"
ROLLOUT_MEANS = "rollout_means"
OLD_LOG_PROBS = "old_log_probs"
ROLLOUT_IS_WEIGHTS = "rollout_is_weights"
ROLLOUT_KEEP = "rollout_keep"
ROLLOUT_RS_BOUNDS = "rollout_rs_bounds"
CLIP_WIDTHS = "clip_widths"
ADVANTAGES = "advantages"
GROUP = "group"

BATCH_KEYS: dict[str, str] = {
    LATENTS: "(B, W, *L) float32: x before each trained step",
    NEXT_LATENTS: "(B, W, *L) float32: x after it",
    TIMESTEPS: "(B, W) float32: as the scheduler names them",
    SIGMAS: "(B, W) float32: noise level before the step",
    NEXT_SIGMAS: "(B, W) float32: noise level after it",
    ROLLOUT_LOG_PROBS: "(B, W) float32: from the rollout engine",
    ROLLOUT_MEANS: "(B, W, *L) float32, optional: the engine's transition mean",
    OLD_LOG_PROBS: "(B, W) float32: from the actor, or the rollout's in bypass mode",
    ROLLOUT_IS_WEIGHTS: "(B, W) float32: weight times keep, 0 where rejected",
    ROLLOUT_KEEP: "(B, W) bool: what rejection kept; the denominator of rejection_normalization=kept",
    ROLLOUT_RS_BOUNDS: "(B,) float32, for rollout_rs_threshold=auto: the rejection bound of each image",
    CLIP_WIDTHS: "(B, W) float32, for clip_ratio=auto: half width of the clip band of each step",
    ADVANTAGES: "(B,) float32: one per image",
    GROUP: "(B,) int64: images of one prompt share a number",
}

Batch = TypeVar("Batch")


def apply_bypass_mode_to_diffusion_batch(batch: Batch) -> Batch:
    """Sets `old_log_probs` to `rollout_log_probs`, the same tensor, and returns the batch.

    With pi_old = pi_rollout no pass of the actor is needed; weights and rejection then come from pi_theta
    over pi_rollout, inside the loss.

    Raises:
        ValueError: the batch has no `rollout_log_probs`.
    """
    data = _mapping(batch)
    _require(data, (ROLLOUT_LOG_PROBS,), "bypass mode")
    data[OLD_LOG_PROBS] = data[ROLLOUT_LOG_PROBS]
    return batch


def apply_rollout_correction_to_diffusion_batch(
    batch: Batch, config: RolloutCorrectionConfig | Mapping[str, Any], dp_group: Any = None
) -> tuple[Batch, dict[str, float]]:
    """Decoupled mode: weights and rejection from pi_old over pi_rollout, once for the whole batch.

    Adds two keys to the batch, and changes no tensor in it: `rollout_is_weights` (weight times keep, or keep
    alone without `rollout_is`) and `rollout_keep`. Metrics cover all ranks of `dp_group` (None: every rank,
    when `torch.distributed` is initialised), so each of them must call. A batch with a `response_mask` `(B, T)` holds
    tokens, as for `diffusion_loss`: what is masked enters neither weights nor rejection nor metrics, whatever it holds.

    Raises:
        ValueError: a missing key, shapes that differ or are not `(B, W)`, a NaN or infinite log-prob, or tokens of
            which none is valid (each rank needs one).
    """
    result = correct_diffusion_batch(batch, config, dp_group)
    moments = merge_over_ranks(result.moments, dp_group)
    return batch, result.metrics if moments is result.moments or moments is None else metrics_from_moments(moments)


def correct_diffusion_batch(
    batch: object, config: RolloutCorrectionConfig | Mapping[str, Any], dp_group: Any = None
) -> RolloutCorrection:
    """The same for one part of a batch: sets the same keys, and leaves it to a `MetricAccumulator` to merge metrics.

    Raises:
        ValueError: as `apply_rollout_correction_to_diffusion_batch`.
    """
    if not isinstance(config, RolloutCorrectionConfig):
        config = RolloutCorrectionConfig.from_dict(config)
    data = _mapping(batch)
    _require(data, (OLD_LOG_PROBS, ROLLOUT_LOG_PROBS), "rollout correction")
    old, rollout = data[OLD_LOG_PROBS], data[ROLLOUT_LOG_PROBS]
    _check_shapes(old, rollout)
    valid = response_mask(data, old)
    timesteps = _timesteps(data, old) if valid is None else None
    bounds = optional(data, ROLLOUT_RS_BOUNDS)
    result = compute_rollout_correction(
        old, rollout, valid, config=config, timesteps=timesteps, rs_bounds=bounds, dp_group=dp_group
    )
    keep = result.mask
    data[ROLLOUT_IS_WEIGHTS] = keep.float() if result.weights is None else result.weights.float() * keep
    data[ROLLOUT_KEEP] = keep
    return result


def _mapping(batch: object) -> MutableMapping[str, Tensor]:
    return cast("MutableMapping[str, Tensor]", as_mapping(batch))


def _require(data: MutableMapping[str, Tensor], keys: tuple[str, ...], purpose: str) -> None:
    present = set(data.keys())
    missing = [key for key in keys if key not in present]
    if not missing:
        return
    remedy = {
        ROLLOUT_LOG_PROBS: "the rollout engine must record them (calculate_log_probs=true)",
        OLD_LOG_PROBS: "the actor must score the batch first (or use bypass_mode)",
    }
    hints = "; ".join(f"{key}: {remedy[key]}" for key in missing if key in remedy)
    raise ValueError(f"{purpose} needs {', '.join(missing)} in the batch, which has {sorted(present)}. {hints}.")


def _check_shapes(old: Tensor, rollout: Tensor) -> None:
    if old.shape != rollout.shape:
        raise ValueError(
            f"{OLD_LOG_PROBS} and {ROLLOUT_LOG_PROBS} must have identical shapes, got {tuple(old.shape)} and "
            f"{tuple(rollout.shape)}."
        )
    if old.dim() != 2:
        raise ValueError(f"log-probs of a diffusion batch are (B, W): images by SDE steps; got {tuple(old.shape)}.")


def _timesteps(data: MutableMapping[str, Tensor], like: Tensor) -> Tensor | None:
    """The batch's timesteps, if it has them."""
    if TIMESTEPS not in set(data.keys()):
        return None
    timesteps = data[TIMESTEPS]
    if timesteps.shape != like.shape:
        raise ValueError(f"{TIMESTEPS} has shape {tuple(timesteps.shape)}, but log-probs have {tuple(like.shape)}.")
    return timesteps
