"""Proof that a rollout has the requested adapter, schedule, guidance, noise and rows.

Every check raises ``RolloutSyncError`` with one line: the difference, the value found and expected, and the usual
cause. The checks compare a batch's scalars and make one pass over the latents, so they are cheap and always on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NoReturn

import torch
from jaxtyping import Int
from tensordict import TensorDict
from torch import Tensor

from flowgrpo_rc.batch import Key
from flowgrpo_rc.dtypes import dtype_name
from flowgrpo_rc.models.base import DiffusionModel, Schedule
from flowgrpo_rc.rollout.base import Echo, RolloutRequest, RolloutSyncError, Trajectories
from flowgrpo_rc.rollout.sampling import SCALARS

TOLERANCE = 1e-6
"""Largest relative difference between two float32 computations of one schedule."""

_SCHEDULE_CAUSE = "the engine's scheduler differs: shift, dynamic shifting, number of steps, image size"
_ORDER_CAUSE = "the engine has mixed up its results; match them to requests by id, not by order of arrival"
_GUIDANCE_CAUSE = "the engine ignored or renamed the setting, or left out the negative prompts"
_NOISE_CAUSE = "the engine ignored actor_rollout_ref.rollout.algo"
_TAIL_CAUSE = "the engine ignored actor_rollout_ref.rollout.tail"
# Elements of each row that are tested for a narrow dtype.
_SAMPLE = 1024


@dataclass(frozen=True)
class HeldAdapter:
    """The adapter that an engine must sample with."""

    version: int
    """Number of adapters that the actor had pushed before."""
    digest: str
    """``RolloutEngine.digest_of`` the actor's weights."""


def check_rollout(
    request: RolloutRequest, trajectories: Trajectories, model: DiffusionModel, adapter: HeldAdapter, dtype: str
) -> None:
    """Make all checks of one ``generate``.

    Args:
        request: of the trainer.
        trajectories: the engine's answer.
        model: the actor's, with the correct schedule.
        adapter: the adapter that the engine must hold.
        dtype: the engine's compute dtype, e.g. ``bfloat16``.

    Raises:
        RolloutSyncError: something differs; the message names it.
    """
    cond = request.conditioning
    schedule = model.schedule(request.num_inference_steps, cond.height, cond.width)
    echo = trajectories.echo
    check_adapter(adapter, echo.adapter_version, echo.adapter_digest)
    _check("compute dtype", echo.dtype, dtype, "the engine ignored actor_rollout_ref.rollout.dtype")
    check_echo(request, schedule, echo)
    _check_shape("images", trajectories.images, (len(request.prompt_index), cond.height, cond.width, 3))
    if request.record_clean:
        check_clean(request, trajectories.batch)
    if request.window_starts is None:
        return
    if trajectories.batch is None:
        _refuse("recorded steps", "none", f"{request.window_size} an image", "the engine sampled without noise")
    check_steps(request, request.window_starts, trajectories.batch, schedule)
    check_values(trajectories.batch)
    latents = trajectories.batch[Key.LATENTS]
    # Only windows from the first step on record the starting noise.
    for row in (request.window_starts == 0).nonzero().flatten().tolist():
        seed = (request.start_seeds or request.seeds)[row]
        generator = torch.Generator().manual_seed(seed)
        if not torch.equal(model.initial_noise(generator, cond.height, cond.width), latents[row, 0]):
            raise RolloutSyncError(
                f"starting noise: row {row} does not start from the noise of its seed {seed}; "
                f"{_ORDER_CAUSE}, or draw from the request's seeds"
            )


