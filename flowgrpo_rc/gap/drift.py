"""The drift: what an update would learn from the gap alone, whatever is rewarded.

In bypass mode the clip is centred at the engine's log-probs. Outside the clip band it leaves, of the samples with a
positive advantage, those whose log-prob lies below the engine's, and of those with a negative one those above it. That
part of the gradient has one direction for either sign of the advantage: toward the engine. Averaged over advantages of
+1 and -1 the gradient that follows the reward cancels, and what remains is the drift.

For a plain clip band of half width ``c`` the drift is the gradient of a penalty on the gap, ``E[(|l| - c)+] / 2``; see
``docs/theory_of_the_gap.md``. Here it is measured with the configured objective and rejection themselves, at log ratios
drawn by the law of the gap (``law``). It is told in units of the policy gradient of a single SDE step of one image: in
that unit neither the drift nor the reward's own gradient depends on the size of a batch or of the window.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from tensordict import TensorDict
from torch import Tensor

from flowgrpo_rc.actor import DiffusionActor
from flowgrpo_rc.actor.mode import ModeInForce
from flowgrpo_rc.batch import Key
from flowgrpo_rc.gap.intervals import Interval, student_quantile
from flowgrpo_rc.gap.law import SMALLEST_KL, log_ratios, unit_noise
from flowgrpo_rc.gap.units import to_nats
from flowgrpo_rc.loss import LossSums, diffusion_loss_sums
from flowgrpo_rc.models.base import Conditioning

GROUPS = 8
"""Groups of prompts whose gradients are kept apart, to tell what they have in common from chance; host memory holds
a float32 copy of the adapter for each, and a few more while images are added."""
CHUNK = 1 << 20
"""Numbers that are multiplied in float64 at once."""

_SHARED_KEYS = (Key.TIMESTEPS, Key.SIGMAS, Key.NEXT_SIGMAS, Key.CLIP_WIDTHS, Key.ROLLOUT_RS_BOUNDS)
"""What the loss reads of a batch besides log-probs, means and advantages."""


@dataclass(frozen=True)
class Drift:
    """The drift of a configuration, and how much of the rest of the gradient follows the reward."""

    value: float
    """Norm of a step's expected drift over the root mean square norm of a step's policy gradient without a gap, both
    for an advantage of size 1 and on average over the window."""
    interval: Interval
    """Where it lies, from the groups of images."""
    cosine: float
    """Between the gradients with and without the gap of the same images under the same random advantages."""


@dataclass
class _Group:
    """Sums over the images of some prompts."""

    drift: Float[Tensor, " parameters"]
    images: int = 0
    square: float = 0.0
    """Of the norms of the images' gradients without a gap."""


