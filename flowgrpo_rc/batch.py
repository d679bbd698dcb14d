"""The trajectory batch: its keys, the old policy beside it, and the functions that apply rollout correction to it.

A batch is a ``TensorDict``, a dict of tensors, or any object with a ``.batch`` mapping (verl's ``DataProto``). ``Key``
lists its keys, with ``B`` images, ``W`` trained SDE steps and latent shape ``L``.

Inside the trainer the old policy is a value, ``OldPolicy``. In a trainer of your own,
``apply_bypass_mode_to_diffusion_batch`` or ``apply_rollout_correction_to_diffusion_batch`` writes it into the batch.
"""

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar, cast, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flowgrpo_rc.correction.numerics.compute import correct, correct_and_measure
from flowgrpo_rc.correction.numerics.moments import Moments, merge_over_ranks, metrics_from_moments
from flowgrpo_rc.correction.options.config import RolloutCorrectionConfig

Batch = TypeVar("Batch")


class Key:
    """Every key of a batch, with the tensor's shape, dtype and meaning."""

    LATENTS = "latents"
    """``(B, W, *L)`` float32: ``x`` before each trained step."""
    NEXT_LATENTS = "next_latents"
    """``(B, W, *L)`` float32: ``x`` after each trained step."""
    TIMESTEPS = "timesteps"
    """``(B, W)`` float32: the scheduler's timesteps."""
    SIGMAS = "sigmas"
    """``(B, W)`` float32: noise level before the step."""
    NEXT_SIGMAS = "next_sigmas"
    """``(B, W)`` float32: noise level after the step."""
    PROMPT_INDEX = "prompt_index"
    """``(B,)`` int64: row of the conditioning."""
    GROUP = "group"
    """``(B,)`` int64: images of one prompt share a number."""
    ADVANTAGES = "advantages"
    """``(B,)`` float32: one per image."""
    ROLLOUT_LOG_PROBS = "rollout_log_probs"
    """``(B, W)`` float32: from the rollout engine."""
    ROLLOUT_MEANS = "rollout_means"
    """``(B, W, *L)`` float32, optional: the engine's transition means."""
    OLD_LOG_PROBS = "old_log_probs"
    """``(B, W)`` float32: from the actor, or in bypass mode the rollout's."""
    OLD_TRANSITION_MEANS = "old_transition_means"
    """``(B, W, *L)`` float32, for objectives that need them: the old policy's transition means."""
    ROLLOUT_IS_WEIGHTS = "rollout_is_weights"
    """``(B, W)`` float32: importance weight times ``rollout_keep``, so 0 where rejected."""
    ROLLOUT_KEEP = "rollout_keep"
    """``(B, W)`` bool: steps that rejection kept; the denominator of ``rejection_normalization=kept``."""
    ROLLOUT_RS_BOUNDS = "rollout_rs_bounds"
    """``(B,)`` float32, for ``rollout_rs_threshold=auto``: the rejection bound of each image."""
    CLIP_WIDTHS = "clip_widths"
    """``(B, W)`` float32, for ``clip_ratio=auto``: half width of the clip band of each step."""
    CLEAN_LATENTS = "clean_latents"
    """``(B, *L)`` float32, for objectives on clean images: latents of the finished images, in place of all steps."""
    NOISE = "noise"
    """``(B, K, *L)`` float32: the noise of each place of a clean image; ``sigmas`` ``(B, K)`` has the levels."""
    OLD_VELOCITIES = "old_velocities"
    """``(B, K, *L)`` float32: the old policy's velocities at the noised images."""
    RESPONSE_MASK = "response_mask"
    """``(B, T)`` of any dtype, tokens only: non-zero at valid tokens."""
    REF_LOG_PROBS = "ref_log_probs"
    """``(B, T)`` float32, tokens with ``use_kl_loss`` only: from the reference policy."""


# Reading tensors by name from a dict, a TensorDict or an object that holds one.


@runtime_checkable
class TensorMapping(Protocol):
    """A dict of tensors, a ``TensorDict``, or anything else with keys."""

    def keys(self) -> Any: ...
    def __getitem__(self, name: str, /) -> Any: ...


@runtime_checkable
class BatchHolder(Protocol):
    """An object with its tensors in ``.batch``, such as verl's ``DataProto``."""

    @property
    def batch(self) -> Any: ...