def check_adapter(expected: HeldAdapter, version: int, digest: str) -> None:
    """Check that the engine's adapter is the expected one, by version and bit for bit."""
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
    """Check that the engine used the settings of the request and the actor's schedule."""
    cond = request.conditioning
    # Without a negative prompt the scale has no effect, and engines report 1.
    true_cfg_scale = 1.0 if cond.negative is None else cond.true_cfg_scale
    stochastic = request.window_starts is not None
    _check("request id", echo.request_id, request.request_id, _ORDER_CAUSE)
    _check("seeds", list(echo.seeds), list(request.seeds), f"it drew from streams of its own, or {_ORDER_CAUSE}")
    shared = None if request.start_seeds is None else list(request.start_seeds)
    found = None if echo.start_seeds is None else list(echo.start_seeds)
    _check("start_seeds", found, shared, f"it drew from streams of its own, or {_ORDER_CAUSE}")
    _check_floats("sigmas", echo.sigmas, schedule.sigmas, _SCHEDULE_CAUSE)
    _check_floats("timesteps", echo.timesteps, schedule.timesteps, _SCHEDULE_CAUSE)
    _check("true_cfg_scale", echo.true_cfg_scale, true_cfg_scale, _GUIDANCE_CAUSE)
    interval = None if cond.negative is None else cond.guidance_interval
    _check("guidance_interval", echo.guidance_interval, interval, _GUIDANCE_CAUSE)
    _check("guidance_scale", echo.guidance_scale, cond.guidance_scale, "the engine ignored or renamed it")
    _check("noise_level", echo.noise_level, request.noise_level if stochastic else 0.0, _NOISE_CAUSE)
    _check("sde_type", echo.sde_type, request.sde_type, _NOISE_CAUSE)
    _check("window_starts", _listed(echo.window_starts), _listed(request.window_starts), _NOISE_CAUSE)
    _check("window_size", echo.window_size, request.window_size if stochastic else 0, _NOISE_CAUSE)
    cache = None if request.cache is None else request.cache.described
    _check("cache", echo.cache, cache, "the engine ignored actor_rollout_ref.rollout.cache, or has another one")
    check_tail(request, schedule, echo)


def check_tail(request: RolloutRequest, schedule: Schedule, echo: Echo) -> None:
    """Check that the steps after the window were the requested ones."""
    tail = request.tail
    _check("tail solver", echo.tail_solver, None if tail is None else tail.solver, _TAIL_CAUSE)
    if tail is None or echo.moves is None:
        _check("steps taken", None if echo.moves is None else "some", None if tail is None else "some", _TAIL_CAUSE)
        return
    steps = len(schedule.timesteps)
    ends = [0] * len(request.seeds)
    if request.window_starts is not None:
        ends = [start + request.window_size for start in request.window_starts.tolist()]
    _check_shape("steps taken", echo.moves, (len(ends), steps))
    for row, end in enumerate(ends):
        taken = echo.moves[row].nonzero().flatten().tolist()
        _check(f"steps taken for row {row}", taken, tail.levels(steps, end)[:-1], _TAIL_CAUSE)


def check_steps(request: RolloutRequest, starts: Int[Tensor, " B"], batch: TensorDict, schedule: Schedule) -> None:
    """Check that the recorded steps are complete, and those of the request's prompts and windows."""
    latents = (Key.LATENTS, Key.NEXT_LATENTS, *([Key.ROLLOUT_MEANS] if request.record_means else []))
    absent = {Key.PROMPT_INDEX, *SCALARS, *latents} - set(batch.keys())
    if absent:
        _refuse("recorded steps", f"no {', '.join(sorted(absent))}", "them all", "the engine records too little")
    _check(Key.PROMPT_INDEX, _listed(batch[Key.PROMPT_INDEX]), _listed(request.prompt_index), _ORDER_CAUSE)
    window = (len(starts), request.window_size)
    for name in SCALARS:
        _check_shape(name, batch[name], window)
    for name in latents:
        _check_shape(name, batch[name], (*window, *batch[Key.LATENTS].shape[2:]))
    # Each image has a window of its own, so the expected levels are gathered row by row.
    steps = starts[:, None] + torch.arange(request.window_size)
    expected = {
        Key.TIMESTEPS: schedule.timesteps[steps],
        Key.SIGMAS: schedule.sigmas[steps],
        Key.NEXT_SIGMAS: schedule.sigmas[steps + 1],
    }
    for name, values in expected.items():
        _check_floats(f"recorded {name}", batch[name].float(), values, f"{_ORDER_CAUSE}, or record the step after")


