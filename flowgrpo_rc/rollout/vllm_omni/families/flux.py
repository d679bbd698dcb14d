"""FLUX.1 and FLUX.1-Kontext in vllm-omni."""

from vllm_omni.diffusion.models.flux import FluxKontextPipeline, FluxPipeline

from flowgrpo_rc.models.flux import Flux, FluxKontext
from flowgrpo_rc.rollout.vllm_omni.pipeline import Rollout


class FluxRollout(Rollout, FluxPipeline):
    """Sampling for ``FluxPipeline``."""

    family = Flux
    text_encoders = ("CLIPTextModel", "T5EncoderModel")


class FluxKontextRollout(Rollout, FluxKontextPipeline):
    """Sampling for ``FluxKontextPipeline``."""

    family = FluxKontext
    text_encoders = ("CLIPTextModel", "T5EncoderModel")
