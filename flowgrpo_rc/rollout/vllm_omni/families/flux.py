"""FLUX.1 and FLUX.1-Kontext in vllm-omni."""

from vllm_omni.diffusion.models.flux import FluxKontextPipeline, FluxPipeline

from flowgrpo_rc.models.flux import Flux, FluxKontext
from flowgrpo_rc.rollout.vllm_omni.pipeline import Rollout, VllmFamily


class VllmFlux(VllmFamily, Flux):
    """FLUX.1 around vllm-omni's pipeline."""


class FluxRollout(Rollout, FluxPipeline):
    """Sampling for ``FluxPipeline``."""

    family = VllmFlux
    text_encoders = ("CLIPTextModel", "T5EncoderModel")


class VllmFluxKontext(VllmFamily, FluxKontext):
    """FLUX.1-Kontext around vllm-omni's pipeline."""


class FluxKontextRollout(Rollout, FluxKontextPipeline):
    """Sampling for ``FluxKontextPipeline``."""

    family = VllmFluxKontext
    text_encoders = ("CLIPTextModel", "T5EncoderModel")
