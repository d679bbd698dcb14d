"""Proof that a rollout is the one that was asked for: adapter, schedule, guidance, noise, rows.

Every check raises ``RolloutSyncError`` with one line: what differs, got and expected, and where to look. They compare
numbers of the size of a batch's scalars, besides one pass over the latents, so they are always on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from tensordict import TensorDict
from torch import Tensor

from flowgrpo_rc.models.base import DiffusionModel, Schedule
from flowgrpo_rc.rollout.base import Echo, RolloutRequest, RolloutSyncError, Trajectories

TOLERANCE = 1e-6
"""Relative difference that two float32 computations of one schedule may have."""

_SCHEDULE_CAUSE = (
    "the engine's scheduler differs from the model's: shift, dynamic shifting, number of steps, image size"
)
_SCALARS = ("timesteps", "sigmas", "next_sigmas", "rollout_log_probs")
_ORDER_CAUSE = "the engine has mixed up its results; match them to requests by id, not by order of arrival"
_SAMPLE = 1024
"""Elements of each row that are looked at for a narrow dtype."""


@dataclass(frozen=True)
class HeldAdapter:
    """The adapter that an engine must sample with."""

    version: int
    digest: str
    """``RolloutEngine.digest_of`` the actor's weights."""


def check_rollout(
    request: RolloutRequest, trajectories: Trajectories, model: DiffusionModel, adapter: HeldAdapter, dtype: str
) -> None:
    """All checks of one ``generate``.

    Args:
        request, trajectories: what the engine was asked for, and its answer.
        model: the actor's, whose schedule is the right one.
        adapter: what the engine must hold.
        dtype: the engine's compute dtype, e.g. ``bfloat16``.

    Raises:
        RolloutSyncError: something differs; the line names it.
    """
    cond = request.conditioning
    schedule = model.schedule(request.num_inference_steps, cond.height, cond.width)
    check_adapter(adapter, trajectories.echo.adapter_version, trajectories.echo.adapter_digest)
    if trajectories.echo.dtype != dtype:
        _refuse("compute dtype", trajectories.echo.dtype, dtype, "the engine ignored actor_rollout_ref.rollout.dtype")
    check_echo(request, schedule, trajectories.echo)
    check_trajectories(request, trajectories, schedule)
    check_starting_noise(request, trajectories, model)


def check_adapter(expected: HeldAdapter, version: int, digest: str) -> None:
    """The engine's adapter is the expected one, by version and bit for bit."""
    if version != expected.version:
        raise RolloutSyncError(
            f"the rollout engine sampled with adapter version {version}, expected {expected.version}; the last sync "
            "did not arrive, or the engine answered an older request"
        )
    if digest != expected.digest:
        _refuse(
            f"adapter version {version}: digest of the engine's weights",
            digest[:16],
            expected.digest[:16],
            "the version is right but the weights are not: a stale adapter was left in place, a module was not bound, "
            "or the weights were changed on the way",
        )


def check_echo(request: RolloutRequest, schedule: Schedule, echo: Echo) -> None:
    """The engine used what the request and the actor's schedule say."""
    if echo.request_id != request.request_id:
        _refuse("request id", echo.request_id, request.request_id, _ORDER_CAUSE)
    _check_seeds(list(request.seeds), list(echo.seeds))
    _check_floats("sigmas", echo.sigmas, schedule.sigmas, _SCHEDULE_CAUSE)
    _check_floats("timesteps", echo.timesteps, schedule.timesteps, _SCHEDULE_CAUSE)
    cond = request.conditioning
    guided = "the engine ignored or renamed the setting, or left out the negative prompts"
    _check_float("true_cfg_scale", echo.true_cfg_scale, 1.0 if cond.negative is None else cond.true_cfg_scale, guided)
    _check_float("guidance_scale", echo.guidance_scale, cond.guidance_scale, "the engine ignored or renamed it")
    stochastic = request.window_starts is not None
    cause = "the engine ignored actor_rollout_ref.rollout.algo"
    _check_float("noise_level", echo.noise_level, request.noise_level if stochastic else 0.0, cause)
    if echo.sde_type != request.sde_type:
        _refuse("sde_type", echo.sde_type, request.sde_type, cause)
    _check_integers("window_starts", echo.window_starts, request.window_starts, cause)
    if echo.window_size != (request.window_size if stochastic else 0):
        _refuse("window_size", echo.window_size, request.window_size if stochastic else 0, cause)


