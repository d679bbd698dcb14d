"""The rollout protocol: the request of a trainer, the answer of an engine, and their errors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Protocol, runtime_checkable
from uuid import uuid4

import torch
from jaxtyping import Bool, Float, Int, UInt8
from tensordict import TensorDict
from torch import Tensor

from flowgrpo_rc.batch import Key
from flowgrpo_rc.models.base import Conditioning
from flowgrpo_rc.rollout.cache import CacheConfig
from flowgrpo_rc.rollout.tail import TailConfig


class RolloutError(RuntimeError):
    """An engine could not sample, or sampled something unfit for training."""


class EngineLostError(RolloutError):
    """An engine elsewhere died, hung or cannot be reached. A new start may help."""


class RolloutSyncError(RolloutError):
    """An engine sampled with another adapter, schedule, guidance or noise than requested."""


@dataclass(frozen=True)
class RolloutRequest:
    """Images to sample: row ``i`` shows prompt ``prompt_index[i]`` and has a random stream of its own."""

    conditioning: Conditioning
    """Embeddings of the distinct prompts, guidance and image size."""
    prompt_index: Int[Tensor, " B"]
    """The row of the conditioning that each image shows."""
    num_inference_steps: int
    """Number of denoising steps."""
    seeds: Sequence[int]
    """One seed for each image. The engine draws from ``torch.Generator().manual_seed(seed)`` on the host: the starting
    noise first, then once for every stochastic step."""
    window_starts: Int[Tensor, " B"] | None
    """First stochastic step of each image; ``None`` samples the deterministic ODE and records nothing."""
    window_size: int = 0
    """Number of contiguous steps that are stochastic and recorded."""
    noise_level: float = 0.0
    """Noise level of the stochastic steps."""
    sde_type: str = "sde"
    """Kind of the stochastic steps, a key of ``SDE_TYPES``."""
    record_means: bool = False
    """Also record ``rollout_means``, the mean of each recorded step."""
    record_clean: bool = False
    """Return ``clean_latents``, for a deterministic request whose images are learned from."""
    on_images: Callable[[Int[Tensor, " b"], UInt8[Tensor, "b H W 3"]], object] | None = None
    """Called with rows, in order, and their finished images on the host, as soon as an engine has them. An engine that
    finishes all images at once need not call it."""
    request_id: str = field(default_factory=lambda: uuid4().hex)
    """Name of the request, by which its results are found."""
    start_seeds: Sequence[int] | None = None
    """Seed of each image's starting noise, where images of a prompt share theirs; ``None`` takes it from ``seeds``. An
    engine computes the steps that such images have in common once: all up to their first stochastic step."""
    tail: TailConfig | None = None
    """The steps after the window; ``None`` takes each of them, by Euler. Without a window all steps are the tail."""
    cache: CacheConfig | None = None
    """A cache of the transformer; ``None`` computes every block of every step."""


@dataclass(frozen=True)
class Echo:
    """The settings that an engine used, read at the place of use and never copied from the request."""

    request_id: str
    """Name of the answered request."""
    timesteps: Float[Tensor, " N"]
    """The transformer's input at each step; float32, on the host."""
    sigmas: Float[Tensor, " N+1"]
    """Noise levels between which the steps were taken; float32, on the host."""
    true_cfg_scale: float
    """Scale of classifier-free guidance; 1 without a negative prompt."""
    guidance_scale: float | None
    """Guidance given to a guidance-distilled model."""
    noise_level: float
    """Noise level of the stochastic steps; 0 when there were none."""
    sde_type: str
    """Kind of the stochastic steps."""
    window_starts: Int[Tensor, " B"] | None
    """First stochastic step of each image; ``None`` when no step was stochastic."""
    window_size: int
    """Number of stochastic steps of an image."""
    seeds: tuple[int, ...]
    """Seed of each image's random stream."""
    dtype: str
    """The transformer's compute dtype, e.g. ``bfloat16``."""
    adapter_version: int
    """The version of the adapter that drew the images."""
    adapter_digest: str
    """``adapter_digest`` of the weights that drew the images."""
    start_seeds: tuple[int, ...] | None = None
    """Seed of each image's starting noise; ``None`` if it comes from ``seeds``."""
    guidance_interval: tuple[float, float] | None = None
    """Lowest and highest noise level with classifier-free guidance; ``None``: at all levels, or no guidance."""
    cache: str | None = None
    """The cache that was on, and where; ``None`` without one."""
    tail_solver: str | None = None
    """Solver of the steps after the window; ``None`` without a ``tail``."""
    moves: Bool[Tensor, "B N"] | None = None
    """The steps that each image took, with a ``tail``: it went from level ``k`` to the next level from which it took a
    step, at last to ``N``. ``None``: every step."""


@dataclass(frozen=True)
class Trajectories:
    """The answer of an engine."""

    images: UInt8[Tensor, "B H W 3"]
    """The finished images."""
    batch: TensorDict | None
    """``latents``, ``next_latents``, ``timesteps``, ``sigmas``, ``next_sigmas``, ``rollout_log_probs``,
    ``prompt_index`` and on request ``rollout_means``, all on the host, floats in float32; for a deterministic request
    ``prompt_index`` and ``clean_latents`` with ``record_clean``, else ``None``."""
    echo: Echo
    """The settings that the engine used."""