def as_mapping(batch: object) -> TensorMapping:
    """The mapping inside: ``batch.batch`` where there is one, else the batch itself.

    Raises:
        ValueError: neither is a mapping.
    """
    for data in (None if isinstance(batch, Mapping) else getattr(batch, "batch", None), batch):
        if isinstance(data, TensorMapping):
            return data
    raise ValueError(f"A {type(batch).__name__} is no batch: give a TensorDict, a dict, or an object with .batch.")


def optional(mapping: TensorMapping, name: str) -> Tensor | None:
    """The tensor of that name; ``None`` where it is absent or ``None``."""
    return mapping[name] if name in mapping.keys() else None  # noqa: SIM118  (a TensorDict refuses plain ``in``)


def response_mask(data: TensorMapping, log_prob: Tensor) -> Bool[Tensor, "B T"] | None:
    """Valid tokens, from a mask of any dtype; ``None`` on the diffusion path, which has no such key."""
    # SDE windows are dense, so that only tokens have a mask.
    mask = optional(data, "response_mask")
    if mask is None:
        return None
    if mask.dim() != 2 or mask.shape != log_prob.shape:
        raise ValueError(
            f"response_mask has shape {tuple(mask.shape)} and log_probs {tuple(log_prob.shape)}; "
            "on the token path both must be (B, T)"
        )
    return mask != 0


@dataclass(frozen=True, kw_only=True)
class OldPolicy:
    """The old policy's log-probs of a batch or a part of it, with the weights and rejection of the correction."""

    log_probs: Float[Tensor, "B W"]
    """From the actor before the update, or in bypass mode from the rollout engine."""
    weights: Float[Tensor, "B W"] | None = None
    """Importance weight times ``keep``, 0 if rejected; ``None``: not corrected, or in bypass mode by the loss."""
    keep: Bool[Tensor, "B W"] | None = None
    """Steps that rejection kept; ``None``: not corrected, or in bypass mode by the loss."""
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
        """Join the rows of all parts, in order."""
        there = [name for name, values in vars(parts[0]).items() if values is not None]
        return cls(**{name: torch.cat([getattr(part, name) for part in parts]) for name in there})

    def __len__(self) -> int:
        return len(self.log_probs)

    def rows(self, chosen: Int[Tensor, " M"]) -> "OldPolicy":
        """Select rows, in the order of ``chosen``."""
        return OldPolicy(**{name: values[chosen] for name, values in vars(self).items() if values is not None})

    def batch_keys(self) -> dict[str, Tensor]:
        """Its tensors, without those that are ``None``, under the keys that the loss reads from a batch."""
        named = {
            Key.OLD_LOG_PROBS: self.log_probs,
            Key.ROLLOUT_IS_WEIGHTS: self.weights,
            Key.ROLLOUT_KEEP: self.keep,
            Key.OLD_TRANSITION_MEANS: self.means,
        }
        return {name: value for name, value in named.items() if value is not None}


class MiniBatch(NamedTuple):
    """Rows and old policy of one optimizer step."""

    rows: Int[Tensor, " M"]
    """Rows of the batch."""
    old: OldPolicy | None = None
    """The old policy of these rows. ``None``: the rollout in bypass mode; in decoupled mode the current policy, which
    the update's own forward pass supplies."""
    rejected: int = 0
    """Steps that were left out of ``rows`` because rejection removes them; they count in the means."""
    idle: int = 0
    """Steps that were left out because their advantage is 0; they count in the loss's mean alone."""

    def part(self, places: Int[Tensor, " M"]) -> "MiniBatch":
        """The part at some places of ``rows``."""
        return self._replace(rows=self.rows[places], old=None if self.old is None else self.old.rows(places))


def apply_bypass_mode_to_diffusion_batch(batch: Batch) -> Batch:
    """Set ``old_log_probs`` to ``rollout_log_probs`` (the same tensor) and return the batch.

    With pi_old = pi_rollout the actor needs no scoring pass. The loss computes weights and rejection from
    pi_theta / pi_rollout.

    Raises:
        ValueError: the batch has no ``rollout_log_probs``.
    """
    data = _mapping_with((Key.ROLLOUT_LOG_PROBS,), batch, "bypass mode")
    # No copy: nothing in this package writes into log-probs.
    data[Key.OLD_LOG_PROBS] = data[Key.ROLLOUT_LOG_PROBS]
    return batch


