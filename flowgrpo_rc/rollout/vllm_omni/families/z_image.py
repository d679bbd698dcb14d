"""Z-Image in vllm-omni."""

from contextlib import nullcontext
from functools import partial
from typing import Any

from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.models.z_image.pipeline_z_image import ZImagePipeline
from vllm_omni.diffusion.models.z_image.z_image_transformer import SEQ_MULTI_OF, ZImageTransformer2DModel
from vllm_omni.diffusion.utils.tf_utils import get_transformer_config_kwargs

from flowgrpo_rc.models.z_image import ZImage
from flowgrpo_rc.rollout.vllm_omni.pipeline import Rollout


class VllmZImage(ZImage):
    """Z-Image around vllm-omni's pipeline."""

    def _call(self, transformer: Any, inputs: dict[str, Any]) -> Any:
        # vllm-omni's attention has no mask and rotates a whole batch by the positions of its first row, so the rows of
        # one call must have the same padded length.
        groups: dict[int, list[int]] = {}
        for row, caption in enumerate(inputs["cap_feats"]):
            groups.setdefault(-(-len(caption) // SEQ_MULTI_OF), []).append(row)
        answers: dict[int, Any] = {}
        cached = getattr(transformer, "is_cache_enabled", False)
        for length, rows in groups.items():
            images = [inputs["x"][row] for row in rows]
            captions = [inputs["cap_feats"][row] for row in rows]
            with transformer.cache_context(f"{length} {len(rows)}") if cached else nullcontext():
                answered, _ = transformer(images, inputs["t"][rows], captions)
            answers |= zip(rows, answered, strict=True)
        return [answers[row] for row in range(len(answers))]


class ZImageRollout(Rollout, ZImagePipeline):
    """Sampling for ``ZImagePipeline``."""

    family = VllmZImage
    text_encoders = ("create_transformers_model",)

    def _stand_ins(self, od_config: OmniDiffusionConfig) -> dict[str, Any]:
        # vllm-omni ignores the configuration and builds the transformer in the released size.
        sizes = get_transformer_config_kwargs(od_config.tf_model_config, ZImageTransformer2DModel)
        return super()._stand_ins(od_config) | {"ZImageTransformer2DModel": partial(ZImageTransformer2DModel, **sizes)}
