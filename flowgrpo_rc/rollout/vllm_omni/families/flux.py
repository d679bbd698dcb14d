"""FLUX.1 in vllm-omni."""

from vllm_omni.diffusion.models.flux import FluxPipeline

from flowgrpo_rc.models.flux import Flux
from flowgrpo_rc.rollout.vllm_omni.pipeline import Rollout, VllmFamily


class VllmFlux(VllmFamily, Flux):
    """FLUX.1 around vllm-omni's pipeline."""


class FluxRollout(Rollout, FluxPipeline):
    """Sampling for ``FluxPipeline``."""

    family = VllmFlux
    text_encoders = ("CLIPTextModel", "T5EncoderModel")
