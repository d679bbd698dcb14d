"""One adapter per model family: prompts in, velocities and images out.

Floor 3. Names load on first use; only ``load_model`` loads diffusers.
"""

from typing import TYPE_CHECKING

from flowgrpo_rc.lazy import lazy_names

if TYPE_CHECKING:
    from flowgrpo_rc.models.base import (
        Conditioning,
        DiffusionModel,
        EncodedPrompt,
        NonFiniteImageError,
        Prompts,
        Schedule,
    )
    from flowgrpo_rc.models.config import ModelConfig
    from flowgrpo_rc.models.load import (
        SUPPORTED_PIPELINES,
        UnsupportedModelError,
        check_pipeline,
        load_model,
        read_pipeline_class,
    )
    from flowgrpo_rc.models.lora import AdapterMismatchError, check_adapter_file
    from flowgrpo_rc.models.prompts import PromptEncoder

__all__ = [
    "SUPPORTED_PIPELINES",
    "AdapterMismatchError",
    "Conditioning",
    "DiffusionModel",
    "EncodedPrompt",
    "ModelConfig",
    "NonFiniteImageError",
    "PromptEncoder",
    "Prompts",
    "Schedule",
    "UnsupportedModelError",
    "check_adapter_file",
    "check_pipeline",
    "load_model",
    "read_pipeline_class",
]

__getattr__, __dir__ = lazy_names(__name__)
