"""The trajectory batch: its one vocabulary, the old policy beside it, and where rollout correction touches it.

A batch is a ``TensorDict``, a dict of tensors, or any object with a ``.batch`` mapping (verl's ``DataProto``). Its keys
are those of ``Key``, with ``B`` images, ``W`` trained SDE steps and latent shape ``L``.

Inside the trainer the old policy is a value, ``OldPolicy``. Whoever calls the loss by himself has it written into the
batch, by ``apply_bypass_mode_to_diffusion_batch`` or ``apply_rollout_correction_to_diffusion_batch``.
"""

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flowgrpo_rc.correction.mapping import TensorMapping, as_mapping, optional, response_mask
from flowgrpo_rc.correction.numerics.compute import RolloutCorrection, compute_rollout_correction
from flowgrpo_rc.correction.numerics.metrics import metrics_from_moments
from flowgrpo_rc.correction.numerics.moments import merge_over_ranks
from flowgrpo_rc.correction.numerics.run import weights_and_mask
from flowgrpo_rc.correction.options.config import RolloutCorrectionConfig

Batch = TypeVar("Batch")


class Key:
    """Every key of a batch; the tensor's shape, dtype and meaning stand under it."""

    LATENTS = "latents"
    """``(B, W, *L)`` float32: ``x`` before each trained step."""
    NEXT_LATENTS = "next_latents"
    """``(B, W, *L)`` float32: ``x`` after each trained step."""
    TIMESTEPS = "timesteps"
    """``(B, W)`` float32: as the scheduler names them."""
    SIGMAS = "sigmas"
    """``(B, W)`` float32: noise level before the step."""
    NEXT_SIGMAS = "next_sigmas"
    """``(B, W)`` float32: noise level after the step."""
    PROMPT_INDEX = "prompt_index"
    """``(B,)`` int64: row of the conditioning."""
    GROUP = "group"
    """``(B,)`` int64: images of one prompt share a number."""
    ADVANTAGES = "advantages"
    """``(B,)`` float32: one an image."""
    ROLLOUT_LOG_PROBS = "rollout_log_probs"
    """``(B, W)`` float32: from the rollout engine."""
    ROLLOUT_MEANS = "rollout_means"
    """``(B, W, *L)`` float32, where they were asked for: the engine's transition means."""
    OLD_LOG_PROBS = "old_log_probs"
    """``(B, W)`` float32: from the actor, or in bypass mode the rollout's."""
    OLD_TRANSITION_MEANS = "old_transition_means"
    """``(B, W, *L)`` float32, for objectives that need them: the old policy's transition means."""
    ROLLOUT_IS_WEIGHTS = "rollout_is_weights"
    """``(B, W)`` float32: importance weight times ``rollout_keep``, so 0 where rejected."""
    ROLLOUT_KEEP = "rollout_keep"
    """``(B, W)`` bool: what rejection kept; the denominator of ``rejection_normalization=kept``."""
    ROLLOUT_RS_BOUNDS = "rollout_rs_bounds"
    """``(B,)`` float32, for ``rollout_rs_threshold=auto``: the rejection bound of each image."""
    CLIP_WIDTHS = "clip_widths"
    """``(B, W)`` float32, for ``clip_ratio=auto``: half width of the clip band of each step."""
    RESPONSE_MASK = "response_mask"
    """``(B, T)`` of any dtype, for tokens alone: not zero where a token is valid."""
    REF_LOG_PROBS = "ref_log_probs"
    """``(B, T)`` float32, for tokens with ``use_kl_loss``: from the reference policy."""