def apply_rollout_correction_to_diffusion_batch(
    batch: Batch, config: RolloutCorrectionConfig | Mapping[str, Any], dp_group: Any = None
) -> tuple[Batch, dict[str, float]]:
    """Decoupled mode: compute weights and rejection from pi_old / pi_rollout, once for the whole batch.

    Add two keys to the batch and change no tensor in it: ``rollout_is_weights`` (weight times keep, or keep alone
    without ``rollout_is``) and ``rollout_keep``. Metrics cover all ranks of ``dp_group`` (None: every rank, when
    ``torch.distributed`` is initialised), so each rank must call. A batch with a ``response_mask`` ``(B, T)`` holds
    tokens, as for ``token_loss``; masked tokens affect neither weights nor rejection nor metrics.

    Raises:
        ValueError: a missing key, shapes that differ or are not ``(B, W)``, a NaN or infinite log-prob, or no valid
            token (each rank needs one).
    """
    data = _mapping_with((Key.OLD_LOG_PROBS, Key.ROLLOUT_LOG_PROBS), batch, "rollout correction")
    old, moments = correct_old_policy(OldPolicy(log_probs=data[Key.OLD_LOG_PROBS]), data, config, dp_group)
    for name, values in old.batch_keys().items():
        data[name] = values
    # Weights come from this rank's rows; only the metrics need the others.
    return batch, metrics_from_moments(merge_over_ranks(moments, dp_group) or moments)


def correct_old_policy(
    old: OldPolicy, batch: TensorMapping, config: RolloutCorrectionConfig | Mapping[str, Any], dp_group: Any = None
) -> tuple[OldPolicy, Moments]:
    """Decoupled mode: add weights and rejection, pi_old / pi_rollout, to ``old``; return the metrics' moments too.

    ``batch`` may be a part of a batch; a ``MetricAccumulator`` merges the moments of several parts.

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
    # A (B,) batch would make each step a sequence of its own, and sequence criteria would mean something else.
    if len(shape) != 2:
        raise ValueError(f"log-probs of a diffusion batch are (B, W): images by SDE steps; got {shape}.")
    valid = response_mask(batch, old.log_probs)
    # Tokens have no timesteps to group the gap by.
    timesteps = optional(batch, Key.TIMESTEPS) if valid is None else None
    if timesteps is not None and timesteps.shape != shape:
        raise ValueError(f"{Key.TIMESTEPS} has shape {tuple(timesteps.shape)}, but log-probs have {shape}.")
    weights, keep, moments = correct_and_measure(
        old.log_probs,
        rollout,
        valid,
        plan=config.plan(),
        timesteps=timesteps,
        row_bounds=optional(batch, Key.ROLLOUT_RS_BOUNDS),
        dp_group=dp_group,
    )
    return replace(old, weights=_in_the_loss(weights, keep), keep=keep), moments


def weights_and_keep(
    log_probs: Float[Tensor, "..."], batch: TensorMapping, config: RolloutCorrectionConfig
) -> tuple[Float[Tensor, "..."], Bool[Tensor, "..."]]:
    """Weights and rejection as in ``correct_old_policy``, without a host sync.

    Nothing is measured, and values that are not finite pass: ``correct_old_policy`` refuses them once the host has
    waited for the device anyway.

    Args:
        log_probs: ``(B, W)``, or ``(n,)`` independent SDE steps.
        batch: ``rollout_log_probs`` of that shape, and ``rollout_rs_bounds`` for ``rollout_rs_threshold=auto``.
        config: without batch normalisation of the weights.
    """
    batch = _mapping_with((Key.ROLLOUT_LOG_PROBS,), batch, "rollout correction")
    bounds = optional(batch, Key.ROLLOUT_RS_BOUNDS)
    found = correct(log_probs, batch[Key.ROLLOUT_LOG_PROBS], plan=config.plan(), row_bounds=bounds)
    return _in_the_loss(found.weights, found.keep), found.keep


def _in_the_loss(weights: Tensor | None, keep: Tensor) -> Tensor:
    """The factor of the loss: float32 for log-probs of any precision, 0 if rejected."""
    return keep.float() if weights is None else weights.float() * keep


def _mapping_with(keys: tuple[str, ...], batch: object, purpose: str) -> MutableMapping[str, Tensor]:
    """The batch's mapping; ``ValueError`` with a remedy if it lacks one of the keys."""
    # A TensorDict has a mapping's methods without being one.
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
