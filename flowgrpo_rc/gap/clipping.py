"""What the configured objective would leave out of a batch for the gap alone, before anything is learned."""

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from flowgrpo_rc.actor.mode import ModeInForce


@dataclass(frozen=True)
class Clipping:
    """How the steps of a batch stand to the objective's limit."""

    size: Float[Tensor, "..."]
    """What the objective holds against its limit, without its sign; the log ratio itself in the usual case."""
    beyond: Bool[Tensor, "..."]
    """Which steps exceed the limit."""

    def part(self, chosen: Tensor) -> "Clipping":
        """The steps where ``chosen`` is true, flat."""
        return Clipping(self.size[chosen], self.beyond[chosen])


def clipping(
    mode: ModeInForce,
    gap: Float[Tensor, "B W"],
    kl: Float[Tensor, "B W"],
    stds: Float[Tensor, "B W"],
    clip_widths: Float[Tensor, "B W"] | None = None,
) -> Clipping:
    """The objective's own measure of the gap against its limit, with the engine as the old policy, as in bypass mode.

    Args:
        mode: the objective and its limit.
        gap: ``log pi_actor - log pi_engine``, mean-pooled.
        kl: of the two policies' steps, in closed form, per latent dimension.
        stds: standard deviation of each step.
        clip_widths: half widths of the clip band for ``clip_ratio=auto``.
    """
    measured = mode.objective.measure(gap, kl, stds)
    return Clipping(measured.abs(), mode.objective.limit.exceeded(measured, mode.diffusion_loss, clip_widths))