class DriftMeter:
    """Collects gradients of images, in batches, and says what their drift is.

    Args:
        mode: whose objective and rejection are measured. Its limit must be centred at the engine's log-probs.
        sde_type: of the recorded steps.
        seed: of the noise and of the random advantages.
    """

    def __init__(self, mode: ModeInForce, sde_type: str, seed: int) -> None:
        # The KL to the reference policy has nothing to do with the gap.
        self._mode = replace(mode, use_kl_loss=False)
        self._sde_type = sde_type
        # No two images may share their noise, or it would be taken for something that they have in common.
        self._generator = torch.Generator().manual_seed(seed)
        self._window = 0
        self.images = 0
        """Images seen so far."""
        self._groups: dict[int, _Group] = {}
        self._gapped_square = 0.0
        self._product = 0.0

    def add(self, actor: DiffusionActor, batch: TensorDict, conditioning: Conditioning) -> None:
        """The gradients of a batch's images, with one forward (of a compiled actor three) and three backward passes.

        With calibrated limits each image is measured under those that its batch comes with.

        Args:
            batch: steps that the engine sampled, with its transition means and, for calibrated limits, ``clip_widths``
                and ``rollout_rs_bounds``.

        Raises:
            NonFiniteUpdateError: a log-prob or a gradient is not finite.
        """
        signs = torch.randint(0, 2, (len(batch),), generator=self._generator) * 2.0 - 1.0
        losses: list[Callable[..., Tensor]] = [self._drift_loss, self._loss_without_gap, self._loss]
        self._window = batch[Key.TIMESTEPS].shape[1]
        # Images of one prompt are alike, so that they belong to one group.
        numbers = batch[Key.PROMPT_INDEX] % GROUPS
        for number in numbers.unique().tolist():
            rows = (numbers == number).nonzero().flatten()
            part = batch[rows]
            part[Key.ADVANTAGES] = signs[rows]
            drift, without_gap, gapped = actor.gradients(part, conditioning, losses)
            group = self._groups.setdefault(number, _Group(torch.zeros_like(drift)))
            group.images += len(rows)
            group.drift += drift
            # Random signs leave of the square of a sum, in expectation, the sum of the images' squares.
            group.square += _dot(without_gap, without_gap)
            self._gapped_square += _dot(gapped, gapped)
            self._product += _dot(without_gap, gapped)
        self.images += len(batch)

    def group_sums(self) -> list[Float[Tensor, " parameters"]]:
        """The expected drift summed over the images of each group, a gradient of the loss."""
        return [group.drift for group in self._groups.values()]

    def result(self, confidence: float) -> Drift:
        """The drift of all images so far.

        The square of an expected gradient is estimated by products of different groups' gradients, which chance does
        not make larger; the interval is the jackknife's over the groups, numerator and unit together.
        """
        groups = list(self._groups.values())
        rows = [[_dot(one.drift, other.drift) for other in groups] for one in groups]
        products = torch.tensor(rows, dtype=torch.float64)
        sizes = torch.tensor([group.images for group in groups], dtype=torch.float64)
        squares = torch.tensor([group.square for group in groups], dtype=torch.float64) * self._window
        whole = _relative_square(products, sizes, squares)
        half = math.inf
        if len(groups) > 2:
            pseudo = []
            for left_out in range(len(groups)):
                rest = torch.arange(len(groups)) != left_out
                found = _relative_square(products[rest][:, rest], sizes[rest], squares[rest])
                pseudo.append(len(groups) * whole - (len(groups) - 1) * found)
            spread = float(torch.tensor(pseudo, dtype=torch.float64).std())
            half = student_quantile(confidence, len(groups) - 1) * spread / math.sqrt(len(groups))
        value, low, high = (math.sqrt(max(square, 0.0)) for square in (whole, whole - half, whole + half))
        # Where rejection leaves nothing, nothing follows the reward.
        cosine = self._product / (math.sqrt(float(squares.sum()) / self._window * self._gapped_square) or 1.0)
        return Drift(value, Interval(low, high, float(len(groups))), cosine)

    def _drift_loss(self, output: dict[str, Tensor], data: TensorDict) -> Tensor:
        """The configured loss of these images, averaged over the noise and over advantages of +1 and -1."""
        stds = output["transition_stds"].detach()
        means = output["transition_means"]
        dimensions = means.shape[2:].numel()
        difference = means - data[Key.ROLLOUT_MEANS].to(means)
        kl = (difference.flatten(2).square().sum(2) / (2 * stds.square())).clamp(min=SMALLEST_KL)
        noise = unit_noise(tuple(kl.shape), self._generator)
        ratios = log_ratios(kl, to_nats(stds.cpu(), dimensions, self._sde_type).to(kl), noise)
        both_signs = torch.cat([ratios, ratios]).flatten(0, 1)
        copies = 2 * len(noise)
        advantages = torch.ones(len(both_signs), device=kl.device)
        advantages[len(advantages) // 2 :] = -1.0
        shared = {name: value.repeat(copies, *[1] * (value.dim() - 1)) for name, value in _shared(data, kl).items()}
        # One latent dimension with the same divergence per dimension stands in for all of them.
        shift = (stds * (2 * kl / dimensions).sqrt())[..., None].repeat(copies, 1, 1)
        sums = diffusion_loss_sums(
            self._mode,
            {"log_probs": both_signs, "transition_means": shift, "transition_stds": stds.repeat(copies, 1)},
            shared
            | {
                Key.ROLLOUT_LOG_PROBS: torch.zeros_like(both_signs),
                Key.ROLLOUT_MEANS: torch.zeros_like(shift),
                Key.ADVANTAGES: advantages,
            },
        )
        return _per_image(sums) * len(data)

    def _loss_without_gap(self, output: dict[str, Tensor], data: TensorDict) -> Tensor:
        """The loss as it would be if the engine were the actor."""
        log_probs = output["log_probs"]
        old = {
            Key.OLD_LOG_PROBS: log_probs.detach(),
            Key.OLD_TRANSITION_MEANS: output["transition_means"].detach(),
            Key.ADVANTAGES: data[Key.ADVANTAGES].to(log_probs),
        }
        sums = diffusion_loss_sums(without_correction(self._mode), output, _shared(data, log_probs) | old)
        return _per_image(sums) * len(data)

    def _loss(self, output: dict[str, Tensor], data: TensorDict) -> Tensor:
        """The configured loss at the log ratios that were sampled."""
        log_probs = output["log_probs"]
        names = (Key.ROLLOUT_LOG_PROBS, Key.ROLLOUT_MEANS, Key.ADVANTAGES)
        sampled = {name: data[name].to(log_probs) for name in names}
        sums = diffusion_loss_sums(self._mode, output, _shared(data, log_probs) | sampled)
        return _per_image(sums) * len(data)


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
    present = set(data.keys())
    return {name: data[name].to(like) for name in _SHARED_KEYS if name in present}


def _per_image(sums: LossSums) -> Float[Tensor, ""]:
    """The loss as an update has it, divided by what the configuration divides by; 0 where all is rejected."""
    return sums.loss_sum / sums.denominator.clamp(min=1.0)


def _relative_square(
    products: Float[Tensor, "groups groups"], sizes: Float[Tensor, " groups"], squares: Float[Tensor, " groups"]
) -> float:
    """Square of the drift: of the norm of an image's expected gradient over the unit.

    Args:
        products: of the groups' sums with each other.
        sizes: images of each group.
        squares: sums over each group's images of the squared norm of the gradient without a gap, times the window: of
            the steps of a window the drifts add up, while the rest of their gradients is independent.
    """
    pairs = sizes.sum().square() - sizes.square().sum()
    common = float((products.sum() - products.diagonal().sum()) / pairs)
    unit = float(squares.sum() / sizes.sum())
    if unit:
        return common / unit
    return math.inf if common > 0 else 0.0


def _dot(one: Float[Tensor, " n"], other: Float[Tensor, " n"]) -> float:
    """The scalar product, in float64 without a float64 copy of the whole."""
    return sum(float(a.double() @ b.double()) for a, b in zip(one.split(CHUNK), other.split(CHUNK), strict=True))
