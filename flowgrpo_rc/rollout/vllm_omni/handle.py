"""One process that runs vllm-omni, as a ``RolloutHandle``; imports no vllm."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from flowgrpo_rc.models.base import DiffusionModel
from flowgrpo_rc.models.config import ModelConfig
from flowgrpo_rc.models.lora import check_adapter_state, target_layers
from flowgrpo_rc.paths import resolve_asset
from flowgrpo_rc.rollout.base import RolloutRequest, Trajectories, check_has_adapter
from flowgrpo_rc.rollout.config import JOINED, EngineTimeouts, RolloutConfig
from flowgrpo_rc.rollout.process import EngineProcess, check_devices, engine_environment
from flowgrpo_rc.rollout.vllm_omni.adapter import AdapterPush, check_targets, expected_shapes
from flowgrpo_rc.rollout.vllm_omni.plain_torch import with_cause
from flowgrpo_rc.rollout.vllm_omni.registry import PIPELINES
from flowgrpo_rc.rollout.vllm_omni.server import Settings
from flowgrpo_rc.rollout.vllm_omni.versions import check_versions

# Settings of torch's allocator for the trainer. vllm's allocator that can sleep refuses expandable segments.
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


class VllmOmniHandle(EngineProcess):
    """vllm-omni with the pipeline at ``lora.path``, in a process that ``start`` starts and that ends with the trainer.

    Args:
        config: the section ``actor_rollout_ref.rollout``.
        model: the trainer's model, for names, shapes and the way guidance is computed.
        lora: the section ``actor_rollout_ref.model``.
        devices: of this engine, as the trainer's process names them. vllm-omni divides each layer over several GPUs.
        timeouts: when the process counts as lost.
        number: distinguishes it from the other engines of a pool in messages.
        subject: how messages about its process begin.

    Raises:
        ImportError: vllm, vllm-omni or diffusers are not of the working set.
        ValueError: vllm-omni cannot draw this pipeline, or not without its missing parts, or gives a layer no adapter
            that ``lora`` has one for; or a device is not there.
    """

    def __init__(
        self,
        config: RolloutConfig,
        model: DiffusionModel,
        lora: ModelConfig,
        devices: Sequence[str],
        timeouts: EngineTimeouts,
        number: int = 0,
        subject: str = "its process",
    ) -> None:
        check_versions()
        pipeline = type(model.pipe).__name__
        _check_pipeline(pipeline, model)
        # Everything below is checked here, because vllm-omni itself fails after minutes of loading.
        check_targets(target_layers(model.transformer, model, lora), PIPELINES[pipeline].takes_no_adapter)
        check_devices(*devices)
        if len(devices) > 1 and "cpu" in devices:
            raise ValueError(
                f"actor_rollout_ref.rollout.devices: got {JOINED.join(devices)}; vllm-omni divides a model over GPUs "
                "alone, so name cpu by itself"
            )
        environment = engine_environment(*devices)
        if config.vllm_omni.sleep:
            _check_can_sleep(devices)
            # Only for sleep: without it the segments serve vllm as they serve the trainer.
            environment = {name: value for name, value in environment.items() if name not in _ALLOCATOR}
        self.adapter_version = -1
        self._lora = lora
        self.expected = expected_shapes(model, lora)
        """Names and shapes of the adapter's tensors."""
        settings = Settings(
            model=resolve_asset(lora.path),
            pipeline=pipeline,
            vae_dtype=lora.dtype,
            batch_guidance=model.batch_guidance,
            init_timeout_s=timeouts.start_timeout_s,
            tensor_parallel=len(devices),
        )
        super().__init__(
            f"vllm_omni {number} ({JOINED.join(devices)})",
            "flowgrpo_rc.rollout.vllm_omni.server:Server",
            *(config, settings),
            environment=environment,
            timeouts=timeouts,
            subject=subject,
            explain=with_cause,
        )

    @classmethod
    def from_config(
        cls, config: RolloutConfig, model: DiffusionModel, lora: ModelConfig, devices: Sequence[str], number: int
    ) -> "VllmOmniHandle":
        """As ``EngineEntry.handle``."""
        return cls(config, model, lora, devices, config.process, number)

    def start(self) -> None:
        """As ``RolloutHandle.start``; returns when the model is loaded."""
        self.adapter_version = -1
        super().start()

    def sync(self, state: Mapping[str, Tensor], version: int) -> str:
        """As ``RolloutHandle.sync``; the digest is of vllm-omni's layers."""
        check_adapter_state(state, self.expected)
        push = AdapterPush(dict(state), version, self._lora.lora_rank, self._lora.lora_alpha)
        # The version is set after the answer, so that a loss in between leaves the engine without an adapter.
        digest = self.call("sync", push)
        self.adapter_version = version
        return digest

    def generate(self, request: RolloutRequest) -> Trajectories:
        """As ``RolloutHandle.generate``."""
        check_has_adapter(self.adapter_version)
        return self.call("generate", request, self.adapter_version)

    def memory(self) -> tuple[int, int]:
        """Bytes of the GPU in use, by all processes, before the engine's last sleep and after."""
        return self.call("memory")


def _check_can_sleep(devices: Sequence[str]) -> None:
    """Refuse sleep without a GPU."""
    if any(not device.startswith("cuda") for device in devices):
        raise ValueError(
            f"actor_rollout_ref.rollout.vllm_omni.sleep: got true on {JOINED.join(devices)}; vllm-omni takes the "
            "weights from an NVIDIA GPU alone, so set it to false"
        )


def _check_pipeline(pipeline: str, model: DiffusionModel) -> None:
    """Refuse a pipeline that vllm-omni cannot draw, or not without its missing parts."""
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