def check_clean(request: RolloutRequest, batch: TensorDict | None) -> None:
    """Check that the clean latents are there, finite, float32, and those of the request's prompts."""
    absent = {Key.PROMPT_INDEX, Key.CLEAN_LATENTS} - set(() if batch is None else batch.keys())
    if batch is None or absent:
        _refuse("clean images", f"no {', '.join(sorted(absent))}", "both", "the engine ignored record_clean")
    _check(Key.PROMPT_INDEX, _listed(batch[Key.PROMPT_INDEX]), _listed(request.prompt_index), _ORDER_CAUSE)
    _check_finite(batch)


def check_values(batch: TensorDict) -> None:
    """Check that everything is finite float32, and that latents went through no narrower dtype and back."""
    _check_finite(batch)
    for name, dtype in product((Key.LATENTS, Key.NEXT_LATENTS), (torch.bfloat16, torch.float16)):
        # Every element of a row that was rounded once survives that dtype, of a float32 row hardly any: a sample does.
        flat = batch[name].flatten(1)
        sample = flat[:, :: max(1, flat.shape[1] // _SAMPLE)]
        rounded = (sample.to(dtype).float() == sample).all(1)
        if rounded.any():
            _refuse(
                f"{name}: precision of row {int(rounded.nonzero()[0])}",
                f"values rounded to {dtype_name(dtype)}",
                "float32",
                "the engine keeps latents in its compute dtype; they are what the actor scores, so keep float32",
            )


def _check_finite(batch: TensorDict) -> None:
    """Check that everything is finite float32."""
    for name, tensor in batch.exclude(Key.PROMPT_INDEX).items():
        if tensor.dtype != torch.float32:
            _refuse(f"dtype of {name}", dtype_name(tensor.dtype), "float32", "the engine stores in its compute dtype")
        rows = (~torch.isfinite(tensor.flatten(1)).all(1)).nonzero().flatten().tolist()
        if rows:
            raise RolloutSyncError(
                f"{name}: not finite for {len(rows)} of {len(tensor)} images (rows {_shown(rows)}), expected finite "
                "numbers; the engine's precision may be too low: try actor_rollout_ref.rollout.dtype=float32"
            )


def _check(what: str, got: Any, expected: Any, cause: str) -> None:
    """Compare one setting of the echo; numbers may differ by a rounding."""
    # Scales pass through float32 on their way, so that 7.1 may come back a rounding apart.
    numbers = isinstance(got, int | float) and isinstance(expected, int | float)
    if got == expected or (numbers and abs(got - expected) <= TOLERANCE * abs(expected)):
        return
    _refuse(what, got, expected, cause)


def _check_floats(what: str, got: Tensor, expected: Tensor, cause: str) -> None:
    _check_shape(what, got, expected.shape)
    # In float64, where the comparison itself rounds nothing.
    got = got.double().cpu()
    expected = expected.double().cpu()
    wrong = ~((got - expected).abs() <= TOLERANCE * expected.abs())  # NaN is wrong too
    if wrong.any():
        place = tuple(wrong.nonzero()[0].tolist())
        where = f"step {place[0]}" if len(place) == 1 else f"row {place[0]}, step {place[1]} of its window"
        _refuse(f"{what}: {where}", float(got[place]), float(expected[place]), cause)


def _check_shape(what: str, got: Tensor, expected: Sequence[int]) -> None:
    if tuple(got.shape) != tuple(expected):
        _refuse(f"shape of {what}", tuple(got.shape), tuple(expected), "another number of images, steps or pixels")


def _refuse(what: str, got: object, expected: object, cause: str) -> NoReturn:
    raise RolloutSyncError(f"{what}: got {_shown(got)}, expected {_shown(expected)}; {cause}")


def _listed(integers: Tensor | None) -> list[int] | None:
    return None if integers is None else integers.tolist()


def _shown(value: object, limit: int = 8) -> str:
    """Format a value for a message: floats rounded, long lists cut."""
    if isinstance(value, float):
        return f"{value:.7g}"
    if isinstance(value, list):
        return f"[{', '.join(map(str, value[:limit]))}{', ...' if len(value) > limit else ''}]"
    return str(value)
