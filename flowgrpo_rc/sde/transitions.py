r"""The stochastic step of a flow-matching sampler: mean and std, then draw, then score.

Notation (one step; every tensor float32):

=============== =================================================================================
``x``           latents at noise level ``s``; 1 is pure noise, 0 is the image
``v``           the model's velocity at ``(x, s)``; the flow is ``dx/ds = v``
``s``, ``s'``   ``sigma`` and ``next_sigma`` with ``s' < s``; ``dt = s' - s`` is negative
``eta``         ``noise_level``; 0 makes the step the deterministic Euler step ``x + v*dt``
``step_std``    the standard deviation of the *whole* step, not a rate
=============== =================================================================================

The same three functions serve the rollout engines (``transition``, ``draw``, ``log_prob``) and the actor
(``transition``, ``log_prob``), so that the two cannot disagree about anything but the velocity.

Sources: ``sde`` Flow-GRPO (arXiv 2505.05470), ``dance_sde`` DanceGRPO (arXiv 2505.07818),
``cps`` coefficients-preserving sampling (arXiv 2509.05952).
"""

import math
from pkgutil import resolve_name
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from flowgrpo_rc.sde.types import sde_type_named

NEAR_PURE_NOISE = 2e-3
"""Distance from 1 within which a schedule may start: checkpoints' solvers have 1e-6 to 1e-3."""
SHORT_OF_STEP = 0.1
"""Share of the step's length below which the distance from 1 is a start's, not a level's of its own."""


class Transition(NamedTuple):
    """The distribution of the next latents: a Gaussian with a mean per element and one std per sample."""

    mean: Float[Tensor, " B *L"]
    step_std: Float[Tensor, " B"]


def transition(
    latents: Float[Tensor, " B *L"],
    velocity: Float[Tensor, " B *L"],
    sigma: Float[Tensor, " B"],
    next_sigma: Float[Tensor, " B"],
    *,
    noise_level: float | Float[Tensor, " B"],
    sde_type: str,
) -> Transition:
    """Mean and standard deviation of one reverse step from ``sigma`` to ``next_sigma``.

    ============= ============================ ========================================================
    ``sde_type``  ``step_std``                 mean
    ============= ============================ ========================================================
    ``sde``       ``g*sqrt(-dt)``              ``x*(1 + g^2*dt/(2s)) + v*(1 + g^2*(1-s)/(2s))*dt``
    ``cps``       ``s'*sin(eta*pi/2)``         ``(1-s')*(x - s*v) + sqrt(s'^2 - std^2)*(x + (1-s)*v)``
    ``dance_sde`` ``eta*sqrt(-dt)``            ``x + v*dt + (eta^2/2)*(-dt)*score``
    ============= ============================ ========================================================

    with ``g = eta*sqrt(s/(1-s))`` and ``score = -(x - (1-s)*(x - s*v))/s^2``. At ``s = 1`` the ``1-s`` under
    ``g`` would be 0; the first step's ``next_sigma`` (``sigmas[1]``) takes the place of ``s`` there, and also if a
    solver's schedule starts just below 1.

    Gradients flow through ``latents`` and ``velocity``. Velocities of a lower precision are promoted to
    float32 (float64 stays float64) before any arithmetic.

    Raises:
        ValueError: ``sde_type`` is not one of ``SDE_TYPES``.
    """
    row = sde_type_named(sde_type)
    x = _promote(latents)
    # A bfloat16 model's velocity would round the mean, and with it every log-prob.
    v = _promote(velocity).to(x.dtype)
    s = _per_sample(sigma, x)
    s_next = _per_sample(next_sigma, x)
    if not isinstance(noise_level, Tensor):  # filled in on the device: a number is no tensor of the host's to copy
        noise_level = x.new_full(x.shape[:1], noise_level)
    eta = _per_sample(noise_level.expand(x.shape[0]), x)
    mean, step_std = resolve_name(row.step)(x, v, s, s_next, eta)
    return Transition(mean, step_std.flatten())


def flow_sde_step(x: Tensor, v: Tensor, s: Tensor, s_next: Tensor, eta: Tensor) -> Transition:
    """Flow-GRPO's step; ``s``, ``s_next`` and ``eta`` broadcast over ``x``, and so does the std that is returned."""
    dt = s_next - s
    # At pure noise 1 - s would divide by 0. Solvers such as UniPC and DPM start just below 1, which would make a step
    # of many times its length; a later level so near 1 is followed by a step about as short, and keeps its own.
    starts = (s > 1 - NEAR_PURE_NOISE) & (1 - s < SHORT_OF_STEP * -dt)
    denominator = 1 - torch.where(starts, s_next, s)
    g2 = eta**2 * s / denominator
    mean = x * (1 + g2 * dt / (2 * s)) + v * (1 + g2 * (1 - s) / (2 * s)) * dt
    return Transition(mean, torch.sqrt(g2 * -dt))


