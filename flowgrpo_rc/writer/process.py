"""Engines of the prompt writer in processes of their own on this machine (``engine.placement=process``)."""

import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from flowgrpo_rc.dtypes import set_tf32, torch_dtype
from flowgrpo_rc.messages import one_line
from flowgrpo_rc.models.lora import AdapterMismatchError
from flowgrpo_rc.rollout.base import EngineLostError, RolloutError, RolloutSyncError
from flowgrpo_rc.rollout.config import Share
from flowgrpo_rc.rollout.process import EngineProcess, check_devices, on_one_device, own_groups
from flowgrpo_rc.transfers import to_host
from flowgrpo_rc.writer.config import TRANSFORMERS, VLLM, PromptWriterConfig
from flowgrpo_rc.writer.engine import Sampled, WriterEngine, rounded_digest
from flowgrpo_rc.writer.language import LanguageModel
from flowgrpo_rc.writer.vllm_engine import check_vllm, digest_held

FIELD = "algorithm.prompt_writer.engine.devices"
DIGESTS = {TRANSFORMERS: rounded_digest, VLLM: digest_held}
"""Engine -> its ``digest_of`` without an engine, of the adapter and the configuration."""
MAKES = {
    TRANSFORMERS: "flowgrpo_rc.writer.process:engine_alone",
    VLLM: "flowgrpo_rc.writer.vllm_engine:vllm_engine_alone",
}
"""Engine -> ``module:function`` that makes it in its process, of configuration, device and ``allow_tf32``."""


def check_writer_devices(config: PromptWriterConfig, share: Share) -> None:
    """Check what the engines need before anything is loaded.

    Raises:
        ImportError: they are vllm's, which is not installed.
        ValueError: this process does not see their devices, or there are fewer than processes.
    """
    if config.path is not None and config.engine.name == VLLM:
        check_vllm()
    check_devices(*(device for (device,) in own_groups(config.engine.devices, share, FIELD)), field=FIELD)


def engine_alone(config: PromptWriterConfig, device: str, allow_tf32: bool) -> WriterEngine:
    """The engine in a process without an actor, whose network it takes."""
    set_tf32(allow_tf32)
    # Rounded on the host, so that the device never holds the network in two precisions.
    return WriterEngine(LanguageModel(config, device, dtype=torch_dtype(config.engine.dtype)), alone=True)


class WriterProcesses:
    """A ``SamplesTokens`` of engines in processes, which share out the micro-batches of a call.

    Those of ``transformers`` write, bit for bit, as one engine in the trainer's process does, on the same kind of
    device. A lost engine starts again and repeats its micro-batch; if it is lost again at once, the call raises.

    Args:
        config: the section ``algorithm.prompt_writer``.
        device: the trainer's device, which serves where ``engine.devices`` is null.
        share: which of the trainer processes of this machine this one is.
        allow_tf32: as ``actor_rollout_ref.model.allow_tf32``.

    Raises:
        RolloutError: an engine does not start.
    """

    def __init__(self, config: PromptWriterConfig, device: Any, share: Share, *, allow_tf32: bool) -> None:
        self._config = config
        self._engine = config.engine
        devices = [own for (own,) in own_groups(config.engine.devices, share, FIELD)] or [str(device)]
        numbered = [(share.index + place * share.count, own, *on_one_device(own)) for place, own in enumerate(devices)]
        self._handles = [
            EngineProcess(
                f"prompt writer {number} ({own})",
                MAKES[config.engine.name],
                *(config, inside, allow_tf32),
                environment=environment,
                timeouts=config.engine.process,
            )
            for number, own, inside, environment in numbered
        ]
        # The adapter that was given last, which an engine that starts again gets.
        self._given: tuple[Mapping[str, Tensor], int] | None = None
        self._closed = False
        self._threads = ThreadPoolExecutor(len(self._handles))
        try:
            list(self._threads.map(self._start, self._handles))
        except BaseException:
            self.close()
            raise

    def sync(self, state: Mapping[str, Tensor], version: int) -> str:
        """As ``SamplesTokens.sync``, of all engines.

        Raises:
            RolloutError: an engine is lost, and again after a new start.
            RolloutSyncError: engines hold different adapters.
        """
        dtype = torch_dtype(self._engine.dtype)
        sent = to_host({name: tensor.detach().to(dtype) for name, tensor in state.items()})
        # Copies: pickling a view would send all of its storage.
        self._given = ({name: tensor.clone().contiguous() for name, tensor in sent.items()}, version)
        return _only(list(self._threads.map(self._sync, self._handles)))

    def digest_of(self, state: Mapping[str, Tensor]) -> str:
        """As ``SamplesTokens.digest_of``."""
        return DIGESTS[self._engine.name](state, self._config)

    def sample(self, asked: Sequence[list[int]], seeds: Sequence[int]) -> Sampled:
        """As ``SamplesTokens.sample``; raises as ``sync``."""
        # The micro-batches of one engine alone, so that the same rows are padded together.
        parts = [rows.tolist() for rows in torch.arange(len(asked)).split(self._engine.micro_batch_size)]
        count = len(self._handles)

        def share_of(place: int) -> list[Sampled]:
            return [
                self._call(self._handles[place], "sample", [asked[i] for i in rows], [seeds[i] for i in rows])
                for rows in parts[place::count]
            ]

        shares = list(self._threads.map(share_of, range(count)))
        answers = [shares[part % count][part // count] for part in range(len(parts))]
        return Sampled(
            [row for answer in answers for row in answer.tokens],
            [row for answer in answers for row in answer.log_probs],
            _only([answer.adapter_version for answer in answers]),
            _only([answer.adapter_digest for answer in answers]),
        )

    def close(self) -> None:
        """End the processes."""
        self._closed = True
        with ThreadPoolExecutor(len(self._handles)) as closing:
            list(closing.map(EngineProcess.close, self._handles))
        self._threads.shutdown()

    def _start(self, handle: EngineProcess) -> None:
        try:
            handle.start()
        except RolloutError as error:
            raise RolloutError(f"{handle.name} does not start: {error}") from error

    def _sync(self, handle: EngineProcess) -> str:
        assert self._given is not None
        return self._call(handle, "sync", *self._given)

    def _call(self, handle: EngineProcess, method: str, *arguments: Any) -> Any:
        try:
            try:
                return handle.call(method, *arguments)
            except EngineLostError as error:
                if self._closed:
                    raise
                warnings.warn(f"{handle.name} is started anew: {one_line(error)}", stacklevel=2)
                handle.start()
                if method != "sync" and self._given is not None:
                    handle.call("sync", *self._given)
                return handle.call(method, *arguments)
        except EngineLostError as error:
            raise RolloutError(f"{handle.name}, which was started anew, is lost again: {one_line(error)}") from error
        except (RolloutError, AdapterMismatchError) as error:
            raise type(error)(f"{handle.name}: {error}") from error


def _only(values: Sequence[Any]) -> Any:
    """The value that all engines agree on."""
    if len(set(values)) > 1:
        raise RolloutSyncError(f"engines of the prompt writer hold different adapters: {', '.join(map(str, values))}")
    return values[0]