@dataclass(frozen=True, kw_only=True)
class OldPolicy:
    """What the new policy is compared with: the old one's log-probs, and what correction has made of them.

    The rows are those of a batch, or of the part of one that it was made from.
    """

    log_probs: Float[Tensor, "B W"]
    """From the actor before the update, or in bypass mode from the rollout engine."""
    weights: Float[Tensor, "B W"] | None = None
    """Importance weight times ``keep``, 0 where rejected; ``None``: not corrected, or in bypass mode by the loss."""
    keep: Bool[Tensor, "B W"] | None = None
    """What rejection kept; ``None``: not corrected, or in bypass mode by the loss."""
    means: Float[Tensor, "B W *L"] | None = None
    """Transition means, for objectives that need them."""

    @classmethod
    def of_rollout(cls, batch: TensorMapping) -> "OldPolicy":
        """Bypass mode: the rollout engine's policy is the old one.

        Raises:
            ValueError: the batch has no ``rollout_log_probs``.
        """
        batch = _mapping_with((Key.ROLLOUT_LOG_PROBS,), batch, "bypass mode")
        return cls(log_probs=batch[Key.ROLLOUT_LOG_PROBS], means=optional(batch, Key.ROLLOUT_MEANS))

    @classmethod
    def concatenate(cls, parts: "Sequence[OldPolicy]") -> "OldPolicy":
        """The rows of all parts, in their order."""
        there = [name for name, values in vars(parts[0]).items() if values is not None]
        return cls(**{name: torch.cat([getattr(part, name) for part in parts]) for name in there})

    def __len__(self) -> int:
        return len(self.log_probs)

    def rows(self, chosen: Int[Tensor, " M"]) -> "OldPolicy":
        """The old policy of some of the rows, in the order of ``chosen``."""
        return OldPolicy(**{name: values[chosen] for name, values in vars(self).items() if values is not None})

    def batch_keys(self) -> dict[str, Tensor]:
        """What there is of it under the keys that the loss reads from a batch."""
        named = {
            Key.OLD_LOG_PROBS: self.log_probs,
            Key.ROLLOUT_IS_WEIGHTS: self.weights,
            Key.ROLLOUT_KEEP: self.keep,
            Key.OLD_TRANSITION_MEANS: self.means,
        }
        return {name: value for name, value in named.items() if value is not None}


class MiniBatch(NamedTuple):
    """What one optimizer step sees."""

    rows: Int[Tensor, " M"]
    """The rows of the batch that it sees."""
    old: OldPolicy | None = None
    """Of these rows. ``None``: the rollout's in bypass mode; in decoupled mode the present policy is the old one, and
    the update's own forward supplies it."""

    def part(self, places: Int[Tensor, " M"]) -> "MiniBatch":
        """The rows at some places of ``rows``."""
        return MiniBatch(self.rows[places], None if self.old is None else self.old.rows(places))


def apply_bypass_mode_to_diffusion_batch(batch: Batch) -> Batch:
    """Sets ``old_log_probs`` to ``rollout_log_probs``, the same tensor, and returns the batch.

    With pi_old = pi_rollout no pass of the actor is needed; weights and rejection then come from pi_theta
    over pi_rollout, inside the loss.

    Raises:
        ValueError: the batch has no ``rollout_log_probs``.
    """
    data = _mapping_with((Key.ROLLOUT_LOG_PROBS,), batch, "bypass mode")
    data[Key.OLD_LOG_PROBS] = data[Key.ROLLOUT_LOG_PROBS]
    return batch


def apply_rollout_correction_to_diffusion_batch(
    batch: Batch, config: RolloutCorrectionConfig | Mapping[str, Any], dp_group: Any = None
) -> tuple[Batch, dict[str, float]]:
    """Decoupled mode: weights and rejection from pi_old over pi_rollout, once for the whole batch.

    Adds two keys to the batch, and changes no tensor in it: ``rollout_is_weights`` (weight times keep, or keep
    alone without ``rollout_is``) and ``rollout_keep``. Metrics cover all ranks of ``dp_group`` (None: every rank,
    when ``torch.distributed`` is initialised), so each of them must call. A batch with a ``response_mask`` ``(B, T)``
    holds tokens, as for ``token_loss``: what is masked enters neither weights nor rejection nor metrics, whatever it
    holds.

    Raises:
        ValueError: a missing key, shapes that differ or are not ``(B, W)``, a NaN or infinite log-prob, or tokens of
            which none is valid (each rank needs one).
    """
    data = _mapping_with((Key.OLD_LOG_PROBS, Key.ROLLOUT_LOG_PROBS), batch, "rollout correction")
    old, result = correct_old_policy(OldPolicy(log_probs=data[Key.OLD_LOG_PROBS]), data, config, dp_group)
    for name, values in old.batch_keys().items():
        data[name] = values
    moments = merge_over_ranks(result.moments, dp_group)
    return batch, result.metrics if moments is result.moments or moments is None else metrics_from_moments(moments)