def check_trajectories(request: RolloutRequest, trajectories: Trajectories, schedule: Schedule) -> None:
    """Images and recorded steps have the request's shapes and order; the batch is float32 and finite."""
    size, cond = len(request.prompt_index), request.conditioning
    _check_shape("images", trajectories.images, (size, cond.height, cond.width, 3))
    starts, batch = request.window_starts, trajectories.batch
    if starts is None:
        return
    if batch is None:
        _refuse("recorded steps", "none", f"{request.window_size} an image", "the engine sampled without noise")
    means = ("rollout_means",) if request.record_means else ()
    absent = {"prompt_index", "latents", "next_latents", *_SCALARS, *means} - set(batch.keys())
    if absent:
        _refuse("recorded steps", f"no {', '.join(sorted(absent))}", "them all", "the engine records too little")
    _check_integers("prompt_index", batch["prompt_index"], request.prompt_index, _ORDER_CAUSE)
    window = (size, request.window_size)
    for name in _SCALARS:
        _check_shape(name, batch[name], window)
    for name in ("latents", "next_latents", *means):
        _check_shape(name, batch[name], (*window, *batch["latents"].shape[2:]))
    columns = starts[:, None] + torch.arange(request.window_size)
    for name, values in (
        ("timesteps", schedule.timesteps[columns]),
        ("sigmas", schedule.sigmas[columns]),
        ("next_sigmas", schedule.sigmas[columns + 1]),
    ):
        _check_floats(f"recorded {name}", batch[name].float(), values, f"{_ORDER_CAUSE}, or record the step after")
    _check_values(batch)


def check_starting_noise(request: RolloutRequest, trajectories: Trajectories, model: DiffusionModel) -> None:
    """Images recorded from the first step on start from the noise of their own seed, bit for bit."""
    if request.window_starts is None or trajectories.batch is None:
        return
    cond, latents = request.conditioning, trajectories.batch["latents"]
    for row in (request.window_starts == 0).nonzero().flatten().tolist():
        generator = torch.Generator().manual_seed(request.seeds[row])
        if not torch.equal(model.initial_noise(generator, cond.height, cond.width), latents[row, 0]):
            raise RolloutSyncError(
                f"starting noise: row {row} does not start from the noise of its seed {request.seeds[row]}; "
                f"{_ORDER_CAUSE}, or draw from the request's seeds"
            )


def _check_seeds(expected: list[int], got: list[int]) -> None:
    if got == expected:
        return
    if sorted(got) == sorted(expected):
        row = next(i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b)
        _refuse(f"seeds: the same in another order, first at row {row}", got[row], expected[row], _ORDER_CAUSE)
    _refuse("seeds", _short(got), _short(expected), "the engine drew from streams of its own")


def _check_values(batch: TensorDict) -> None:
    for name, tensor in batch.items():
        if name == "prompt_index":
            continue
        if tensor.dtype != torch.float32:
            _refuse(f"dtype of {name}", _name(tensor.dtype), "float32", "the engine stores in its compute dtype")
        finite = torch.isfinite(tensor.flatten(1)).all(1)
        if not finite.all():
            rows = (~finite).nonzero().flatten().tolist()
            raise RolloutSyncError(
                f"{name}: not finite for {len(rows)} of {len(finite)} images (rows {_short(rows)}), expected finite "
                "numbers; the engine's precision may be too low: try actor_rollout_ref.rollout.dtype=float32"
            )
    for name in ("latents", "next_latents"):
        _check_width(name, batch[name])


def _check_width(name: str, latents: Tensor) -> None:
    """No row went through a narrower dtype and back: then all its elements would survive that dtype."""
    flat = latents.flatten(1)
    sample = flat[:, :: max(1, flat.shape[1] // _SAMPLE)]
    for dtype in (torch.bfloat16, torch.float16):
        rounded = (sample.to(dtype).float() == sample).all(1)
        if rounded.any():
            _refuse(
                f"{name}: precision of row {int(rounded.nonzero()[0])}",
                f"values rounded to {_name(dtype)}",
                "float32",
                "the engine keeps latents in its compute dtype; they are what the actor scores, so keep float32",
            )


def _check_float(what: str, got: float | None, expected: float | None, cause: str) -> None:
    same = got == expected or (
        got is not None and expected is not None and abs(got - expected) <= TOLERANCE * abs(expected)
    )
    if not same:
        _refuse(what, got, expected, cause)


def _check_floats(what: str, got: Tensor, expected: Tensor, cause: str) -> None:
    _check_shape(what, got, tuple(expected.shape))
    got, expected = got.double().cpu(), expected.double().cpu()
    wrong = ~((got - expected).abs() <= TOLERANCE * expected.abs())
    if wrong.any():
        place = tuple(wrong.nonzero()[0].tolist())
        where = f"step {place[0]}" if len(place) == 1 else f"row {place[0]}, step {place[1]} of its window"
        _refuse(f"{what}: {where}", float(got[place]), float(expected[place]), cause)


def _check_integers(what: str, got: Tensor | None, expected: Tensor | None, cause: str) -> None:
    a, b = (None if x is None else x.tolist() for x in (got, expected))
    if a != b:
        _refuse(what, None if a is None else _short(a), None if b is None else _short(b), cause)


def _check_shape(what: str, got: Tensor, expected: Sequence[int]) -> None:
    if tuple(got.shape) != tuple(expected):
        _refuse(f"shape of {what}", tuple(got.shape), tuple(expected), "another number of images, steps or pixels")


def _refuse(what: str, got: object, expected: object, cause: str) -> NoReturn:
    shown = [f"{value:.7g}" if isinstance(value, float) else value for value in (got, expected)]
    raise RolloutSyncError(f"{what}: got {shown[0]}, expected {shown[1]}; {cause}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _short(values: Sequence[int], limit: int = 8) -> str:
    return f"[{', '.join(map(str, values[:limit]))}{', ...' if len(values) > limit else ''}]"
