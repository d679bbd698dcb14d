"""What the configured objective would leave out of a batch for the gap alone, before anything is learned."""

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from flowgrpo_rc.actor.config import DiffusionLossConfig
from flowgrpo_rc.loss.diffusion import clip_band


@dataclass(frozen=True)
class Clipping:
    """Of every step: what the objective holds against its limit, and whether that lies beyond it."""

    size: Float[Tensor, "..."]
    """``|log ratio|`` as the objective clips it, or for ``flow_dppo`` the KL per latent dimension."""
    outside: Bool[Tensor, "..."]

    def part(self, chosen: Tensor) -> "Clipping":
        """The steps where ``chosen`` is true, flat."""
        return Clipping(self.size[chosen], self.outside[chosen])


def clipping(
    loss: DiffusionLossConfig,
    gap: Float[Tensor, "B W"],
    kl: Float[Tensor, "B W"],
    stds: Float[Tensor, "B W"],
    widths: Float[Tensor, "B W"] | None = None,
) -> Clipping:
    """With the engine as the old policy, as in bypass mode.

    Args:
        loss: the objective and its limits.
        gap: ``log pi_actor - log pi_engine``, mean-pooled.
        kl: of the two policies' steps, in closed form, per latent dimension.
        stds: standard deviation of each step; ``grpo_guard`` scales its ratio with it (arXiv 2510.22319).
        widths: half widths of the band for ``clip_ratio=auto``.
    """
    if loss.loss_mode == "flow_dppo":  # beyond the threshold it leaves out what moves further away: one half
        return Clipping(kl, kl >= loss.kl_mask_threshold)
    log_ratio = (gap + kl) * stds.to(gap) if loss.loss_mode == "grpo_guard" else gap
    return Clipping(log_ratio.abs(), outside(log_ratio, loss, widths))


def outside(
    log_ratio: Float[Tensor, "..."], loss: DiffusionLossConfig, widths: Float[Tensor, "..."] | None
) -> Bool[Tensor, "..."]:
    """Which ratios lie outside the configured clip band."""
    (low, high), ratio = clip_band(loss, widths), log_ratio.exp()
    return (ratio < 1 - low) | (ratio > 1 + high)


def limit_words(loss: DiffusionLossConfig) -> str:
    """The objective's limit as the configuration writes it."""
    if loss.loss_mode == "flow_dppo":
        return f"kl_mask_threshold={loss.kl_mask_threshold:g}"
    if loss.clip_ratio == "auto":
        return f"clip_ratio=auto ({loss.auto_clip_min:g} to {loss.auto_clip_max:g})"
    low, high = clip_band(loss)
    return f"clip_ratio={low:g}" if low == high else f"clip_ratio_low={low:g} and clip_ratio_high={high:g}"
