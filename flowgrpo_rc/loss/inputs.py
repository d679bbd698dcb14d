"""Reading what the loss needs from batch and model output. Every error names the key and both shapes."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flowgrpo_rc.correction.mapping import TensorMapping, optional
from flowgrpo_rc.loss.policy import kept


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


def clip_widths(data: TensorMapping, log_prob: Tensor) -> Tensor | None:
    """``clip_widths``, with NaN for what is none, so that the loss is not finite either: no wait for the device."""
    widths = like_log_probs(data, "clip_widths", log_prob)
    return None if widths is None else torch.where(_is_width(widths), widths, torch.nan)


def _is_width(values: Tensor) -> Tensor:
    return (values > 0) & torch.isfinite(values)


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


def not_finite(**mappings: TensorMapping) -> str:
    """What to say where a result is NaN or infinite: which tensors hold such values, and how many of them."""
    found = []
    for where, tensors in mappings.items():
        for name in tensors.keys():  # noqa: SIM118  (a TensorDict iterates over its rows)
            value = tensors[name]
            if not isinstance(value, Tensor):
                continue
            bad = int((~(_is_width(value) if name == "clip_widths" else torch.isfinite(value))).sum())
            if bad:
                kind = " (or not above 0)" if name == "clip_widths" else ""
                found.append(f"{bad} of {value.numel()} in {where}[{name!r}]{kind}")
    if found:
        return f"NaN or infinite, masked values included: {', '.join(found)}"
    return "all of this rank's inputs are finite: another rank's are not, or a std is 0, or a weight or mean is extreme"
