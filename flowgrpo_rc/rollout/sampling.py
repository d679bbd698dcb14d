"""The sampling loop of every engine, around its own transformer, and the echo of the settings that it used."""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flowgrpo_rc.batch import Key
from flowgrpo_rc.dtypes import dtype_name
from flowgrpo_rc.models.base import Conditioning, DiffusionModel, compute_dtype
from flowgrpo_rc.models.sharding import is_sharded
from flowgrpo_rc.rollout.base import Echo, RolloutError, RolloutRequest
from flowgrpo_rc.rollout.cache import StepCache
from flowgrpo_rc.rollout.tail import Course, TailConfig, corrected_velocity, spread
from flowgrpo_rc.sde import draw, log_prob, transition
from flowgrpo_rc.transfers import onto, to_host

SCALARS = (Key.TIMESTEPS, Key.SIGMAS, Key.NEXT_SIGMAS, Key.ROLLOUT_LOG_PROBS)
"""Values of a recorded step, in the order in which they are kept."""


def micro_batches(request: RolloutRequest, size: int) -> list[Tensor]:
    """The rows of a request in parts of at most ``size``. With a cache, which the window switches off, the images of a
    part have one window."""
    rows = torch.arange(len(request.prompt_index))
    if request.cache is None or request.window_starts is None:
        return list(rows.split(size))
    starts = request.window_starts.tolist()
    parts: list[list[int]] = []
    for row in rows.tolist():
        if not parts or len(parts[-1]) == size or starts[row] != starts[parts[-1][0]]:
            parts.append([])
        parts[-1].append(row)
    return [torch.tensor(part) for part in parts]


