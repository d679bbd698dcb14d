"""Checks of the guidance scales against a model's folder; importing this loads no torch.

Pipelines use the name ``guidance_scale`` for two things: the scale that a guidance-distilled transformer embeds, which
is what it means here, and classifier-free guidance, which is ``true_cfg_scale`` here.
"""

import json
from pathlib import Path
from typing import Any

from flowgrpo_rc.models.registry import FAMILIES

_ROLLOUT = "actor_rollout_ref.rollout"


def check_guidance(
    pipeline_class: str, folder: str, guidance_scale: float | None, true_cfg_scale: float, section: str = "pipeline"
) -> None:
    """Raise if the model in ``folder`` takes no such guidance; loading repeats the check that its files do not allow.

    Raises:
        ValueError: as ``refuse_guidance_scale`` and ``refuse_true_cfg_scale``.
    """
    # Files may be on the hub only: then loading makes the check.
    embeds = embeds_guidance(pipeline_class, folder)
    if embeds is not None:
        refuse_guidance_scale(pipeline_class, embeds, guidance_scale, section)
    distilled = _read(Path(folder) / "model_index.json").get("is_distilled") is True
    refuse_true_cfg_scale(pipeline_class, distilled, true_cfg_scale, section)


def refuse_guidance_scale(
    pipeline_class: str, embeds: bool, guidance_scale: float | None, section: str = "pipeline"
) -> None:
    """Raise unless the scale is given exactly if the model's transformer ``embeds`` one.

    Raises:
        ValueError: names the setting, which is in this ``section`` of ``actor_rollout_ref.rollout``, and what to write.
    """
    if embeds == (guidance_scale is not None):
        return
    here = f"{_ROLLOUT}.{section}.guidance_scale: got {guidance_scale} for this model"
    family = FAMILIES.get(pipeline_class)  # None for a family that is not of this package
    # The most common mistake: the value of the pipeline's own guidance_scale.
    if family is not None and family.guidance_scale_is_cfg and guidance_scale is not None:
        raise ValueError(
            f"{here}, which embeds none; what its pipeline calls guidance_scale is true_cfg_scale here, so set "
            f"guidance_scale=null and true_cfg_scale={guidance_scale + family.cfg_above_guidance:g}"
        )
    remedy = "it is guidance-distilled and needs one" if embeds else "it takes none; set it to null"
    raise ValueError(f"{here}; {remedy}")


def refuse_true_cfg_scale(
    pipeline_class: str, distilled: bool, true_cfg_scale: float, section: str = "pipeline"
) -> None:
    """Raise if the pipeline would ignore classifier-free guidance.

    Args:
        distilled: the index has ``is_distilled``.

    Raises:
        ValueError: names the setting and what to write.
    """
    family = FAMILIES.get(pipeline_class)
    if true_cfg_scale <= 1 or not (distilled or (family is not None and not family.takes_cfg)):
        return
    why = "is distilled" if distilled else "has the guidance in its transformer (guidance_scale)"
    raise ValueError(
        f"{_ROLLOUT}.{section}.true_cfg_scale: got {true_cfg_scale:g}; this model {why} and its pipeline takes no "
        "classifier-free guidance; set it to 1"
    )


def embeds_guidance(pipeline_class: str, folder: str) -> bool | None:
    """The transformer in a pipeline's folder embeds a guidance scale; ``None`` if its file does not show it."""
    if FAMILIES[pipeline_class].guidance_scale_is_cfg:
        return False
    config = _read(Path(folder) / "transformer" / "config.json")
    # A transformer that is made for embedded guidance alone may say nothing of it.
    embeds = config.get("guidance_embeds", not FAMILIES[pipeline_class].takes_cfg) if config else None
    return embeds if isinstance(embeds, bool) else None


def _read(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty for a hub name or a damaged file, which loading reports."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
