"""One adapter per model family: prompts in, velocities and images out.

Floor 3. Names load on first use; only ``load_model`` loads diffusers.
"""

from typing import TYPE_CHECKING

from flowgrpo_rc.lazy import lazy_names

if TYPE_CHECKING:
    from flowgrpo_rc.models.base import Conditioning as Conditioning
    from flowgrpo_rc.models.base import DiffusionModel as DiffusionModel
    from flowgrpo_rc.models.base import EncodedPrompt as EncodedPrompt
    from flowgrpo_rc.models.base import NonFiniteImageError as NonFiniteImageError
    from flowgrpo_rc.models.base import Prompts as Prompts
    from flowgrpo_rc.models.base import Schedule as Schedule
    from flowgrpo_rc.models.config import ModelConfig as ModelConfig
    from flowgrpo_rc.models.load import SUPPORTED_PIPELINES as SUPPORTED_PIPELINES
    from flowgrpo_rc.models.load import PipelineLoader as PipelineLoader
    from flowgrpo_rc.models.load import UnsupportedModelError as UnsupportedModelError
    from flowgrpo_rc.models.load import check_pipeline as check_pipeline
    from flowgrpo_rc.models.load import load_model as load_model
    from flowgrpo_rc.models.load import read_pipeline_class as read_pipeline_class
    from flowgrpo_rc.models.lora import AdapterMismatchError as AdapterMismatchError
    from flowgrpo_rc.models.lora import check_adapter_file as check_adapter_file
    from flowgrpo_rc.models.prompt_store import PromptStore as PromptStore
    from flowgrpo_rc.models.prompt_store import PromptStoreError as PromptStoreError
    from flowgrpo_rc.models.prompts import PromptEncoder as PromptEncoder

__getattr__, __dir__ = lazy_names(__name__)
