"""What the engine's process is told at its start. Imports no vllm."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """How the engine's process sets itself up."""

    model: str
    """Folder or hub name of the diffusers pipeline."""
    pipeline: str
    """Class of the pipeline, a key of ``PIPELINES``."""
    dtype: str
    """Compute dtype of the transformer and of the adapter."""
    vae_dtype: str
    """Precision in which images are decoded, which is the trainer's."""
    batch_guidance: bool
    """Whether both halves of a guided velocity are one call of the transformer, as in the trainer."""
    max_batch: int
    """Images per forward."""
    attention: str | None
    """vllm-omni's name of the way to compute attention; null leaves the choice to it."""
    init_timeout: float
    """Seconds until vllm-omni gives the loading of the model up."""
    tensor_parallel: int = 1
    """Over how many GPUs each layer is divided."""
    sleep: bool = False
    """Whether the weights leave the GPU after every rollout."""
