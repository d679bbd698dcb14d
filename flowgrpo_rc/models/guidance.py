"""Whether a model takes ``guidance_scale``, told from its folder alone; importing this loads no torch.

Pipelines use the name for two things: the scale that a guidance-distilled transformer embeds, which is what it means
here, and the classifier-free guidance of Stable Diffusion 3, which is ``true_cfg_scale`` here.
"""

import json
from pathlib import Path
from typing import Any

from flowgrpo_rc.models.registry import FAMILIES


def refuse_guidance_scale(
    pipeline_class: str, embeds: bool, guidance_scale: float | None, section: str = "pipeline"
) -> None:
    """Raise unless a model whose transformer ``embeds`` a guidance scale is given one, and any other is not.

    Raises:
        ValueError: names the setting, which is in this ``section`` of ``actor_rollout_ref.rollout``, and what to write.
    """
    if embeds == (guidance_scale is not None):
        return
    here = f"actor_rollout_ref.rollout.{section}.guidance_scale: got {guidance_scale} for this model"
    family = FAMILIES.get(pipeline_class)  # None for one that can only be planned
    if family is not None and family.guidance_scale_is_cfg:
        raise ValueError(
            f"{here}, which embeds none; what its pipeline calls guidance_scale is true_cfg_scale here, so set "
            f"guidance_scale=null and true_cfg_scale={guidance_scale}"
        )
    remedy = "it is guidance-distilled and needs one" if embeds else "it takes none; set it to null"
    raise ValueError(f"{here}; {remedy}")


def embeds_guidance(pipeline_class: str, folder: str) -> bool | None:
    """Whether the transformer in a pipeline's folder embeds a guidance scale; None where its file does not tell."""
    if FAMILIES[pipeline_class].guidance_scale_is_cfg:
        return False
    try:
        config: Any = json.loads((Path(folder) / "transformer" / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # a hub name, or a damaged folder: loading tells
    embeds = config.get("guidance_embeds", False) if isinstance(config, dict) else None
    return embeds if isinstance(embeds, bool) else None
