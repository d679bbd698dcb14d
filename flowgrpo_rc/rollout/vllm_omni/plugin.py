"""The entry point ``vllm_omni.platform_plugins``: a CPU platform where there is no accelerator."""


def register() -> str | None:
    """The platform class's name; ``None`` beside an accelerator, for vllm-omni's own platforms."""
    import torch

    if torch.accelerator.is_available():
        return None
    return "flowgrpo_rc.rollout.vllm_omni.platform.CpuOmniPlatform"
