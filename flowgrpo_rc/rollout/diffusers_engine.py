"""The in-process engine: a copy of the transformer, in a precision of its own, sampled step by step."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from flowgrpo_rc.checks import choice
from flowgrpo_rc.models.base import Conditioning, DiffusionModel, Schedule
from flowgrpo_rc.models.config import ModelConfig
from flowgrpo_rc.models.lora import adapter_parameters, attach_lora, load_adapter_state
from flowgrpo_rc.rollout.base import Echo, RolloutError, RolloutRequest, Trajectories
from flowgrpo_rc.rollout.config import QUANTIZATIONS
from flowgrpo_rc.rollout.digest import adapter_digest
from flowgrpo_rc.rollout.quantize import round_fp8_rows, round_linear_weights
from flowgrpo_rc.sde import draw, log_prob, transition


class DiffusersEngine:
    """Samples with ``model``'s transformer in ``dtype``, its adapter following the actor's through ``sync``.

    The transformer's frozen weights are shared with ``model`` when they already have this ``dtype`` and copied
    otherwise; the adapter is always the engine's own, in ``dtype``. Create the engine before the actor attaches
    its adapter.

    ``quantization="fp8"`` rounds every linear weight matrix, the base's once and the adapter's at every ``sync``,
    through ``float8_e4m3fn`` with one scale per output row; arithmetic stays that of ``dtype``. It measures what fp8
    weights do to the rollout/training gap and needs no fp8 hardware; it saves neither time nor memory. Validation,
    which samples with this engine, sees the rounded weights as well. The rounded matrices are the engine's own:
    ``model`` keeps its weights bit for bit.
    """

    def __init__(
        self,
        model: DiffusionModel,
        lora: ModelConfig,
        *,
        dtype: torch.dtype,
        micro_batch_size: int,
        device: Any,
        quantization: str | None = None,
    ) -> None:
        choice("quantization", quantization, (*QUANTIZATIONS, None))
        self._model = model
        self._device = torch.device(device)
        self._dtype, self._micro_batch_size = dtype, micro_batch_size
        self.transformer = _copy_transformer(model.transformer, dtype)
        self._quantized = quantization is not None
        if self._quantized:
            round_linear_weights(self.transformer, adapter=False)
        attach_lora(self.transformer, model, lora, dtype=dtype)
        self.transformer.requires_grad_(False).eval()
        self.adapter_version = -1

    def sync(self, state: Mapping[str, Tensor], version: int) -> str:
        """Copy the actor's adapter into the engine's, rounding to its dtype and then to its quantization.

        Returns the digest of the weights that the transformer then has.

        Raises:
            AdapterMismatchError: some tensor does not bind; the engine keeps what it had.
        """
        load_adapter_state(self.transformer, state)
        if self._quantized:
            round_linear_weights(self.transformer, adapter=True)
        self.adapter_version = version
        return self._held_digest()

    def digest_of(self, state: Mapping[str, Tensor]) -> str:
        """The digest of ``state`` rounded as ``sync`` rounds it."""
        held = {name: tensor.detach().to(self._device, self._dtype) for name, tensor in state.items()}
        if self._quantized:
            held = {name: round_fp8_rows(tensor) for name, tensor in held.items()}
        return adapter_digest(held)

    def close(self) -> None:
        """Drop the engine's transformer."""
        self.transformer = nn.Identity()

    @torch.no_grad()
    def generate(self, request: RolloutRequest) -> Trajectories:
        """Sample every image of the request.

        Raises:
            RolloutError: no adapter has been synchronised yet, or an image's latents are not finite.
        """
        if self.adapter_version < 0:
            raise RolloutError("the rollout engine has no adapter yet: call sync() before generate()")
        cond = request.conditioning
        schedule = self._model.schedule(request.num_inference_steps, cond.height, cond.width)
        images, records, used = [], [], _Used()
        for rows in torch.arange(len(request.prompt_index)).split(self._micro_batch_size):
            latents, record = self._sample(request, schedule, rows, used)
            images.append(self._model.decode(latents, cond.height, cond.width))
            records.append(record)
        batch = None
        if request.window_starts is not None:
            batch = TensorDict(
                {k: torch.cat([r[k] for r in records]) for k in records[0]},
                batch_size=[len(request.prompt_index)],
            )
            batch["prompt_index"] = request.prompt_index.clone()
        return Trajectories(torch.cat(images), batch, self._echo(request.request_id, used))

    def _held_digest(self) -> str:
        return adapter_digest(adapter_parameters(self.transformer))

    def _echo(self, request_id: str, used: "_Used") -> Echo:
        dtype = str(next(self.transformer.parameters()).dtype).removeprefix("torch.")
        digest = self._held_digest()
        return used.echo(
            request_id=request_id, dtype=dtype, adapter_version=self.adapter_version, adapter_digest=digest
        )

    def _sample(
        self, request: RolloutRequest, schedule: Schedule, rows: Tensor, used: "_Used"
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """One micro-batch through the whole schedule; returns clean latents and the recorded window."""
        device, size = self._device, len(rows)
        cond = request.conditioning.rows(request.prompt_index[rows], device)
        generators = [torch.Generator().manual_seed(request.seeds[int(i)]) for i in rows]
        used.begin(generators, cond)
        latents = torch.stack([self._model.initial_noise(g, cond.height, cond.width) for g in generators]).to(device)
        starts = None if request.window_starts is None else request.window_starts[rows]
        record = None
        if starts is not None:
            record = _Record(size, request.window_size, latents.shape[1:], request.record_means)
        for step, (t, sigma, next_sigma) in enumerate(_steps(schedule, device)):
            t, sigma, next_sigma = t.expand(size), sigma.expand(size), next_sigma.expand(size)
            velocity = self._model.velocity(self.transformer, latents, t, cond)
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


class _Used:
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


class _Record:
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


def _copy_transformer(transformer: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A second transformer in ``dtype``; storage is shared where nothing has to be converted."""
    if all(p.dtype == dtype for p in transformer.parameters()):
        return copy.deepcopy(transformer, {id(p): p for p in transformer.parameters()})
    return nn.Module.to(copy.deepcopy(transformer), dtype)
