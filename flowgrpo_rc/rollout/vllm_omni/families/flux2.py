"""FLUX.2 klein and dev in vllm-omni."""

from vllm_omni.diffusion.models.flux2 import Flux2Pipeline
from vllm_omni.diffusion.models.flux2_klein import Flux2KleinPipeline

from flowgrpo_rc.models.flux2 import Flux2, Flux2Klein
from flowgrpo_rc.rollout.vllm_omni.pipeline import Rollout, VllmFamily


class VllmFlux2Klein(VllmFamily, Flux2Klein):
    """FLUX.2 klein around vllm-omni's pipeline."""


class Flux2KleinRollout(Rollout, Flux2KleinPipeline):
    """Sampling for ``Flux2KleinPipeline``."""

    family = VllmFlux2Klein
    text_encoders = ("Qwen3ForCausalLM",)


class VllmFlux2(VllmFamily, Flux2):
    """FLUX.2-dev around vllm-omni's pipeline."""


class Flux2Rollout(Rollout, Flux2Pipeline):
    """Sampling for ``Flux2Pipeline``."""

    family = VllmFlux2
    text_encoders = ("MistralEncoderModel", "PixtralProcessor")
