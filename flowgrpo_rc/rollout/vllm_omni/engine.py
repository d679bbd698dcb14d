"""The trainer's side of the vllm_omni engine; imports no vllm."""

import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import torch
from accelerate.utils.memory import clear_device_cache
from torch import Tensor

from flowgrpo_rc.dtypes import torch_dtype
from flowgrpo_rc.models.base import DiffusionModel
from flowgrpo_rc.models.config import ModelConfig
from flowgrpo_rc.models.lora import check_adapter_state
from flowgrpo_rc.rollout.base import (
    EngineLostError,
    RolloutError,
    RolloutRequest,
    Trajectories,
    check_has_adapter,
)
from flowgrpo_rc.rollout.config import RolloutConfig, VllmOmniConfig
from flowgrpo_rc.rollout.digest import adapter_digest
from flowgrpo_rc.rollout.placement import JOINED
from flowgrpo_rc.rollout.vllm_omni.adapter import as_held
from flowgrpo_rc.rollout.vllm_omni.handle import VllmOmniHandle
from flowgrpo_rc.transfers import to_host

T = TypeVar("T")


class VllmOmniEngine:
    """Samples in a process of its own that runs vllm-omni with the pipeline at ``lora.path``.

    The digests of this engine are those of vllm-omni's LoRA layers, read back from their buffers: the adapter in
    ``dtype`` with ``lora_alpha / lora_rank`` multiplied into the B matrices.

    A process that dies or hangs is started anew once for every call, gets the last adapter again and repeats the call.

    Args:
        model: the trainer's model; tells names, shapes and how guidance is computed.
        lora: the section ``actor_rollout_ref.model``.
        dtype: of vllm-omni's transformer and adapter.
        micro_batch_size: images per forward, vllm-omni's ``max_num_seqs``.
        device: the trainer's; the engine takes the same GPU. Without a trainer beside it, several GPUs joined as in
            ``rollout.devices`` are one engine's.
        timeouts: when to give the process up, the section ``actor_rollout_ref.rollout.vllm_omni``. With its ``sleep``
            the weights leave the GPU after every ``generate`` and come back for the next call; the adapter is read back
            then.
        attn_backend: vllm-omni's name of the way to compute attention; ``None`` leaves the choice to it.

    Raises:
        ImportError, ValueError: see ``VllmOmniHandle``.
        RolloutError: the process does not start.
    """

    def __init__(
        self,
        model: DiffusionModel,
        lora: ModelConfig,
        *,
        dtype: torch.dtype,
        micro_batch_size: int,
        device: Any,
        timeouts: VllmOmniConfig | None = None,
        attn_backend: str | None = None,
    ) -> None:
        timeouts = VllmOmniConfig() if timeouts is None else timeouts
        self._handle = VllmOmniHandle(
            model,
            lora,
            dtype=dtype,
            micro_batch_size=micro_batch_size,
            devices=str(device).split(JOINED),
            timeouts=timeouts,
            attn_backend=attn_backend,
            sleep=timeouts.sleep,
            subject="the vllm_omni engine's process",
        )
        self._lora = lora
        self._dtype = dtype
        self._sleeps = timeouts.sleep
        self._used = (0, 0)
        """Bytes of the GPU in use before the last sleep and after."""
        self.adapter_version = -1
        self.restarts = 0
        """How often the process has been started anew."""
        self._pushed: tuple[dict[str, Tensor], int, str] | None = None
        """The last adapter, its version and its digest."""
        self._handle.start()

    @classmethod
    def from_config(
        cls, config: RolloutConfig, model: DiffusionModel, lora: ModelConfig, device: Any
    ) -> "VllmOmniEngine":
        """The engine that the section ``actor_rollout_ref.rollout`` describes."""
        return cls(
            model,
            lora,
            dtype=torch_dtype(config.dtype),
            micro_batch_size=config.micro_batch_size,
            device=device,
            timeouts=config.vllm_omni,
            attn_backend=config.rollout_attn_backend,
        )

    def sync(self, state: Mapping[str, Tensor], version: int) -> str:
        """Send copies of the adapter; returns the digest of what vllm-omni's layers then hold.

        Raises:
            AdapterMismatchError: some tensor does not bind; the engine keeps what it had.
            RolloutError: the process is down and does not come back.
        """
        # Before anything is copied and sent.
        check_adapter_state(state, self._handle.expected)
        copies = {name: tensor.clone().contiguous() for name, tensor in to_host(state).items()}
        self._make_room()
        # A new process needs no other adapter before this one.
        self._pushed, before = None, self._pushed
        try:
            digest = self._twice(lambda: self._handle.sync(copies, version))
        except BaseException:
            self._pushed = before
            raise
        self._pushed = (copies, version, digest)
        self.adapter_version = version
        return digest

    def digest_of(self, state: Mapping[str, Tensor]) -> str:
        """The digest of ``state`` rounded and scaled as ``sync`` leaves it in the engine."""
        return adapter_digest(as_held(state, self._dtype, self._lora.lora_alpha / self._lora.lora_rank))

    def generate(self, request: RolloutRequest) -> Trajectories:
        """Sample every image of the request.

        Raises:
            RolloutError: no adapter has been synchronised yet, an image could not be drawn, or the process is down
                and does not come back.
        """
        check_has_adapter(self.adapter_version)
        self._make_room()
        sent = _on_host(request)
        drawn = self._twice(lambda: self._handle.generate(sent))
        if self._sleeps:
            with suppress(EngineLostError):  # the next call starts it anew, and the images are there
                self._used = self._handle.memory()
        return drawn

    def memory_metrics(self) -> dict[str, float]:
        """How much of the GPU was in use, in GiB, before the engine slept last and after; nothing where it does not
        sleep."""
        if not self._sleeps:
            return {}
        awake, asleep = self._used
        return {"perf/gpu_used_engine_awake_gb": awake / 2**30, "perf/gpu_used_engine_asleep_gb": asleep / 2**30}

    def close(self) -> None:
        """End the process."""
        self._handle.close()

    @property
    def pid(self) -> int:
        """The engine's process."""
        return self._handle.process.pid

    def _make_room(self) -> None:
        """Give the GPU back what torch keeps of it for this process, before the engine's weights return to it."""
        if self._sleeps:
            clear_device_cache()

    def _twice(self, call: Callable[[], T]) -> T:
        """What the call returns, at the second attempt where the process is lost in the first."""
        try:
            return call()
        except EngineLostError as error:
            warnings.warn(f"{error}; starting it anew", stacklevel=3)
        self.restarts += 1
        self._handle.start()
        if self._pushed is not None:
            state, version, digest = self._pushed
            again = self._handle.sync(state, version)
            if again != digest:
                raise RolloutError(
                    f"the restarted engine holds adapter version {version} with digest {again[:16]}, not {digest[:16]}"
                )
        return call()


def _on_host(request: RolloutRequest) -> RolloutRequest:
    """The request with tensors of their own on the host, ready to be pickled; the images come back all at once."""
    every_prompt = torch.arange(len(request.conditioning.prompts.embeds))
    starts = request.window_starts
    return replace(
        request,
        conditioning=request.conditioning.rows(every_prompt, torch.device("cpu")),
        prompt_index=request.prompt_index.to("cpu", copy=True),
        window_starts=None if starts is None else starts.to("cpu", copy=True),
        on_images=None,
    )
