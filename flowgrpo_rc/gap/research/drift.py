"""Drift: the gradient that the off-policy gap alone produces, independent of the reward.

In bypass mode the clip is centred at the engine's log-probs. Outside the clip band it keeps samples with a positive
advantage whose log-prob lies below the engine's, and samples with a negative advantage whose log-prob lies above. That
part of the gradient points toward the engine for either sign of the advantage. Averaged over advantages of +1 and -1
the gradient that follows the reward cancels, and the drift remains.

For a plain clip band of half width ``c`` the drift is the gradient of a penalty on the gap, ``E[(|l| - c)+] / 2``; see
``docs/theory_of_the_gap.md``. It is measured with the configured objective and rejection, at log ratios drawn from
their distribution. The unit is the policy gradient of a single SDE step of one image: in that unit neither the drift
nor the reward's own gradient depends on the size of a batch or of the window.

Engine and actor draw a step from Gaussians of one standard deviation and different means. For a sample of the engine,
the log ratio ``L = log pi_actor - log pi_engine`` of the whole step, in nats, is therefore normal with mean ``-K`` and
variance ``2 K``, with the Kullback-Leibler divergence ``K`` known in closed form. A sampled image shows one value of
``L``, its ``K`` the distribution over all noise that it might have had. Shares and expectations are taken over values
drawn from that distribution, which leaves only the differences between images to chance.

The loss depends on the model only through each step's log-prob and transition mean, which the probe has already
computed. The loss is therefore differentiated with respect to them first, on the host; then every step passes through
the model by itself with these derivatives. This separates the timesteps at no extra cost: each step still passes
forward once, and backward once for each of three losses.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from jaxtyping import Bool, Float
from tensordict import TensorDict
from torch import Tensor

from flowgrpo_rc.actor import DiffusionActor
from flowgrpo_rc.actor.mode import ModeInForce
from flowgrpo_rc.batch import Key
from flowgrpo_rc.gap.intervals import Interval, student_quantile
from flowgrpo_rc.gap.statistics import GapSample, to_nats
from flowgrpo_rc.loss import diffusion_loss_sums
from flowgrpo_rc.models.base import Conditioning

# Antithetic pairs of draws of the noise per image.
PAIRS = 32
# Nats; below it the transitions agree to the rounding of their means, and the square root has no gradient.
SMALLEST_KL = 1e-12
# Groups of prompts whose gradients are summed apart, to separate their common part from chance. Host memory holds a
# float32 copy of the adapter for each, and a few more while images are added.
GROUPS = 8
# Numbers that are multiplied in float64 at once.
CHUNK = 1 << 20
# Numbers of a sketch: products of two are off by about 1/512 of the product of their norms.
SKETCH = 1 << 18

_Loss = Callable[[dict[str, Tensor], TensorDict], Tensor]
# Inputs of the loss besides log-probs, means and advantages.
_SHARED_KEYS = (Key.TIMESTEPS, Key.SIGMAS, Key.NEXT_SIGMAS, Key.CLIP_WIDTHS, Key.ROLLOUT_RS_BOUNDS)


def antithetic_noise(shape: tuple[int, ...], generator: torch.Generator) -> Float[Tensor, "..."]:
    """``2 PAIRS`` standard normal draws of this shape, draws first, float64 on the host; they sum to 0."""
    half = torch.randn(PAIRS, *shape, generator=generator, dtype=torch.float64)
    return torch.cat([half, -half])


def log_ratios(
    kl: Float[Tensor, "..."], to_nats: Float[Tensor, "..."], noise: Float[Tensor, "draws ..."]
) -> Float[Tensor, "draws ..."]:
    """``l`` in the unit of log-probs for each draw: ``(-kl + sqrt(2 kl) noise) / to_nats``.

    Its gradient reaches the actor through ``kl``. Averaged over the noise that gradient equals the one at samples of
    the engine, since noise orthogonal to the difference of the means moves no log ratio.

    Args:
        kl: divergence of each step in nats.
        to_nats: factor from a log ratio to nats.
        noise: of ``antithetic_noise``.
    """
    kl = kl.clamp(min=SMALLEST_KL)
    return (noise.to(kl) * (2 * kl).sqrt() - kl) / to_nats


def resample(sample: GapSample, seed: int) -> GapSample:
    """Repeat every image ``2 PAIRS`` times, draw after draw, with log ratios drawn from their distribution."""
    assert sample.kl is not None
    noise = antithetic_noise(tuple(sample.kl.shape), torch.Generator().manual_seed(seed))
    engine = log_ratios(sample.kl, sample.to_nats, noise)
    # Without a divergence the log ratio is 0, not that of the smallest one.
    engine = engine * (sample.kl > SMALLEST_KL)
    return replace(GapSample.concatenate([sample] * len(noise)), engine=engine.flatten(0, 1))


@dataclass(frozen=True)
class TimestepDrift:
    """The drift of one timestep, in the unit of the whole window's."""

    timestep: float
    value: float
    """Norm of the expected drift of a step at this timestep. The drift of the window is the mean of such vectors,
    weighted by how often each is trained, so it is at most the mean of their norms."""
    interval: Interval


