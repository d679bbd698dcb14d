"""The figure of docs/how_it_works.md: a group of draws, its advantages and the clip, computed with this package.

    python benchmarks/how_it_works.py                # writes docs/images/how_it_works.png

The model is exact: images are single numbers, half of them near -1 and half near 1; the velocity has a formula.
"""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowgrpo_rc.loss import group_advantages
from flowgrpo_rc.sde import draw, transition

PLOT = Path(__file__).resolve().parent.parent / "docs" / "images" / "how_it_works.png"
SIGMAS = torch.linspace(1, 0, 9)
WINDOW = (1, 3)
"""Steps that draw noise; all others follow the flow."""
GROUP = 8
START = 0.15
"""The noise that all draws begin with, so that nothing but the window tells them apart."""
SPREAD = 0.15
"""Standard deviation of the images around -1 and around 1."""
NOISE_LEVEL = 0.7
SEED = 4
CLIP = 1e-3
GAP = 2.4e-4
"""Mean absolute log ratio of the demo's bfloat16 engine (docs/demo.md)."""
RED, BLUE, GREY = "#b2182b", "#08519c", "0.45"


def velocity(latents: Tensor, sigma: float) -> Tensor:
    """``E[noise - image]`` given ``latents = (1 - sigma) image + sigma noise``."""
    variance = (1 - sigma) ** 2 * SPREAD**2 + sigma**2
    centres = torch.tensor([-1.0, 1.0])
    off = latents[:, None] - (1 - sigma) * centres
    weight = torch.softmax(-(off**2) / (2 * variance), dim=1)
    image = (weight * (centres + (1 - sigma) * SPREAD**2 / variance * off)).sum(1)
    return (latents - (1 - sigma) * image) / sigma - image


def paths(noise_level: float, generator: torch.Generator) -> Tensor:
    """Latents of the group before and after every step: ``(steps + 1, GROUP)``."""
    latents = torch.full((GROUP,), START)
    seen = [latents]
    for step, (sigma, after) in enumerate(pairwise(SIGMAS)):
        level = noise_level if WINDOW[0] <= step < WINDOW[1] else 0.0
        levels = (sigma.expand(GROUP), after.expand(GROUP))
        step_of = transition(latents, velocity(latents, float(sigma)), *levels, noise_level=level, sde_type="sde")
        latents = draw(step_of, torch.randn(GROUP, generator=generator)) if level else step_of.mean
        seen.append(latents)
    return torch.stack(seen)


def clip_panel(axes: Any) -> None:
    ratio = torch.linspace(1 - 3 * CLIP, 1 + 3 * CLIP, 400)
    for advantage, colour in ((1.0, BLUE), (-1.0, RED)):
        value = torch.minimum(advantage * ratio, advantage * ratio.clamp(1 - CLIP, 1 + CLIP)) - advantage
        axes.plot(ratio - 1, value, color=colour, label=f"advantage {advantage:+.0f}")
    axes.axvspan(-CLIP, CLIP, color="0.92", zorder=0)
    deviation = GAP * math.sqrt(math.pi / 2)
    density = torch.exp(-(((ratio - 1) / deviation) ** 2) / 2)
    axes.fill_between(ratio - 1, -3 * CLIP, -3 * CLIP + 1.2 * CLIP * density, color="0.6", label="the engine's gap")
    axes.set(title="3  clip around the old policy", xlabel="ratio current / old, minus 1", ylabel="objective")
    axes.ticklabel_format(style="sci", scilimits=(-3, -3))
    axes.set_ylim(-3.2 * CLIP, 3.2 * CLIP)
    axes.legend(frameon=False, fontsize=8, loc="upper center")


def main() -> None:
    import matplotlib

    matplotlib.use("Agg", force=False)
    from matplotlib import pyplot as plt

    generator = torch.Generator().manual_seed(SEED)
    drawn = paths(NOISE_LEVEL, generator)
    rewards = torch.exp(-((drawn[-1] - 1) ** 2))
    advantages = group_advantages(rewards, torch.zeros(GROUP, dtype=torch.int64)).advantages
    colours = [BLUE if value > 0 else RED for value in advantages]

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    left.axvspan(*(float(SIGMAS[step]) for step in WINDOW), color="0.92", zorder=0)
    for image, colour in enumerate(colours):
        left.plot(SIGMAS, drawn[:, image], color=colour, linewidth=1.2)
    left.plot(SIGMAS, paths(0.0, generator)[:, 0], color="black", linestyle="--", label="the flow without noise")
    left.set(
        title="1  one noise, a group of draws", xlabel="noise level (grey: SDE window)", ylabel="latent", xlim=(1, 0)
    )
    left.legend(frameon=False, fontsize=8, loc="lower left")
    order = torch.argsort(rewards, descending=True).tolist()
    middle.bar(range(GROUP), advantages[order], color=[colours[image] for image in order])
    middle.set_xticks(range(GROUP), [f"{rewards[image]:.2f}" for image in order], fontsize=8)
    middle.axhline(0, color="black", linewidth=0.8)
    middle.set(title="2  rewards become advantages", xlabel="reward of each image", ylabel="advantage")
    clip_panel(right)
    figure.savefig(PLOT, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
