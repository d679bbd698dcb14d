"""The rollout protocol: what a trainer asks of an engine and what it gets back."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable
from uuid import uuid4

from jaxtyping import Float, Int, UInt8
from tensordict import TensorDict
from torch import Tensor

from flowgrpo_rc.batch import Key
from flowgrpo_rc.models.base import Conditioning


class RolloutError(RuntimeError):
    """An engine could not sample, or sampled something unfit for training."""


class EngineLostError(RolloutError):
    """An engine elsewhere died, hung or cannot be reached; started anew it may work."""


class RolloutSyncError(RolloutError):
    """An engine sampled with another adapter, schedule, guidance or noise than the trainer asked for."""


@dataclass(frozen=True)
class RolloutRequest:
    """Images to sample: row ``i`` draws ``prompts`` row ``prompt_index[i]`` with its own random stream."""

    conditioning: Conditioning
    """Embeddings of the distinct prompts, guidance and image size."""
    prompt_index: Int[Tensor, " B"]
    """The row of the conditioning that each image shows."""
    num_inference_steps: int
    """How many denoising steps an image takes."""
    seeds: Sequence[int]
    """One seed for each image. The engine draws from ``torch.Generator().manual_seed(seed)`` on the host: the starting
    noise first, then once for every stochastic step."""
    window_starts: Int[Tensor, " B"] | None
    """First stochastic step of each image; ``None`` samples the deterministic ODE and records nothing."""
    window_size: int = 0
    """How many contiguous steps are stochastic and recorded."""
    noise_level: float = 0.0
    """Noise level of the stochastic steps."""
    sde_type: str = "sde"
    """Kind of the stochastic steps, a key of ``SDE_TYPES``."""
    record_means: bool = False
    """Whether ``rollout_means``, the mean of each recorded step, is wanted too."""
    on_images: Callable[[Int[Tensor, " b"], UInt8[Tensor, "b H W 3"]], object] | None = None
    """Called by engines that have images before the last is drawn: the rows, in order, and the finished images, on the
    host, as they will be in the answer. An engine that has them all at once need not call it."""
    request_id: str = field(default_factory=lambda: uuid4().hex)
    """Names this request; results find it again by this name."""


@dataclass(frozen=True)
class Echo:
    """What an engine used, read where it used it and never copied from the request; rows in the order of the images."""

    request_id: str
    """The request that was answered."""
    timesteps: Float[Tensor, " N"]
    """What the transformer was told at each step; float32, on the host."""
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
    """How many steps of an image were stochastic."""
    seeds: tuple[int, ...]
    """Seed of each image's random stream."""
    dtype: str
    """The transformer's compute dtype, e.g. ``bfloat16``."""
    adapter_version: int
    """The version of the adapter that drew the images."""
    adapter_digest: str
    """``adapter_digest`` of the weights that drew the images."""


@dataclass(frozen=True)
class Trajectories:
    """What an engine returns."""

    images: UInt8[Tensor, "B H W 3"]
    """The finished images."""
    batch: TensorDict | None
    """``latents``, ``next_latents``, ``timesteps``, ``sigmas``, ``next_sigmas``, ``rollout_log_probs``,
    ``prompt_index`` and on request ``rollout_means``, all on the host, floats in float32; ``None`` for a deterministic
    request."""
    echo: Echo
    """What the engine used."""


@runtime_checkable
class RolloutEngine(Protocol):
    """An engine holds a model and an adapter of a known version, and samples with them.

    **Equal work on every process.** Where a run has several processes, every one makes the same calls of its engine and
    its actor in the same order, for as many images, so that every one makes the same number of transformer calls: a
    sharded transformer gathers its weights in every call, and a call that one process leaves out hangs the others. So
    an engine derives the number of its transformer calls from the number of images, the number of steps and whether
    there is guidance, and never from what is in a row; a process with less to do repeats a row and drops what comes of
    it (validation, the probe of a step); and what one process finds is agreed on before anything depends on it
    (``flowgrpo_rc.actor.agreement``). An exception ends the engine's process, and the launcher ends all
    others.
    """

    adapter_version: int

    def generate(self, request: RolloutRequest) -> Trajectories:
        """Sample; the order of images is the request's."""
        ...

    def sync(self, state: Mapping[str, Tensor], version: int) -> str:
        """Take over the actor's adapter weights; every tensor must bind and ``state`` stays as it is.

        Returns the digest of the adapter as the engine now holds it.
        """
        ...

    def digest_of(self, state: Mapping[str, Tensor]) -> str:
        """The digest of an adapter that holds exactly ``state``, after the engine's rounding; from ``state`` alone,
        whatever the engine holds."""
        ...

    def close(self) -> None:
        """Release the model."""
        ...


@runtime_checkable
class MeasuresMemory(Protocol):
    """An engine that knows what it does to a GPU's memory."""

    def memory_metrics(self) -> dict[str, float]:
        """For the row of a step, in GiB; the same names in every process of a run."""
        ...


@runtime_checkable
class RolloutHandle(Protocol):
    """An engine somewhere else, which one thread of a ``RolloutPool`` asks for one thing at a time.

    What the engine answers with an error is a ``RolloutError`` or ``AdapterMismatchError`` and ends the run. Where it
    is gone, or hung and was ended for it, ``sync`` and ``generate`` raise ``EngineLostError``: the pool then has others
    do its work, and starts it anew.
    """

    name: str
    """What messages and the timeline of a run call it, e.g. ``process 0 (cuda:1)``."""

    def sync(self, state: Mapping[str, Tensor], version: int) -> str:
        """As ``RolloutEngine.sync``; ``state`` is on the host, in the engine's dtype."""
        ...

    def generate(self, request: RolloutRequest) -> Trajectories:
        """As ``RolloutEngine.generate``, of a request without ``on_images``."""
        ...

    def start(self) -> None:
        """Start the engine, or start it anew after ``EngineLostError``; it has no adapter then.

        Raises:
            EngineLostError, RolloutError: it does not start.
        """
        ...

    def close(self) -> None:
        """End the engine, from any thread, if it has not ended: a call in progress raises ``EngineLostError``."""
        ...


def check_has_adapter(version: int) -> None:
    """Raise ``RolloutError`` where an engine, whose ``adapter_version`` this is, has no adapter yet."""
    if version < 0:
        raise RolloutError("the rollout engine has no adapter yet: call sync() before generate()")


def batch_of(record: Mapping[str, Tensor], request: RolloutRequest) -> TensorDict | None:
    """The recorded steps of all images as a trajectory batch; ``None`` for a deterministic request."""
    if request.window_starts is None:
        return None
    batch = TensorDict(dict(record), batch_size=[len(request.prompt_index)])
    batch[Key.PROMPT_INDEX] = request.prompt_index.clone()
    return batch
