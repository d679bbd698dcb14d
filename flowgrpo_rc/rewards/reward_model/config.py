"""The section ``reward.reward_model`` of a configuration. Importing this starts nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

from flowgrpo_rc.field_docs import documented_fields
from flowgrpo_rc.section import Check, PositiveFloat, PositiveInt, Section, one_of

SECTION = "reward.reward_model"
ENGINES = ("vllm",)
REFUSED_ARGUMENTS = {
    "--api-key": "which would stand in config.yaml; the server listens on this machine alone",
    "--host": "since the server must listen on 127.0.0.1, where the run asks it",
    "--port": "since the run gives the server a free one, where it asks it",
    "--served-model-name": "since the run asks for the model by reward.reward_model.model_path",
}
"""Arguments of ``vllm serve`` that cannot be among ``extra_args``, and why."""
DTYPES = ("auto", "bfloat16", "float16", "float32")


@documented_fields
@dataclass(kw_only=True, slots=True)
class RewardModelRolloutConfig(Section):
    """Options of ``vllm serve`` for the reward model; the names are verl-omni's."""

    section = f"{SECTION}.rollout"

    name: Annotated[str, one_of(ENGINES)] = "vllm"
    """The program that serves; ``vllm`` is the one there is. It must be on the ``PATH``, or beside the Python that
    trains."""
    tensor_model_parallel_size: PositiveInt = 1
    """GPUs over which each layer is divided."""
    data_parallel_size: PositiveInt = 1
    """Copies of the model that answer side by side, each on as many GPUs as the other sizes say."""
    dtype: Annotated[str, one_of(DTYPES)] = "auto"
    """Precision of the weights: ``auto`` as the model's files say, ``bfloat16``, ``float16`` or ``float32``."""
    gpu_memory_utilization: Annotated[
        float, Check(lambda share: 0 < share <= 1, "give a share of the GPU's memory above 0 and at most 1")
    ] = 0.5
    """Share of each GPU's memory that the server takes, and keeps while the run trains."""
    max_model_len: PositiveInt | None = None
    """Longest question with its image and answer, in tokens; null for the model's own limit."""
    max_num_seqs: PositiveInt | None = None
    """Answers that are worked on at once; null for vllm's default."""
    enforce_eager: bool = True
    """Start the server without compiling the model. A compiled model starts later and answers faster."""


@documented_fields
@dataclass(kw_only=True, slots=True)
class RewardModelConfig(Section):
    """A reward model that the run serves itself, for the reward ``judge`` and for functions that ask a model."""

    section = SECTION

    enable: bool = False
    """Start a server with ``vllm serve``, and end it with the run. The reward ``judge`` uses it, and a function of the
    user's own gets its address as ``reward_router_address`` (``host:port``) and the model's name as ``model_name``, if
    it has such parameters."""
    model_path: str | None = None
    """The model: a name on the hub or a local folder, as ``vllm serve`` takes it."""
    devices: (
        Annotated[list[int], Check(lambda gpus: gpus and min(gpus) >= 0, "give numbers of GPUs from 0, e.g. [3],")]
        | None
    ) = None
    """GPUs of the server, as indices into those that the run sees; null for all of them. Name such as the run does not
    train on, or leave room beside the training with ``rollout.gpu_memory_utilization``."""
    extra_args: list[str] = field(default_factory=list)
    """Further arguments of ``vllm serve``, e.g. ``[--trust-remote-code]``. ``--host``, ``--port``,
    ``--served-model-name`` and ``--api-key`` are refused, since the run sets the address and the model's name."""
    start_timeout_s: PositiveFloat = 1800.0
    """Longest time in seconds that the server may take to start, with the download of the model."""
    rollout: RewardModelRolloutConfig = field(default_factory=RewardModelRolloutConfig)
    """Options of ``vllm serve``."""

    def problems(self) -> Iterator[str]:
        """A server without a model, and arguments that the run gives itself."""
        # A model path without enable is fine: scripts switch the server off with one key.
        if self.enable and not (self.model_path and self.model_path.strip()):
            yield (
                f"model_path: null, but {SECTION}.enable=true; name the model, e.g. "
                f"{SECTION}.model_path=Qwen/Qwen3-VL-8B-Instruct"
            )
        # vllm accepts underscores in place of hyphens.
        given = {argument.partition("=")[0].replace("_", "-") for argument in self.extra_args}
        for name, reason in REFUSED_ARGUMENTS.items():
            if name in given:
                yield f"extra_args: leave {name} out, {reason}"

    def arguments(self, port: int) -> list[str]:
        """The arguments of ``vllm``."""
        rollout = self.rollout
        given = {
            "--host": "127.0.0.1",
            "--port": port,
            "--served-model-name": self.model_path,
            "--tensor-parallel-size": rollout.tensor_model_parallel_size,
            "--data-parallel-size": rollout.data_parallel_size,
            "--dtype": rollout.dtype,
            "--gpu-memory-utilization": rollout.gpu_memory_utilization,
            "--max-model-len": rollout.max_model_len,
            "--max-num-seqs": rollout.max_num_seqs,
        }
        flags = [text for name, value in given.items() if value is not None for text in (name, str(value))]
        eager = ["--enforce-eager"] if rollout.enforce_eager else []
        return ["serve", str(self.model_path), *flags, *eager, *self.extra_args]