class RequestSampler:
    """Draws the images of one request, micro-batch by micro-batch, and then makes the ``Echo``.

    The echo's numbers are taken at the place of use and not copied from the request. ``proof`` compares the two, and so
    finds a setting that an engine loses on the way.

    Args:
        model: the family's noise, velocities and images.
        transformer: the engine's own.
        request: the images to draw.
        device: where the transformer is.
    """

    def __init__(self, model: DiffusionModel, transformer: Any, request: RolloutRequest, device: torch.device) -> None:
        self._model = model
        self._transformer = transformer
        self._request = request
        self._device = device
        self.cache = StepCache(transformer, request.cache)
        """The transformer's cache, for the engine to leave it as a context."""
        cond = request.conditioning
        schedule = model.schedule(request.num_inference_steps, cond.height, cond.width)
        self._timesteps = onto(schedule.timesteps, device)
        self._sigmas = onto(schedule.sigmas, device)
        # Without a window no step is stochastic.
        self._window_size = 0 if request.window_starts is None else request.window_size
        # Collected micro-batch by micro-batch for the echo.
        self._seeds: list[int] = []
        self._start_seeds: list[int] = []
        # For each micro-batch, (N, b): the noise level of every step and image.
        self._noise_levels: list[Tensor] = []
        self._moves: list[Tensor] = []
        # On the host, for the courses of images.
        self._levels = schedule.sigmas.double().tolist()
        # Every process must call a sharded transformer equally often, whatever its images' windows are.
        self._equal_calls = is_sharded(transformer)

    @torch.no_grad()
    def sample(self, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Sample these rows of the request through the whole schedule.

        Returns:
            The images ``(b, H, W, 3)``, and on the host, by their key in the batch, the recorded steps ``(b, W, ...)``
            or, with ``record_clean``, the clean latents ``(b, *L)``; nothing for another deterministic request.

        Raises:
            RolloutError: an image's latents are not finite.
        """
        request = self._request
        cond = request.conditioning.rows(request.prompt_index[rows], self._device)
        # Read from the conditioning that the velocity gets, not from the request's settings.
        self._true_cfg_scale = 1.0 if cond.negative is None else float(cond.true_cfg_scale)
        self._guidance_scale = cond.guidance_scale
        self._guidance_interval = None if cond.negative is None else cond.guidance_interval
        steps = len(self._timesteps)
        # Any place serves for a window of size 0.
        starts = torch.zeros(len(rows), dtype=torch.long)
        if request.window_starts is not None:
            starts = request.window_starts[rows]
        record = WindowRecord(starts, self._window_size, steps, self._device)
        self._noise_levels.append(torch.where(record.stochastic, request.noise_level, 0.0))
        noise_levels = onto(self._noise_levels[-1], self._device)
        noise = onto(self._noise(rows, cond), self._device)
        tail = request.tail or TailConfig()
        course = Course.of(starts.tolist(), self._window_size, self._levels, tail)
        self._moves.append(course.moves)
        computed = self._computed(rows, starts, course.moves)
        latents = noise[:, 0]
        next_level = onto(course.next_level, self._device)
        extrapolates = onto(course.extrapolates, self._device)
        moves = onto(course.moves, self._device)
        clean = torch.zeros_like(latents)
        self.cache.restart()
        # The flags are on the host, so that the loop never waits for the device.
        for step, any_stochastic in enumerate(record.stochastic.any(1).tolist()):
            record.put("states", step, latents)
            # In a tail with fewer steps some are taken by no image.
            if not course.moves[step].any() and not self._equal_calls:
                continue
            self.cache.begin(inside=any_stochastic)
            t = self._timesteps[step].expand(len(rows))
            sigma = self._sigmas[step].expand(len(rows))
            next_sigma = self._sigmas[next_level[step]]
            velocity = self._velocity(latents, t, cond.at_levels([self._levels[step]] * len(rows)), computed[step])
            if tail.solver == "heun" and step + 1 < steps:
                ends = cond.at_levels([self._levels[level] for level in course.next_level[step].tolist()])
                velocity = self._heun(latents, velocity, step, next_level[step], course.corrects[step], ends)
            elif tail.solver == "dpm++2m":
                velocity, estimate = corrected_velocity(velocity, latents, sigma, extrapolates[step], clean)
                clean = _where(moves[step], estimate, clean)
            distribution = transition(
                latents, velocity, sigma, next_sigma, noise_level=noise_levels[step], sde_type=request.sde_type
            )
            before = latents
            latents = distribution.mean  # an ODE step, whose noise level is 0, ends there
            if any_stochastic:
                # Outside of an image's window the std is 0, so the noise adds nothing.
                latents = draw(distribution, record.of_step(noise[:, 1:], step))
                score = log_prob(distribution, latents, sde_type=request.sde_type)
                record.put("scalars", step, torch.stack((t, sigma, next_sigma, score), 1))
                if request.record_means:
                    record.put(Key.ROLLOUT_MEANS, step, distribution.mean)
            if not course.moves[step].all():
                latents = _where(moves[step], latents, before)
        # The state after the last step, for windows that end with the schedule.
        record.put("states", steps, latents)
        finite = torch.isfinite(latents.flatten(1)).all(1)
        # One transfer for records and flags, since each one waits for the device.
        finished = {Key.CLEAN_LATENTS: latents.float()} if request.record_clean else {}
        kept = to_host({**record.tensors(), **finished, "finite": finite.float()})
        bad = rows[kept.pop("finite") == 0].tolist()
        if bad:
            raise RolloutError(
                f"the rollout engine produced non-finite latents for {len(bad)} images (rows {bad[:8]}); its precision "
                "may be too low for this model: try actor_rollout_ref.rollout.dtype=float32"
            )
        # Decoded after the check, because non-finite latents would end in an obscure error of the VAE.
        images = self._model.decode(latents, cond.height, cond.width)
        if request.window_starts is None:
            return images, kept
        states = kept.pop("states")
        scalars = dict(zip(SCALARS, kept.pop("scalars").unbind(2), strict=True))
        return images, {Key.LATENTS: states[:, :-1], Key.NEXT_LATENTS: states[:, 1:], **scalars, **kept}

    def _computed(self, rows: Tensor, starts: Int[Tensor, " b"], moves: Bool[Tensor, "N b"]) -> list[Tensor]:
        """For each step the images ``(b,)`` whose velocities every image takes, on the host; for one that does not
        move, -1. Images with one starting noise are of one prompt, and equal until they get the noise of their first
        stochastic step."""
        request = self._request
        own = torch.arange(len(rows))
        first = own
        if request.start_seeds is not None and request.window_starts is not None:
            seeds = torch.tensor([request.start_seeds[row] for row in rows.tolist()])
            _, group = torch.stack([seeds, starts], 1).unique(dim=0, return_inverse=True)
            first = torch.stack([own[group == one].min() for one in group.tolist()])
        return [torch.where(moved, torch.where(step <= starts, first, own), -1) for step, moved in enumerate(moves)]

    def _velocity(self, latents: Tensor, t: Tensor, cond: Conditioning, source: Int[Tensor, " b"]) -> Tensor:
        """The velocity of every image, from the image ``source``; each of these is computed once. Zero where it is
        negative."""
        taken = source.unique()
        taken = taken[taken >= 0]
        if len(taken) == len(source):
            return self._model.velocity(self._transformer, latents, t, cond)
        if not len(taken):  # the call that other processes make; its result is not used
            taken = torch.zeros(1, dtype=torch.long)
        picked = onto(taken, self._device)
        velocity = self._model.velocity(self._transformer, latents[picked], t[picked], cond.rows(taken, self._device))
        place = onto(torch.searchsorted(taken, source).clamp(max=len(taken) - 1), self._device)
        return _where(onto(source >= 0, self._device), velocity[place], torch.zeros_like(latents, dtype=velocity.dtype))

    def _heun(
        self,
        latents: Tensor,
        velocity: Tensor,
        step: int,
        next_level: Int[Tensor, " b"],
        corrects: Bool[Tensor, " b"],
        cond: Conditioning,
    ) -> Tensor:
        """The mean of the velocities at both ends of the step, for the images that ``corrects`` chooses."""
        if not corrects.any() and not self._equal_calls:
            return velocity
        chosen = onto(corrects, self._device)
        # Of an image that is not chosen the result is not used; its level may be the last, which has no timestep.
        level = next_level.clamp(max=len(self._timesteps) - 1)
        width = spread(self._sigmas[next_level] - self._sigmas[step], latents)
        source = torch.where(corrects, torch.arange(len(corrects)), -1)
        ahead = self._velocity(latents + velocity * width, self._timesteps[level], cond, source)
        return _where(chosen, (velocity.float() + ahead.float()) / 2, velocity)

    def _noise(self, rows: Tensor, cond: Conditioning) -> Tensor:
        """``(b, 1 + W, *L)`` on the host: each image's starting noise and that of its stochastic steps."""
        # One stream an image on the host gives the same numbers on every device and in every batch. Each draw is a
        # call of its own, because one call for two draws gives other numbers.
        noise: list[Tensor] = []
        for row in rows.tolist():
            # On the host: a device's generator gives other numbers for the same seed.
            generator = torch.Generator().manual_seed(self._request.seeds[row])
            self._seeds.append(generator.initial_seed())
            first = generator
            if self._request.start_seeds is not None:
                first = torch.Generator().manual_seed(self._request.start_seeds[row])
                self._start_seeds.append(first.initial_seed())
            start = self._model.initial_noise(first, cond.height, cond.width)
            draws = [torch.randn(start.shape, generator=generator) for _ in range(self._window_size)]
            noise.append(torch.stack([start, *draws]))
        return torch.stack(noise)

    def echo(self, *, adapter_version: int, adapter_digest: str) -> Echo:
        """The settings used for all images sampled so far."""
        noise_levels = torch.cat(self._noise_levels, dim=1)
        schedule = to_host({"timesteps": self._timesteps.float(), "sigmas": self._sigmas.float()})
        # The window as the loop has used it, from the noise levels that were applied.
        stochastic = (noise_levels > 0).long()
        return Echo(
            request_id=self._request.request_id,
            timesteps=schedule["timesteps"],
            sigmas=schedule["sigmas"],
            true_cfg_scale=self._true_cfg_scale,
            guidance_scale=self._guidance_scale,
            guidance_interval=self._guidance_interval,
            noise_level=float(noise_levels.max()),
            sde_type=self._request.sde_type,
            window_starts=stochastic.argmax(0) if stochastic.any() else None,
            window_size=int(stochastic.sum(0).max()),
            seeds=tuple(self._seeds),
            start_seeds=None if self._request.start_seeds is None else tuple(self._start_seeds),
            cache=self.cache.used,
            tail_solver=None if self._request.tail is None else self._request.tail.solver,
            moves=None if self._request.tail is None else torch.cat(self._moves, dim=1).T.contiguous(),
            dtype=dtype_name(compute_dtype(self._transformer)),
            adapter_version=adapter_version,
            adapter_digest=adapter_digest,
        )


def _where(chosen: Bool[Tensor, " b"], one: Float[Tensor, " b *L"], other: Float[Tensor, " b *L"]) -> Tensor:
    """The images of ``one`` that are chosen, and of ``other`` those that are not."""
    return torch.where(spread(chosen, one), one, other)


class WindowRecord:
    """``W + 1`` states of every image and the values of its ``W`` steps, float32 on ``device``.

    Column ``c`` of an image is step ``start + c`` of the schedule. A write addresses the columns of all images at once,
    by indices made before the loop. Steps outside of an image's window go into an extra column that is never read, so
    that no write depends on data and waits for the device.

    Args:
        starts: first step of each image's window.
        window_size: ``W``; 0 keeps nothing.
        num_steps: ``N``, of the schedule.
        device: of the states.
    """

    def __init__(self, starts: Int[Tensor, " b"], window_size: int, num_steps: int, device: torch.device) -> None:
        # Made once before the loop, on the host, where indexing needs no synchronisation.
        columns = torch.arange(num_steps + 1)[:, None] - starts
        self.stochastic = ((columns >= 0) & (columns < window_size))[:-1]
        """``(N, b)``: the steps in an image's window."""
        in_record = (columns >= 0) & (columns <= window_size)
        self._writes = in_record.any(1).tolist()
        self._columns = onto(torch.where(in_record, columns, window_size + 1), device)
        self._rows = torch.arange(len(starts), device=device)
        self._window_size = window_size
        self._kept: dict[str, Tensor] = {}

    def of_step(self, values: Float[Tensor, " b W *L"], step: int) -> Float[Tensor, " b *L"]:
        """The column of ``values`` for ``step`` of each image; any column outside of the image's window."""
        return values[self._rows, self._columns[step].clamp(max=self._window_size - 1)]

    def put(self, name: str, step: int, values: Float[Tensor, " b *L"]) -> None:
        """Record ``states`` before ``step``, from 0 to ``N`` inclusive, or other values of ``step``."""
        # Steps outside of every window write nothing.
        if not self._writes[step] or not self._window_size:
            return
        if name not in self._kept:
            # One column more than there are states, for everything outside of the window.
            shape = (len(values), self._window_size + 2, *values.shape[1:])
            self._kept[name] = values.new_full(shape, torch.nan, dtype=torch.float32)
        # float32 in every engine, because the actor scores these numbers.
        self._kept[name][self._rows, self._columns[step]] = values.float()

    def tensors(self) -> dict[str, Tensor]:
        """The record on the device: ``states (b, W + 1, *L)``, and the rest as ``(b, W, ...)``. Values that were never
        written are NaN, which ``proof`` refuses."""
        window = self._window_size
        return {name: kept[:, : window + (name == "states")] for name, kept in self._kept.items()}
