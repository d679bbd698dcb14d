"""vllm-omni in a process of its own: the engine beside the actor, and the handle of an engine elsewhere.

Imports no vllm.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from accelerate.utils.memory import clear_device_cache
from torch import Tensor

from flowgrpo_rc.models.base import DiffusionModel
from flowgrpo_rc.models.config import ModelConfig
from flowgrpo_rc.models.lora import target_layers
from flowgrpo_rc.rollout.base import EngineLostError, RolloutRequest, Trajectories, rows_of
from flowgrpo_rc.rollout.config import JOINED, EngineTimeouts, RolloutConfig
from flowgrpo_rc.rollout.process import EngineProcess, check_devices, engine_environment
from flowgrpo_rc.rollout.vllm_omni.adapter import digest_rule
from flowgrpo_rc.rollout.vllm_omni.registry import PIPELINES, check_versions
from flowgrpo_rc.transfers import to_host

T = TypeVar("T")
# Settings of torch's allocator for the trainer. vllm's allocator that can sleep refuses expandable segments.
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


class VllmOmniEngine:
    """Samples with the pipeline at ``lora.path`` in a process that runs vllm-omni.

    Digests are of vllm-omni's LoRA layers, read back from their buffers: the adapter in ``config.dtype`` with
    ``lora_alpha / lora_rank`` multiplied into the B matrices.

    A process that dies or hangs is started again once for every call, gets the last adapter and repeats the call. With
    ``config.vllm_omni.sleep`` the weights leave the GPU after every ``generate`` and come back for the next call, which
    reads the adapter back.

    Args:
        config: the section ``actor_rollout_ref.rollout``.
        model: the trainer's model, for names of layers and the way guidance is computed.
        lora: the section ``actor_rollout_ref.model``.
        device: the trainer's; the engine uses the same GPU. Without a trainer beside it, several GPUs may be joined as
            in ``rollout.devices``.

    Raises:
        ImportError, ValueError: see ``VllmOmniHandle``.
        RolloutError: the process does not start.
    """

    def __init__(self, config: RolloutConfig, model: DiffusionModel, lora: ModelConfig, device: Any) -> None:
        devices = str(device).split(JOINED)
        self._handle = VllmOmniHandle(
            config, model, lora, devices, timeouts=config.vllm_omni, subject="the vllm_omni engine's process"
        )
        self._digest_of = digest_rule(config, lora)
        self._sleeps = config.vllm_omni.sleep
        # Bytes of the GPU in use before the last sleep and after.
        self._used = (0, 0)
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
        drawn = self._twice(lambda: self._handle.generate(replace(sent, request_id=request.request_id)))
        if self._sleeps:
            with suppress(EngineLostError):  # the images are there, and the next call starts it again
                self._used = self._handle.call("memory")
        return drawn

    def memory_metrics(self) -> dict[str, float]:
        """GiB of the GPU in use before the engine's last sleep and after; empty if it does not sleep."""
        if not self._sleeps:
            return {}
        awake, asleep = self._used
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


