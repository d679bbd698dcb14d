"""The sampling loop that every engine runs, around whatever transformer it has, and what it reports of itself."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from flowgrpo_rc.models.base import Conditioning, DiffusionModel, Schedule
from flowgrpo_rc.rollout.base import Echo, RolloutError, RolloutRequest
from flowgrpo_rc.sde import draw, log_prob, transition


class Used:
    """Collects what the sampling loop works with, micro-batch by micro-batch and step by step, for the echo."""

    def __init__(self) -> None:
        self._seeds: list[int] = []
        self._noise: list[list[Tensor]] = []
        """Per micro-batch and step the noise level of each image."""

    def begin(self, generators: list[torch.Generator], conditioning: Conditioning) -> None:
        """A micro-batch starts with these streams and this guidance."""
        self._seeds += [g.initial_seed() for g in generators]
        self._guidance = (
            1.0 if conditioning.negative is None else float(conditioning.true_cfg_scale),
            conditioning.guidance_scale,
        )
        self._noise.append([])
        self._timesteps: list[Tensor] = []
        self._sigmas: list[Tensor] = []

    def step(self, t: Tensor, sigma: Tensor, next_sigma: Tensor, noise_level: Tensor, sde_type: str) -> None:
        """A step was taken with these, all ``(b,)``."""
        self._timesteps.append(t[:1])
        self._sigmas = [*(self._sigmas or [sigma[:1]]), next_sigma[:1]]
        self._noise[-1].append(noise_level)
        self._sde_type = sde_type

    def echo(self, **rest: Any) -> Echo:
        """All of it, with what the loop does not know."""
        noise = torch.cat([torch.stack(steps) for steps in self._noise], dim=1)
        stochastic = (noise > 0).long()
        return Echo(
            sigmas=torch.cat(self._sigmas).float().cpu(),
            timesteps=torch.cat(self._timesteps).float().cpu(),
            true_cfg_scale=self._guidance[0],
            guidance_scale=self._guidance[1],
            noise_level=float(noise.max()),
            sde_type=self._sde_type,
            window_starts=stochastic.argmax(0) if stochastic.any() else None,
            window_size=int(stochastic.sum(0).max()),
            seeds=tuple(self._seeds),
            **rest,
        )


class Record:
    """Host tensors ``(b, W, ...)`` that the stochastic steps of a micro-batch are written into."""

    def __init__(self, size: int, window: int, latent_shape: tuple[int, ...], means: bool) -> None:
        shapes = dict.fromkeys(("latents", "next_latents", *(["rollout_means"] if means else [])), latent_shape)
        scalars = ("timesteps", "sigmas", "next_sigmas", "rollout_log_probs")
        shapes |= dict.fromkeys(scalars, ())
        self.tensors = {k: torch.full((size, window, *shape), torch.nan) for k, shape in shapes.items()}

    def write(self, where: Tensor, column: Tensor, **values: Tensor) -> None:
        """Row ``where[i]``, window column ``column[i]``."""
        for name, value in values.items():
            self.tensors[name][where, column] = value.float().cpu()[where]


def sample(
    model: DiffusionModel,
    transformer: Any,
    request: RolloutRequest,
    schedule: Schedule,
    rows: Tensor,
    used: Used,
    device: torch.device,
) -> tuple[Tensor, dict[str, Tensor]]:
    """These rows of the request through the whole schedule: clean latents ``(b, *L)`` and the recorded window.

    Raises:
        RolloutError: an image's latents are not finite.
    """
    size = len(rows)
    cond = request.conditioning.rows(request.prompt_index[rows], device)
    generators = [torch.Generator().manual_seed(request.seeds[int(i)]) for i in rows]
    used.begin(generators, cond)
    latents = torch.stack([model.initial_noise(g, cond.height, cond.width) for g in generators]).to(device)
    starts = None if request.window_starts is None else request.window_starts[rows]
    record = None
    if starts is not None:
        record = Record(size, request.window_size, latents.shape[1:], request.record_means)
    for step, (t, sigma, next_sigma) in enumerate(_steps(schedule, device)):
        t, sigma, next_sigma = t.expand(size), sigma.expand(size), next_sigma.expand(size)
        velocity = model.velocity(transformer, latents, t, cond)
        stochastic = _in_window(starts, step, request.window_size, size)
        noise_level = torch.where(stochastic, request.noise_level, 0.0)
        law = transition(
            latents, velocity, sigma, next_sigma, noise_level=noise_level.to(device), sde_type=request.sde_type
        )
        used.step(t, sigma, next_sigma, noise_level, request.sde_type)
        next_latents = law.mean
        if record is not None and starts is not None and stochastic.any():
            noise = [
                torch.randn(law.mean.shape[1:], generator=g) if on else torch.zeros(law.mean.shape[1:])
                for g, on in zip(generators, stochastic.tolist(), strict=True)
            ]
            next_latents = draw(law, torch.stack(noise).to(device))
            log_probs = log_prob(law, next_latents, sde_type=request.sde_type)
            where = stochastic.nonzero().flatten()
            record.write(
                where,
                step - starts[where],
                latents=latents,
                next_latents=next_latents,
                timesteps=t,
                sigmas=sigma,
                next_sigmas=next_sigma,
                rollout_log_probs=log_probs,
                **({"rollout_means": law.mean} if request.record_means else {}),
            )
        latents = next_latents
    _check_finite(latents, rows)
    return latents, {} if record is None else record.tensors


def _steps(schedule: Schedule, device: torch.device) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    sigmas = schedule.sigmas.to(device)
    return zip(schedule.timesteps.to(device), sigmas[:-1], sigmas[1:], strict=True)


def _in_window(starts: Tensor | None, step: int, window: int, size: int) -> Tensor:
    if starts is None:
        return torch.zeros(size, dtype=torch.bool)
    return (starts <= step) & (step < starts + window)


def _check_finite(latents: Tensor, rows: Tensor) -> None:
    finite = torch.isfinite(latents.flatten(1)).all(1).cpu()
    if not finite.all():
        bad = rows[~finite].tolist()
        raise RolloutError(
            f"the rollout engine produced non-finite latents for {len(bad)} images (rows {bad[:8]}); its precision "
            "may be too low for this model: try actor_rollout_ref.rollout.dtype=float32"
        )
