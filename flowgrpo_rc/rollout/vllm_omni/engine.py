"""The vllm_omni engine beside the actor; imports no vllm."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from accelerate.utils.memory import clear_device_cache
from torch import Tensor

from flowgrpo_rc.models.base import DiffusionModel
from flowgrpo_rc.models.config import ModelConfig
from flowgrpo_rc.rollout.base import EngineLostError, RolloutRequest, Trajectories, rows_of
from flowgrpo_rc.rollout.config import JOINED, RolloutConfig
from flowgrpo_rc.rollout.vllm_omni.adapter import digest_rule
from flowgrpo_rc.rollout.vllm_omni.handle import VllmOmniHandle
from flowgrpo_rc.transfers import to_host

T = TypeVar("T")


class VllmOmniEngine:
    """Samples with the pipeline at ``lora.path`` in a process that runs vllm-omni.

    Digests are of vllm-omni's LoRA layers, read back from their buffers: the adapter in ``config.dtype`` with
    ``lora_alpha / lora_rank`` multiplied into the B matrices.

    A process that dies or hangs is started again once for every call, gets the last adapter and repeats the call. With
    ``config.vllm_omni.sleep`` the weights leave the GPU after every ``generate`` and come back for the next call, which
    reads the adapter back.

    Args:
        config: the section ``actor_rollout_ref.rollout``.
        model: the trainer's model, for names, shapes and the way guidance is computed.
        lora: the section ``actor_rollout_ref.model``.
        device: the trainer's; the engine uses the same GPU. Without a trainer beside it, several GPUs may be joined as
            in ``rollout.devices``.

    Raises:
        ImportError, ValueError: see ``VllmOmniHandle``.
        RolloutError: the process does not start.
    """

    def __init__(self, config: RolloutConfig, model: DiffusionModel, lora: ModelConfig, device: Any) -> None:
        self._handle = VllmOmniHandle(
            config,
            model,
            lora,
            str(device).split(JOINED),
            config.vllm_omni,
            subject="the vllm_omni engine's process",
        )
        self._digest_of = digest_rule(config, lora)
        self._sleeps = config.vllm_omni.sleep
        self.adapter_version = -1
        self.restarts = 0
        """Number of starts after the first."""
        # The last adapter and its version.
        self._pushed: tuple[dict[str, Tensor], int] | None = None
        self._handle.start()

    @classmethod
    def from_config(
        cls, config: RolloutConfig, model: DiffusionModel, lora: ModelConfig, device: Any
    ) -> "VllmOmniEngine":
        """As every engine's."""
        return cls(config, model, lora, device)

    def sync(self, state: Mapping[str, Tensor], version: int) -> str:
        """Send copies of the adapter; returns the digest of vllm-omni's layers.

        Raises:
            AdapterMismatchError: a tensor does not bind; the engine keeps the adapter before.
            RolloutError: the process is down and does not come back.
        """
        copies = {name: tensor.clone().contiguous() for name, tensor in to_host(state).items()}
        digest = self._twice(lambda: self._handle.sync(copies, version))
        self._pushed = (copies, version)
        self.adapter_version = version
        return digest

    def digest_of(self, state: Mapping[str, Tensor]) -> str:
        """The digest of ``state`` rounded and scaled as ``sync`` leaves it in the engine."""
        return self._digest_of(state)

    def generate(self, request: RolloutRequest) -> Trajectories:
        """Sample every image of the request.

        Raises:
            RolloutError: no adapter was given yet, an image could not be drawn, or the process is down and does not
                come back.
        """
        # Unpickled tensors return to their device, which the engine's process may not see.
        sent = rows_of(request, torch.arange(len(request.prompt_index)))
        return self._twice(lambda: self._handle.generate(replace(sent, request_id=request.request_id)))

    def memory_metrics(self) -> dict[str, float]:
        """GiB of the GPU in use before the engine's last sleep and after; empty if it does not sleep."""
        if not self._sleeps:
            return {}
        awake, asleep = self._twice(lambda: self._handle.call("memory"))
        return {"perf/gpu_used_engine_awake_gb": awake / 2**30, "perf/gpu_used_engine_asleep_gb": asleep / 2**30}

    def close(self) -> None:
        """End the process."""
        self._handle.close()

    @property
    def pid(self) -> int:
        """Of the engine's process."""
        return self._handle.pid

    def _twice(self, call: Callable[[], T]) -> T:
        """The result of the call, at the second attempt if the process is lost in the first."""
        if self._sleeps:
            # Memory that torch caches for this process, before the engine's weights come back to the GPU.
            clear_device_cache()
        try:
            return call()
        except EngineLostError as error:
            warnings.warn(f"{error}; starting it anew", stacklevel=3)
        self.restarts += 1
        self._handle.start()
        if self._pushed is not None:
            # Before the call is repeated: a new process has no adapter, and would refuse to draw.
            self._handle.sync(*self._pushed)
        return call()