@runtime_checkable
class RolloutEngine(Protocol):
    """An engine holds a model and an adapter of a known version, and samples with them.

    **Equal work on every process.** In a run with several processes, all make the same calls of engine and actor in
    the same order, for equally many images. A sharded transformer gathers its weights in every call, so a call that
    one process leaves out hangs the others. Therefore the number of transformer calls depends on the number of images,
    the number of steps and guidance, and never on the data of a row. A process with less work repeats a row and drops
    the result. Findings of one process are agreed on (``on_any_process``) before anything depends on them. An
    exception ends the engine's process, and the launcher ends all others.
    """

    adapter_version: int

    def generate(self, request: RolloutRequest) -> Trajectories:
        """Sample; the order of images is the request's."""
        ...

    def sync(self, state: Mapping[str, Tensor], version: int) -> str:
        """Take over the actor's adapter weights; every tensor must bind, and ``state`` is not changed. Returns the
        digest of the adapter as the engine holds it then."""
        ...

    def digest_of(self, state: Mapping[str, Tensor]) -> str:
        """The digest of an adapter with exactly ``state`` after the engine's rounding, whatever the engine holds."""
        ...

    def close(self) -> None:
        """Release the model."""
        ...


@runtime_checkable
class MeasuresMemory(Protocol):
    """An engine that reports its use of GPU memory."""

    def memory_metrics(self) -> dict[str, float]:
        """Metrics of a step in GiB, under the same names in every process of a run."""
        ...


@runtime_checkable
class RolloutHandle(Protocol):
    """An engine elsewhere, which one thread of a ``RolloutPool`` calls.

    ``RolloutError`` and ``AdapterMismatchError`` are answers of the engine and end the run. ``EngineLostError`` means
    that the engine is gone, or hung and was ended: the pool then has other engines do its work, and starts it again.
    """

    name: str
    """Its name in messages and in the timeline of a run, e.g. ``process 0 (cuda:1)``."""

    def sync(self, state: Mapping[str, Tensor], version: int) -> str:
        """As ``RolloutEngine.sync``; ``state`` is on the host, in the engine's dtype."""
        ...

    def generate(self, request: RolloutRequest) -> Trajectories:
        """As ``RolloutEngine.generate``, of a request without ``on_images``."""
        ...

    def start(self) -> None:
        """Start the engine, at first or after ``EngineLostError``; it has no adapter then.

        Raises:
            EngineLostError, RolloutError: it does not start.
        """
        ...

    def close(self) -> None:
        """End the engine, from any thread; a call in progress raises ``EngineLostError``."""
        ...


def check_has_adapter(version: int) -> None:
    """Raise ``RolloutError`` if an engine with this ``adapter_version`` has no adapter yet."""
    if version < 0:
        raise RolloutError("the rollout engine has no adapter yet: call sync() before generate()")


def batch_of(record: Mapping[str, Tensor], request: RolloutRequest) -> TensorDict | None:
    """The recorded steps or clean latents of all images as a trajectory batch; ``None`` if nothing is recorded."""
    if request.window_starts is None and not request.record_clean:
        return None
    batch = TensorDict(dict(record), batch_size=[len(request.prompt_index)])
    # A copy: the batch outlives the request and is moved to the actor's device.
    batch[Key.PROMPT_INDEX] = request.prompt_index.clone()
    return batch


def rows_of(request: RolloutRequest, rows: Tensor) -> RolloutRequest:
    """The request for these rows, with their prompts only. Embeddings keep the padding of the whole request, so that
    an engine computes on the same shapes."""
    # Embeddings of long prompts are the largest part of a request, so only those shown are sent.
    prompts, index = request.prompt_index[rows].cpu().unique(return_inverse=True)
    chosen = rows.tolist()
    starts = request.window_starts
    return replace(
        request,
        conditioning=request.conditioning.rows(prompts, torch.device("cpu")),
        prompt_index=index,
        seeds=[request.seeds[row] for row in chosen],
        start_seeds=None if request.start_seeds is None else [request.start_seeds[row] for row in chosen],
        window_starts=None if starts is None else starts[rows].cpu(),
        on_images=None,
        request_id=f"{request.request_id}/{chosen[0]}",
    )


OF_IMAGES = ("request_id", "window_starts", "seeds", "start_seeds", "moves")
"""Fields of an echo that differ from image to image."""


def joined(request: RolloutRequest, parts: Sequence[Trajectories]) -> Trajectories:
    """The answers for some rows each, in order, as the answer to the request.

    Raises:
        RolloutSyncError: they were drawn with different settings.
    """
    echoes = [part.echo for part in parts]
    first = echoes[0]
    for name in (f.name for f in fields(Echo) if f.name not in OF_IMAGES):
        one = getattr(first, name)
        for other in (getattr(echo, name) for echo in echoes[1:]):
            if not (torch.equal(one, other) if isinstance(one, Tensor) else one == other):
                raise RolloutSyncError(
                    f"{name}: images of one rollout were drawn with {one} and {other}; the rollout engines do not run "
                    "the same program or model"
                )
    starts = [echo.window_starts for echo in echoes if echo.window_starts is not None]
    moves = [echo.moves for echo in echoes if echo.moves is not None]
    shared = first.start_seeds is not None
    echo = replace(
        first,
        request_id=request.request_id,
        seeds=tuple(seed for one in echoes for seed in one.seeds),
        start_seeds=tuple(seed for one in echoes for seed in one.start_seeds or ()) if shared else None,
        window_starts=torch.cat(starts) if starts else None,
        moves=torch.cat(moves) if moves else None,
    )
    batches = [part.batch for part in parts if part.batch is not None]
    names = batches[0].exclude(Key.PROMPT_INDEX).keys() if batches else ()
    record = {name: torch.cat([batch[name] for batch in batches]) for name in names}
    return Trajectories(torch.cat([part.images for part in parts]), batch_of(record, request), echo)
