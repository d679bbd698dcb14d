"""Reading what the loss needs from batch and model output. Every error names the key and both shapes."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flowgrpo_rc.loss.policy import kept


@runtime_checkable
class TensorMapping(Protocol):
    """A dict of tensors, a ``TensorDict``, or anything else with keys."""

    def keys(self) -> Any: ...
    def __getitem__(self, name: str, /) -> Any: ...


@runtime_checkable
class BatchHolder(Protocol):
    """What keeps its tensors in ``.batch``: verl's ``DataProto``."""

    @property
    def batch(self) -> Any: ...


class Elements(NamedTuple):
    """What every objective reads: one SDE step or one token an element, all in the shape of the log-probs."""

    log_prob: Float[Tensor, "..."]
    """Of pi_theta, at least float32, with gradient."""
    old_log_prob: Float[Tensor, "..."]
    """Of pi_old, or in bypass mode of pi_rollout."""
    advantages: Float[Tensor, "..."]
    weights: Float[Tensor, "..."] | None
    """Weights in the loss; ``None`` without."""
    keep: Bool[Tensor, "..."] | None
    """What the loss sees; on the token path the modified mask. ``None``: everything."""
    valid: Bool[Tensor, "B T"] | None
    """The ``response_mask`` of the token path; ``None`` on the diffusion path."""


def as_mapping(batch: object) -> TensorMapping:
    """The mapping inside: ``batch.batch`` where there is one, else the batch itself.

    Raises:
        ValueError: it is neither.
    """
    data = batch if isinstance(batch, Mapping) else getattr(batch, "batch", None)
    if data is None and hasattr(batch, "keys") and hasattr(batch, "__getitem__"):
        data = batch
    if data is None:
        raise ValueError(f"A {type(batch).__name__} is no batch: give a TensorDict, a dict, or an object with .batch.")
    return cast("TensorMapping", data)


def optional(mapping: TensorMapping, name: str) -> Tensor | None:
    """The tensor of that name; ``None`` where it is absent or ``None``."""
    return mapping[name] if name in mapping.keys() else None  # noqa: SIM118  (a TensorDict refuses plain ``in``)


def require(mapping: TensorMapping, name: str, where: str) -> Tensor:
    """The tensor of that name.

    Raises:
        ValueError: ``where`` lacks it.
    """
    value = optional(mapping, name)
    if value is None:
        raise ValueError(f"{where} lacks {name!r}; it holds: {', '.join(sorted(map(str, mapping.keys())))}")
    return value


def like_log_probs(data: TensorMapping, name: str, log_prob: Tensor) -> Tensor | None:
    """An optional tensor that must have the shape of the log-probs."""
    value = optional(data, name)
    if value is not None and value.shape != log_prob.shape:
        raise ValueError(
            f"{name} has shape {tuple(value.shape)} but log_probs has {tuple(log_prob.shape)}; they must agree"
        )
    return value


def response_mask(data: TensorMapping, log_prob: Tensor) -> Bool[Tensor, "B T"] | None:
    """Valid tokens, from a mask of any dtype; ``None`` on the diffusion path, which has no such key."""
    mask = optional(data, "response_mask")
    if mask is None:
        return None
    if mask.dim() != 2 or mask.shape != log_prob.shape:
        raise ValueError(
            f"response_mask has shape {tuple(mask.shape)} and log_probs {tuple(log_prob.shape)}; "
            "on the token path both must be (B, T)"
        )
    return mask != 0


def old_log_probs(data: TensorMapping, log_prob: Tensor, *, bypass: bool) -> Tensor:
    """``old_log_probs``; in bypass mode the rollout's, under either name."""
    names = ("rollout_log_probs", "old_log_probs") if bypass else ("old_log_probs",)
    for name in names:
        value = like_log_probs(data, name, log_prob)
        if value is not None:
            return value
    raise ValueError(f"data lacks {' or '.join(names)}; it holds: {', '.join(sorted(map(str, data.keys())))}")


def advantages_like(data: TensorMapping, log_prob: Tensor, clip: float | None) -> Tensor:
    """Clamped to ``+-clip`` and broadcast from one an image (a sequence) to one a step (a token)."""
    advantages = require(data, "advantages", "data")
    if advantages.shape != log_prob.shape:
        if advantages.shape != log_prob.shape[:1]:
            raise ValueError(
                f"advantages has shape {tuple(advantages.shape)}; expected ({log_prob.shape[0]},) or "
                f"{tuple(log_prob.shape)}"
            )
        advantages = advantages.reshape(-1, *([1] * (log_prob.dim() - 1))).expand_as(log_prob)
    advantages = advantages.detach()
    return advantages if clip is None else torch.clamp(advantages, -clip, clip)


def mean_shift(
    model_output: TensorMapping, data: TensorMapping, elements: Elements, *, bypass: bool
) -> tuple[Tensor, Tensor]:
    """``mean over dims of (mu - mu_old)^2``, 0 where not kept, and the step's std, in the shape of the log-probs."""
    mean = require(model_output, "transition_means", "model_output (this loss_mode)")
    std = require(model_output, "transition_stds", "model_output (this loss_mode)")
    old_mean = require(data, "rollout_means" if bypass else "old_transition_means", "data (this loss_mode)")
    shape = elements.log_prob.shape
    for name, value, expected in (
        ("transition_stds", std, shape),
        ("transition_means", mean[(..., *[0] * (mean.dim() - len(shape)))], shape),
        ("the old transition means", old_mean, mean.shape),
    ):
        if value.shape != expected:
            raise ValueError(f"{name} has shape {tuple(value.shape)}; expected {tuple(expected)}")
    return (kept(mean - old_mean.detach(), elements.keep) ** 2).flatten(len(shape)).mean(-1), std


def reference_means(model_output: TensorMapping, elements: Elements) -> tuple[Tensor, Tensor, Tensor]:
    """Transition means, the reference's, and stds; equal means and a std of 1 where not kept."""
    names = ("transition_means", "ref_transition_means", "transition_stds")
    mean, ref_mean, std = values = [require(model_output, name, "model_output (use_kl_loss=true)") for name in names]
    shape, keep = elements.log_prob.shape, elements.keep
    of_means = shape + mean.shape[len(shape) :]
    for name, value, expected in zip(names, values, (of_means, of_means, shape), strict=True):
        if value.shape != expected:
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}; beside the log-probs it must be {tuple(expected)}"
            )
    return kept(mean, keep), kept(ref_mean, keep), kept(std, keep, 1.0)


def not_finite(**mappings: object) -> str:
    """What to say where a result is NaN or infinite: which tensors hold such values, and how many of them."""
    found = []
    for where, mapping in mappings.items():
        tensors = as_mapping(mapping)
        for name in tensors.keys():  # noqa: SIM118  (a TensorDict iterates over its rows)
            value = tensors[name]
            if isinstance(value, Tensor) and value.is_floating_point():
                bad = int((~torch.isfinite(value)).sum())
                found += [f"{bad} of {value.numel()} in {where}[{name!r}]"] * (bad > 0)
    cause = "NaN or infinite: " + ", ".join(found) if found else "all inputs are finite, so a ratio has overflowed"
    return f"{cause}. Leave such samples out, or stop before the optimizer's step"