def coefficients_preserving_step(x: Tensor, v: Tensor, s: Tensor, s_next: Tensor, eta: Tensor) -> Transition:
    """The ``cps`` step: the share of noise that it takes out is drawn anew, so that the noise level stays right."""
    step_std = s_next * torch.sin(eta * (math.pi / 2))
    # Rounding may leave a difference of squares just below 0.
    noise_coefficient = torch.sqrt(torch.clamp(s_next**2 - step_std**2, min=0))
    mean = (1 - s_next) * (x - s * v) + noise_coefficient * (x + (1 - s) * v)
    return Transition(mean, step_std)


def dance_sde_step(x: Tensor, v: Tensor, s: Tensor, s_next: Tensor, eta: Tensor) -> Transition:
    """DanceGRPO's step: the Euler step, and a drift along the score that balances the noise."""
    dt = s_next - s
    # The score of the marginal at level s, from the model's estimate x - s*v of the clean image.
    score = -(x - (1 - s) * (x - s * v)) / s**2
    mean = x + v * dt + eta**2 / 2 * -dt * score
    return Transition(mean, eta * torch.sqrt(-dt))


def draw(step: Transition, noise: Float[Tensor, " B *L"]) -> Float[Tensor, " B *L"]:
    """Next latents ``mean + step_std * noise``; ``noise`` is standard normal and is the only randomness."""
    return step.mean + _per_sample(step.step_std, step.mean) * noise


def log_prob(step: Transition, next_latents: Float[Tensor, " B *L"], *, sde_type: str) -> Float[Tensor, " B"]:
    """Log-density of ``next_latents`` under the step, **averaged over the latent dimensions**.

    ``sde`` and ``dance_sde``: the Gaussian log-density. ``cps``: ``-(x' - mean)^2``, without ``1/(2 std^2)``
    and without the normaliser, as its authors define it; log ratios of ``cps`` therefore have another scale.

    Raises:
        ValueError: ``sde_type`` is not one of ``SDE_TYPES``.
    """
    if sde_type_named(sde_type).log_prob_is_density:
        return gaussian_log_prob(next_latents, step)
    # The mean over dimensions keeps log-probs comparable between image sizes; a sum would grow with the pixels.
    squared = (_promote(next_latents) - step.mean) ** 2
    return -squared.flatten(1).mean(1)


def gaussian_log_prob(next_latents: Float[Tensor, " B *L"], step: Transition) -> Float[Tensor, " B"]:
    """``mean over dims of -(x' - mean)^2 / (2 std^2) - log(std) - log(2 pi)/2``.

    A sample whose ``step_std`` is 0 (an ODE step) has no density: its log-prob is not finite, and every
    consumer of log-probs refuses non-finite values.
    """
    # std is one number per sample, so the mean over dimensions commutes with the division below.
    squared = ((_promote(next_latents) - step.mean) ** 2).flatten(1).mean(1)
    return -squared / (2 * step.step_std**2) - torch.log(step.step_std) - 0.5 * math.log(2 * math.pi)


def transition_kl(
    mean: Float[Tensor, "..."], other_mean: Float[Tensor, "..."], step_std: Float[Tensor, "..."]
) -> Float[Tensor, "..."]:
    """``KL(N(mean, std^2) || N(other_mean, std^2))`` of each step, averaged over its latent dimensions.

    Both transitions share ``step_std``, so this is ``mean((mean - other_mean)^2) / (2 std^2)`` and symmetric.
    Multiply by the number of latent dimensions for nats.

    Args:
        mean, other_mean: in the shape of the steps, ``(B,)`` or ``(B, W)``, and then of the latents.
        step_std: in the shape of the steps.
    """
    return ((mean - other_mean) ** 2).flatten(step_std.dim()).mean(-1) / (2 * step_std**2)


def _promote(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _per_sample(values: Tensor, like: Tensor) -> Tensor:
    """``(B,)`` -> ``(B, 1, ..., 1)`` in the dtype of ``like``, so that it broadcasts over the latents."""
    return values.to(like.dtype).reshape(-1, *([1] * (like.dim() - 1)))
