"""The entry point ``vllm_omni.platform_plugins``: a CPU platform where there is no accelerator."""


def register() -> str | None:
    """The platform class's name, or ``None`` where vllm-omni's own platforms serve."""
    import torch

    if torch.accelerator.is_available():
        return None
    return "flowgrpo_rc.rollout.vllm_omni.platform.CpuOmniPlatform"