@dataclass(frozen=True)
class Drift:
    """The drift of a configuration, and how much of the rest of the gradient follows the reward."""

    value: float
    """Norm of a step's expected drift over the root mean square norm of a step's policy gradient without a gap, both
    for an advantage of size 1 and averaged over the window."""
    interval: Interval
    """Confidence interval, from the groups of images."""
    cosine: float
    """Between the gradients with and without the gap, of the same images under the same random advantages."""
    timesteps: tuple[TimestepDrift, ...] = ()
    """From noise to image."""


@dataclass
class _Group:
    """Sums over the images of some prompts."""

    drift: Float[Tensor, " parameters"]
    images: int = 0
    square: float = 0.0  # Of the norms of the images' gradients without a gap
    steps: dict[float, int] = field(default_factory=dict)  # Number of steps by timestep
    sketches: dict[float, Float[Tensor, " sketch"]] = field(default_factory=dict)  # Sum of the drifts by timestep


class DriftMeter:
    """Collects gradients of images, in batches, and estimates their drift.

    Args:
        mode: the objective and rejection to measure. Its limit must be centred at the engine's log-probs.
        sde_type: of the recorded steps.
        seed: of the noise and of the random advantages.
    """

    def __init__(self, mode: ModeInForce, sde_type: str, seed: int) -> None:
        # The KL to the reference policy has nothing to do with the gap.
        self._mode = replace(mode, use_kl_loss=False)
        self._sde_type = sde_type
        # One stream for all images: noise that two of them shared would count as something they have in common.
        self._generator = torch.Generator().manual_seed(seed)
        self._window = 0
        self.images = 0
        """Images seen so far."""
        self._groups: dict[int, _Group] = {}
        self._gapped_square = 0.0
        self._product = 0.0

    def add(
        self,
        actor: DiffusionActor,
        batch: TensorDict,
        scored: Mapping[str, Tensor],
        conditioning: Conditioning,
        prompts: Tensor | None = None,
    ) -> None:
        """Add the gradients of a batch's images: per step one forward (three if compiled) and three backward passes.

        With calibrated limits each image is measured under those in its batch.

        Args:
            batch: steps that the engine sampled, with its transition means and, for calibrated limits, ``clip_widths``
                and ``rollout_rs_bounds``.
            scored: ``actor.rescore`` of the batch, under the actor's present weights.
            prompts: for each image a number of its prompt, the same in all batches; by default ``prompt_index``.

        Raises:
            NonFiniteUpdateError: a log-prob or a gradient is not finite.
        """
        signs = torch.randint(0, 2, (len(batch),), generator=self._generator) * 2.0 - 1.0
        self._window = batch[Key.TIMESTEPS].shape[1]
        # Images of one prompt are alike, so they belong to one group. With a single prompt its images are independent.
        numbers = (batch[Key.PROMPT_INDEX] if prompts is None else prompts) % GROUPS
        if len(numbers.unique()) == 1:
            numbers = torch.arange(self.images, self.images + len(batch)) % GROUPS
        for number in numbers.unique().tolist():
            rows = (numbers == number).nonzero().flatten()
            part = batch[rows]
            part[Key.ADVANTAGES] = signs[rows]
            own = {name: values[rows] for name, values in scored.items()}
            losses = (self._drift_loss, self._loss_without_gap, self._loss)
            tangents = [_tangent(place, loss, part, own) for place, loss in enumerate(losses)]
            self._add_group(number, actor, part, conditioning, tangents)
        self.images += len(batch)

    def _add_group(
        self, number: int, actor: DiffusionActor, part: TensorDict, conditioning: Conditioning, losses: Sequence[_Loss]
    ) -> None:
        """Add the gradients of images of one group, timestep by timestep."""
        sums: list[Tensor] = []
        for timestep in part[Key.TIMESTEPS].unique().tolist():
            images, places = (part[Key.TIMESTEPS] == timestep).nonzero(as_tuple=True)
            # Each step becomes an image with a window of one step.
            columns = {
                name: values[images, places][:, None] if values.dim() > 1 else values[images]
                for name, values in part.items()
            }
            steps = TensorDict(columns, batch_size=[len(images)])
            found = actor.gradients(steps, conditioning, losses)
            sums = [one + other for one, other in zip(sums, found, strict=True)] if sums else found
            group = self._groups.setdefault(number, _Group(torch.zeros_like(found[0])))
            group.steps[timestep] = group.steps.get(timestep, 0) + len(steps)
            group.sketches[timestep] = group.sketches.get(timestep, 0) + count_sketch(found[0])
        drift, without_gap, gapped = sums
        group = self._groups[number]
        group.images += len(part)
        group.drift += drift
        # With random signs, the expected square of the sum is the sum of the images' squares.
        group.square += _dot(without_gap, without_gap)
        self._gapped_square += _dot(gapped, gapped)
        self._product += _dot(without_gap, gapped)

    def group_sums(self) -> list[Float[Tensor, " parameters"]]:
        """The expected drift summed over the images of each group, a gradient of the loss."""
        return [group.drift for group in self._groups.values()]

    def result(self, confidence: float) -> Drift:
        """The drift of all images so far, with intervals of this confidence."""
        groups = list(self._groups.values())
        images = torch.tensor([group.images for group in groups], dtype=torch.float64)
        squares = torch.tensor([group.square for group in groups], dtype=torch.float64)
        # The drifts of a window's steps add up, while the rest of their gradients is independent.
        units = squares * self._window
        # The product is 0 too if rejection leaves no sample.
        cosine = self._product / (math.sqrt(float(squares.sum()) * self._gapped_square) or 1.0)
        timesteps = []
        none = torch.zeros_like(next(iter(groups[0].sketches.values())))
        for timestep in sorted({timestep for group in groups for timestep in group.steps}, reverse=True):
            steps = torch.tensor([group.steps.get(timestep, 0) for group in groups], dtype=torch.float64)
            # The loss of an image is the mean over its window, so a step's own gradient is larger by the window's size.
            drifts = [group.sketches.get(timestep, none) * self._window for group in groups]
            timesteps.append(TimestepDrift(timestep, *_norm(drifts, steps, units, images, confidence)))
        whole = _norm([group.drift for group in groups], images, units, images, confidence)
        return Drift(*whole, cosine, tuple(timesteps))

    def _drift_loss(self, output: dict[str, Tensor], data: TensorDict) -> Tensor:
        """The configured loss of these images, averaged over the noise and over advantages of +1 and -1."""
        stds = output["transition_stds"].detach()
        means = output["transition_means"]
        dimensions = means.shape[2:].numel()
        difference = means - data[Key.ROLLOUT_MEANS].to(means)
        kl = (difference.flatten(2).square().sum(2) / (2 * stds.square())).clamp(min=SMALLEST_KL)
        noise = antithetic_noise(tuple(kl.shape), self._generator)
        ratios = log_ratios(kl, to_nats(stds.cpu(), dimensions, self._sde_type).to(kl), noise)
        both_signs = torch.cat([ratios, ratios]).flatten(0, 1)
        copies = 2 * len(noise)
        advantages = torch.ones(len(both_signs), device=kl.device)
        advantages[len(advantages) // 2 :] = -1.0
        shared = {name: value.repeat(copies, *[1] * (value.dim() - 1)) for name, value in _shared(data, kl).items()}
        # One latent dimension with the same divergence per dimension replaces all of them, or memory would not do.
        shift = (stds * (2 * kl / dimensions).sqrt())[..., None].repeat(copies, 1, 1)
        drawn = {"log_probs": both_signs, "transition_means": shift, "transition_stds": stds.repeat(copies, 1)}
        old = {
            Key.ROLLOUT_LOG_PROBS: torch.zeros_like(both_signs),
            Key.ROLLOUT_MEANS: torch.zeros_like(shift),
            Key.ADVANTAGES: advantages,
        }
        return _total(self._mode, drawn, shared | old, len(data))

    def _loss_without_gap(self, output: dict[str, Tensor], data: TensorDict) -> Tensor:
        """The loss as if the engine were the actor."""
        log_probs = output["log_probs"]
        old = {
            Key.OLD_LOG_PROBS: log_probs.detach(),
            Key.OLD_TRANSITION_MEANS: output["transition_means"].detach(),
            Key.ADVANTAGES: data[Key.ADVANTAGES].to(log_probs),
        }
        return _total(without_correction(self._mode), output, _shared(data, log_probs) | old, len(data))

    def _loss(self, output: dict[str, Tensor], data: TensorDict) -> Tensor:
        """The configured loss at the log ratios that were sampled."""
        log_probs = output["log_probs"]
        names = (Key.ROLLOUT_LOG_PROBS, Key.ROLLOUT_MEANS, Key.ADVANTAGES)
        sampled = {name: data[name].to(log_probs) for name in names}
        return _total(self._mode, output, _shared(data, log_probs) | sampled, len(data))


def without_correction(mode: ModeInForce) -> ModeInForce:
    """The same objective with the actor itself as the old policy, and neither weights nor rejection."""
    mode = mode.decoupled()
    correction = replace(
        mode.rollout_correction,
        loss_type="ppo_clip",
        rollout_is=None,
        rollout_rs=None,
        rollout_rs_threshold=None,
        rollout_token_veto_threshold=None,
    )
    return replace(mode, rollout_correction=correction)


def _shared(data: TensorDict, like: Tensor) -> dict[str, Tensor]:
    return {name: data[name].to(like) for name in _SHARED_KEYS if name in set(data.keys())}


def _total(mode: ModeInForce, output: dict[str, Tensor], columns: dict[str, Tensor], images: int) -> Tensor:
    """The images' loss in an update, with the configured denominator, summed; 0 if everything is rejected."""
    sums = diffusion_loss_sums(mode, output, columns)
    return sums.loss_sum / sums.denominator.clamp(min=1.0) * images


def _norm(
    drifts: Sequence[Float[Tensor, " n"]],
    sizes: Float[Tensor, " groups"],
    units: Float[Tensor, " groups"],
    images: Float[Tensor, " groups"],
    confidence: float,
) -> tuple[float, Interval]:
    """Norm of the mean of gradients in the unit, and its interval.

    The square of an expected gradient is estimated by products of different groups' gradients, which chance does not
    bias upward; the interval is the jackknife's over the groups, for numerator and unit together.

    Args:
        drifts: sums of expected gradients over each group.
        sizes: number of gradients in each sum.
        units: sum over each group's images of the square of the unit.
        images: number of images in each group.
        confidence: of the interval.
    """
    products = torch.tensor([[_dot(one, other) for other in drifts] for one in drifts], dtype=torch.float64)

    def square(chosen: Bool[Tensor, " groups"]) -> float:
        """Square of that norm, from the chosen groups."""
        pairs = sizes[chosen].sum().square() - sizes[chosen].square().sum()
        among = products[chosen][:, chosen]
        common = float((among.sum() - among.diagonal().sum()) / pairs)
        unit = float(units[chosen].sum() / images[chosen].sum())
        if unit:
            return common / unit
        return math.inf if common > 0 else 0.0

    whole = square(torch.ones(len(drifts), dtype=torch.bool))
    # A group without a gradient of this kind enters the unit, but is no sample of the drift.
    groups = sizes.nonzero().flatten().tolist()
    count = len(groups)
    half = math.inf
    if count > 2:
        numbers = torch.arange(len(drifts))
        pseudo = [count * whole - (count - 1) * square(numbers != left_out) for left_out in groups]
        spread = float(torch.tensor(pseudo, dtype=torch.float64).std())
        half = student_quantile(confidence, count - 1) * spread / math.sqrt(count)
    value, low, high = (math.sqrt(max(bound, 0.0)) for bound in (whole, whole - half, whole + half))
    return value, Interval(low, high, float(count))


def _tangent(number: int, loss: _Loss, batch: TensorDict, scored: Mapping[str, Tensor]) -> _Loss:
    """Return the loss's tangent at the rescored steps, by which each step can be differentiated by itself. The loss's
    derivatives become columns of the batch, so that every step finds its own there."""
    output = {name: values.clone() for name, values in scored.items()}
    reached = [output[name].requires_grad_() for name in ("log_probs", "transition_means")]
    log_prob_slopes, mean_slopes = f"log_prob_slopes_{number}", f"mean_slopes_{number}"
    slopes = torch.autograd.grad(loss(output, batch), reached, materialize_grads=True)
    batch[log_prob_slopes], batch[mean_slopes] = slopes

    def tangent(output: dict[str, Tensor], data: TensorDict) -> Tensor:
        log_probs = output["log_probs"]
        means = output["transition_means"]
        return (data[log_prob_slopes].to(log_probs) * log_probs).sum() + (data[mean_slopes].to(means) * means).sum()

    return tangent


def _dot(one: Float[Tensor, " n"], other: Float[Tensor, " n"]) -> float:
    """The scalar product in float64, without a float64 copy of the whole."""
    return sum(float(a.double() @ b.double()) for a, b in zip(one.split(CHUNK), other.split(CHUNK), strict=True))


def count_sketch(gradient: Float[Tensor, " parameters"]) -> Float[Tensor, " sketch"]:
    """A short vector that keeps scalar products, so that drifts of single timesteps fit into memory.

    Fixed random signs, summed into ``SKETCH`` buckets; gradients that short are returned as they are. The error of a
    product is unbiased, about ``1 / sqrt(SKETCH)`` of the product of the norms. Source: Charikar, Chen and
    Farach-Colton, ICALP 2002, with a number's position modulo ``SKETCH`` as its bucket.
    """
    if len(gradient) <= SKETCH:
        return gradient
    signed = gradient * _signs(len(gradient))
    return torch.nn.functional.pad(signed, (0, -len(signed) % SKETCH)).view(-1, SKETCH).sum(0)


@lru_cache(maxsize=1)
def _signs(count: int) -> Tensor:
    # All sketches of a run must have the same signs, or their products would mean nothing.
    return torch.randint(0, 2, (count,), generator=torch.Generator().manual_seed(0), dtype=torch.int8) * 2 - 1
