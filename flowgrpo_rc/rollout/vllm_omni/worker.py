"""What the engine's process asks of vllm-omni's worker through ``collective_rpc``."""

from typing import Any

from vllm_omni.diffusion.worker.diffusion_worker import CustomPipelineWorkerExtension

from flowgrpo_rc.rollout.digest import adapter_digest
from flowgrpo_rc.rollout.vllm_omni.adapter import AdapterPush
from flowgrpo_rc.rollout.vllm_omni.lora import held_adapter


class RolloutWorker(CustomPipelineWorkerExtension):
    """Methods that vllm-omni mixes into its worker."""

    model_runner: Any
    lora_manager: Any

    def flowgrpo_prepare(self, vae_dtype: str) -> None:
        """Once, after loading."""
        self.model_runner.pipeline.prepare(vae_dtype, self.lora_manager)

    def flowgrpo_activate(self, request: Any) -> None:
        """Bind an adapter to the layers now: vllm-omni would do it, and find out that it cannot, at the first image."""
        self.lora_manager.set_active_adapter(request, 1.0)

    def flowgrpo_held(self, push: AdapterPush) -> tuple[int | None, str]:
        """Which adapter is active, and the digest of what the layers hold of it."""
        return self.lora_manager._active_adapter_id, adapter_digest(held_adapter(self.lora_manager, push))
