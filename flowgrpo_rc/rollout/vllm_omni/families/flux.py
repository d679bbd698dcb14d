"""FLUX.1, FLUX.1-Kontext, and FLUX.2 klein and dev in vllm-omni."""

from vllm_omni.diffusion.models.flux import FluxKontextPipeline, FluxPipeline
from vllm_omni.diffusion.models.flux2 import Flux2Pipeline
from vllm_omni.diffusion.models.flux2_klein import Flux2KleinPipeline

from flowgrpo_rc.models.flux import Flux, FluxKontext
from flowgrpo_rc.models.flux2 import Flux2, Flux2Klein
from flowgrpo_rc.rollout.vllm_omni.pipeline import Rollout


class FluxRollout(Rollout, FluxPipeline):
    """Sampling for ``FluxPipeline``."""

    family = Flux
    text_encoders = ("CLIPTextModel", "T5EncoderModel")


class FluxKontextRollout(Rollout, FluxKontextPipeline):
    """Sampling for ``FluxKontextPipeline``."""

    family = FluxKontext
    text_encoders = ("CLIPTextModel", "T5EncoderModel")


class Flux2KleinRollout(Rollout, Flux2KleinPipeline):
    """Sampling for ``Flux2KleinPipeline``."""

    family = Flux2Klein
    text_encoders = ("Qwen3ForCausalLM",)


class Flux2Rollout(Rollout, Flux2Pipeline):
    """Sampling for ``Flux2Pipeline``."""

    family = Flux2
    text_encoders = ("MistralEncoderModel", "PixtralProcessor")