def correct_old_policy(
    old: OldPolicy, batch: TensorMapping, config: RolloutCorrectionConfig | Mapping[str, Any], dp_group: Any = None
) -> tuple[OldPolicy, RolloutCorrection]:
    """Decoupled mode: ``old`` with its weights and rejection over ``rollout_log_probs``, and what was measured.

    ``batch`` may be a part of one: a ``MetricAccumulator`` merges the measurements of several.

    Raises:
        ValueError: as ``apply_rollout_correction_to_diffusion_batch``.
    """
    if not isinstance(config, RolloutCorrectionConfig):
        config = RolloutCorrectionConfig.from_dict(config)
    batch = _mapping_with((Key.ROLLOUT_LOG_PROBS,), batch, "rollout correction")
    rollout = batch[Key.ROLLOUT_LOG_PROBS]
    shape = tuple(old.log_probs.shape)
    if shape != rollout.shape:
        raise ValueError(
            f"{Key.OLD_LOG_PROBS} and {Key.ROLLOUT_LOG_PROBS} must have identical shapes, got {shape} and "
            f"{tuple(rollout.shape)}."
        )
    if len(shape) != 2:
        raise ValueError(f"log-probs of a diffusion batch are (B, W): images by SDE steps; got {shape}.")
    valid = response_mask(batch, old.log_probs)
    timesteps = optional(batch, Key.TIMESTEPS) if valid is None else None
    if timesteps is not None and timesteps.shape != shape:
        raise ValueError(f"{Key.TIMESTEPS} has shape {tuple(timesteps.shape)}, but log-probs have {shape}.")
    result = compute_rollout_correction(
        old.log_probs,
        rollout,
        valid,
        config=config,
        timesteps=timesteps,
        rs_bounds=optional(batch, Key.ROLLOUT_RS_BOUNDS),
        dp_group=dp_group,
    )
    return replace(old, weights=_in_the_loss(result.weights, result.mask), keep=result.mask), result


def weights_and_keep(
    log_probs: Float[Tensor, "..."], batch: TensorMapping, config: RolloutCorrectionConfig
) -> tuple[Float[Tensor, "..."], Bool[Tensor, "..."]]:
    """The weights and the rejection of ``correct_old_policy`` for log-probs on a device, for which nobody waits.

    Nothing is measured, and what is not finite is not refused: that is for ``correct_old_policy`` to do once the device
    has been waited for.

    Args:
        log_probs: ``(B, W)``, or ``(n,)`` SDE steps that have nothing to do with each other.
        batch: ``rollout_log_probs`` of that shape, and ``rollout_rs_bounds`` for ``rollout_rs_threshold=auto``.
        config: without batch normalisation of the weights.
    """
    batch = _mapping_with((Key.ROLLOUT_LOG_PROBS,), batch, "rollout correction")
    plan = config.plan()
    bounds = batch[Key.ROLLOUT_RS_BOUNDS] if plan.calibrated and Key.ROLLOUT_RS_BOUNDS in batch.keys() else None  # noqa: SIM118
    weights, keep = weights_and_mask(log_probs, batch[Key.ROLLOUT_LOG_PROBS], plan=plan, row_bounds=bounds)
    return _in_the_loss(weights, keep), keep


def _in_the_loss(weights: Tensor | None, keep: Tensor) -> Tensor:
    """Weights as losses are multiplied by them: float32 whatever precision the log-probs have, 0 where rejected."""
    return keep.float() if weights is None else weights.float() * keep


def _mapping_with(keys: tuple[str, ...], batch: object, purpose: str) -> MutableMapping[str, Tensor]:
    """The batch's mapping; an error where it lacks one of the keys."""
    data = cast("MutableMapping[str, Tensor]", as_mapping(batch))
    present = set(data.keys())
    missing = [key for key in keys if key not in present]
    if missing:
        remedy = {
            Key.ROLLOUT_LOG_PROBS: "the rollout engine must record them (calculate_log_probs=true)",
            Key.OLD_LOG_PROBS: "the actor must score the batch first (or use bypass_mode)",
        }
        hints = "; ".join(f"{key}: {remedy[key]}" for key in missing)
        raise ValueError(f"{purpose} needs {', '.join(missing)} in the batch, which has {sorted(present)}. {hints}.")
    return data