class VllmOmniHandle(EngineProcess):
    """vllm-omni with the pipeline at ``lora.path``, in a process that ``start`` starts and that ends with the trainer.

    Args:
        config: the section ``actor_rollout_ref.rollout``.
        model: the trainer's model, for names of layers and the way guidance is computed.
        lora: the section ``actor_rollout_ref.model``.
        devices: of this engine, as the trainer's process names them. vllm-omni divides each layer over several GPUs.
        number: distinguishes it from the other engines of a pool in messages.
        timeouts: when the process counts as lost; by default ``config.process``.
        subject: how messages about its process begin.

    Raises:
        ImportError: vllm, vllm-omni or diffusers are not of the working set.
        ValueError: vllm-omni cannot draw this pipeline, or not without its missing parts, or gives a layer no adapter
            that ``lora`` has one for; it has no such cache for the pipeline; or a device is not there.
    """

    def __init__(
        self,
        config: RolloutConfig,
        model: DiffusionModel,
        lora: ModelConfig,
        devices: Sequence[str],
        number: int = 0,
        timeouts: EngineTimeouts | None = None,
        subject: str = "its process",
    ) -> None:
        timeouts = timeouts or config.process
        check_versions()
        _check_pipeline(model, lora)
        _check_cache(model, config)
        _check_devices(devices, config.vllm_omni.sleep)
        environment = engine_environment(*devices)
        if config.vllm_omni.sleep:
            # Only for sleep: without it the segments serve vllm as they serve the trainer.
            environment = {name: value for name, value in environment.items() if name not in _ALLOCATOR}
        super().__init__(
            f"vllm_omni {number} ({JOINED.join(devices)})",
            "flowgrpo_rc.rollout.vllm_omni.server:Server",
            *(config, lora, type(model.pipe).__name__, model.batch_guidance, timeouts.start_timeout_s, len(devices)),
            environment=environment,
            timeouts=timeouts,
            subject=subject,
        )


def _check_pipeline(model: DiffusionModel, lora: ModelConfig) -> None:
    """Refuse a pipeline that vllm-omni cannot draw, which it finds out itself after minutes of loading."""
    pipeline = type(model.pipe).__name__
    if pipeline not in PIPELINES:
        raise ValueError(
            f"actor_rollout_ref.rollout.name=vllm_omni draws {', '.join(PIPELINES)} only so far, got {pipeline}; "
            "use rollout.name=diffusers"
        )
    # A text encoder may be missing because the trainer has not loaded it; its tokenizer is always there.
    tokenizers = {name: part for name, part in model.pipe.components.items() if name.startswith("tokenizer")}
    left_out = [name.replace("tokenizer", "text_encoder") for name in tokenizers if tokenizers[name] is None]
    if left_out:
        raise ValueError(
            f"actor_rollout_ref.rollout.name=vllm_omni loads {', '.join(left_out)}, which this model was saved "
            "without; use rollout.name=diffusers, or the whole model"
        )
    patterns = PIPELINES[pipeline].takes_no_adapter
    layers = target_layers(model.transformer, model, lora)
    refused = [name for name in layers if any(fnmatchcase(name, pattern) for pattern in patterns)]
    if refused:
        raise ValueError(
            f"actor_rollout_ref.model.target_modules: {refused[0]} can have no adapter in vllm-omni, as can none of "
            f"{', '.join(patterns)}; leave them out, or use actor_rollout_ref.rollout.name=diffusers"
        )


def _check_cache(model: DiffusionModel, config: RolloutConfig) -> None:
    """Refuse a cache that vllm-omni does not have for this pipeline, or its options."""
    if config.cache.name is None:
        return
    config.cache.checked()
    pipeline = type(model.pipe).__name__
    if PIPELINES[pipeline].tea_cache is None:
        cached = [name for name, entry in PIPELINES.items() if entry.tea_cache is not None]
        raise ValueError(
            f"{config.cache.section}.name: got {config.cache.name}, which vllm-omni has for {', '.join(cached)} but "
            f"not for {pipeline}; set it to null"
        )


def _check_devices(devices: Sequence[str], sleeps: bool) -> None:
    """Refuse devices that are not there, or on which vllm-omni cannot divide a model or sleep."""
    check_devices(*devices)
    named = JOINED.join(devices)
    if len(devices) > 1 and "cpu" in devices:
        raise ValueError(
            f"actor_rollout_ref.rollout.devices: got {named}; vllm-omni divides a model over GPUs alone, so name cpu "
            "by itself"
        )
    if sleeps and not all(device.startswith("cuda") for device in devices):
        raise ValueError(
            f"actor_rollout_ref.rollout.vllm_omni.sleep: got true on {named}; vllm-omni takes the weights from an "
            "NVIDIA GPU alone, so set it to false"
        )
