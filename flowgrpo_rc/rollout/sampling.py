"""The sampling loop that every engine runs, around whatever transformer it has, and what it reports of itself."""

from typing import Any

import torch
from torch import Tensor

from flowgrpo_rc.batch import Key
from flowgrpo_rc.dtypes import dtype_name
from flowgrpo_rc.models.base import DiffusionModel
from flowgrpo_rc.rollout.base import Echo, RolloutError, RolloutRequest
from flowgrpo_rc.sde import draw, log_prob, transition


class RequestSampler:
    """Draws the images of one request, micro-batch by micro-batch, and then tells what it used in an ``Echo``.

    The echo's numbers are noted where the loop uses them and not copied from the request: ``proof`` compares the two,
    so that a setting which an engine loses on the way is found.

    Args:
        model: how this family of models makes noise, velocities and images.
        transformer: the engine's own.
        request: what to draw.
        device: where the transformer is.
    """

    def __init__(self, model: DiffusionModel, transformer: Any, request: RolloutRequest, device: torch.device) -> None:
        self._model = model
        self._transformer = transformer
        self._request = request
        self._device = device
        cond = request.conditioning
        schedule = model.schedule(request.num_inference_steps, cond.height, cond.width)
        self._timesteps = schedule.timesteps.to(device)
        self._sigmas = schedule.sigmas.to(device)
        self._seeds: list[int] = []
        self._noise_levels: list[Tensor] = []
        """For each micro-batch, ``(N, b)``: the noise level of every step and image."""

    @torch.no_grad()
    def sample(self, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Take these rows of the request through the whole schedule.

        Returns:
            The images ``(b, H, W, 3)``, and the recorded steps ``(b, W, ...)`` on the host by their key in the batch,
            none for a deterministic request.

        Raises:
            RolloutError: an image's latents are not finite.
        """
        request = self._request
        size = len(rows)
        cond = request.conditioning.rows(request.prompt_index[rows], self._device)
        # Streams on the host, one an image: the same numbers on every device and in every batch.
        generators = [torch.Generator().manual_seed(request.seeds[row]) for row in rows.tolist()]
        self._seeds += [generator.initial_seed() for generator in generators]
        self._true_cfg_scale = 1.0 if cond.negative is None else float(cond.true_cfg_scale)
        self._guidance_scale = cond.guidance_scale
        starting_noise = [self._model.initial_noise(generator, cond.height, cond.width) for generator in generators]
        latents = torch.stack(starting_noise).to(self._device)
        starts = torch.full((size,), len(self._timesteps))  # without a window no step is stochastic
        if request.window_starts is not None:
            starts = request.window_starts[rows]
        noise_levels: list[Tensor] = []
        record: dict[str, Tensor] = {}
        for step in range(len(self._timesteps)):
            t = self._timesteps[step].expand(size)
            sigma = self._sigmas[step].expand(size)
            next_sigma = self._sigmas[step + 1].expand(size)
            velocity = self._model.velocity(self._transformer, latents, t, cond)
            stochastic = (starts <= step) & (step < starts + request.window_size)
            noise_level = torch.where(stochastic, request.noise_level, 0.0)
            noise_levels.append(noise_level)
            distribution = transition(
                latents,
                velocity,
                sigma,
                next_sigma,
                noise_level=noise_level.to(self._device),
                sde_type=request.sde_type,
            )
            next_latents = distribution.mean  # an ODE step, whose noise level is 0, ends there
            if stochastic.any():
                noise = torch.zeros(latents.shape)
                for row in stochastic.nonzero().flatten().tolist():  # the other images' streams must not move
                    noise[row] = torch.randn(latents.shape[1:], generator=generators[row])
                next_latents = draw(distribution, noise.to(self._device))
                recorded = {
                    Key.LATENTS: latents,
                    Key.NEXT_LATENTS: next_latents,
                    Key.TIMESTEPS: t,
                    Key.SIGMAS: sigma,
                    Key.NEXT_SIGMAS: next_sigma,
                    Key.ROLLOUT_LOG_PROBS: log_prob(distribution, next_latents, sde_type=request.sde_type),
                }
                if request.record_means:
                    recorded[Key.ROLLOUT_MEANS] = distribution.mean
                _write(record, recorded, stochastic, step - starts, request.window_size)
            latents = next_latents
        self._noise_levels.append(torch.stack(noise_levels))
        _check_finite(latents, rows)
        return self._model.decode(latents, cond.height, cond.width), record

    def echo(self, *, adapter_version: int, adapter_digest: str) -> Echo:
        """What was used for all images sampled so far."""
        noise_levels = torch.cat(self._noise_levels, dim=1)
        stochastic = (noise_levels > 0).long()
        return Echo(
            request_id=self._request.request_id,
            timesteps=self._timesteps.float().cpu(),
            sigmas=self._sigmas.float().cpu(),
            true_cfg_scale=self._true_cfg_scale,
            guidance_scale=self._guidance_scale,
            noise_level=float(noise_levels.max()),
            sde_type=self._request.sde_type,
            window_starts=stochastic.argmax(0) if stochastic.any() else None,
            window_size=int(stochastic.sum(0).max()),
            seeds=tuple(self._seeds),
            dtype=dtype_name(next(self._transformer.parameters()).dtype),
            adapter_version=adapter_version,
            adapter_digest=adapter_digest,
        )


def _write(
    record: dict[str, Tensor], recorded: dict[str, Tensor], stochastic: Tensor, columns: Tensor, window_size: int
) -> None:
    """Put the stochastic rows of ``recorded`` into their column of the window.

    What is never written stays NaN, which ``proof`` refuses.
    """
    rows = stochastic.nonzero().flatten()
    for name, value in recorded.items():
        value = value.float().cpu()  # float32 whatever the engine computes in: the actor scores these numbers
        if name not in record:
            record[name] = torch.full((len(value), window_size, *value.shape[1:]), torch.nan)
        record[name][rows, columns[rows]] = value[rows]


def _check_finite(latents: Tensor, rows: Tensor) -> None:
    bad = rows[~torch.isfinite(latents.flatten(1)).all(1).cpu()].tolist()
    if bad:
        raise RolloutError(
            f"the rollout engine produced non-finite latents for {len(bad)} images (rows {bad[:8]}); its precision "
            "may be too low for this model: try actor_rollout_ref.rollout.dtype=float32"
        )
