"""The model families in miniature: the real classes of diffusers and transformers with random weights.

A family has a module here with its ``build()``, and an entry in ``TINY``. The tests of
``tests/models/test_families.py`` and others then run for it.
"""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from tiny_families import (
    aura_flow,
    bria,
    chroma,
    cogview4,
    flux,
    flux2,
    lumina2,
    parts,
    qwen_image_edit,
    sana,
    stable_diffusion_3,
    wan,
    z_image,
)

PROMPTS = ('the text "42"', "a prompt of a few more words than the others have", "x")
"""Of three lengths."""


@dataclass(frozen=True, kw_only=True)
class TinyFamily:
    """The parts of a family that the tests use."""

    build: Callable[[], Any]
    """The pipeline; a row of a variant gives other arguments to the same builder."""

    call: Callable[..., dict[str, Any]]
    """``call(prompts, negative, true_cfg_scale, guidance_scale, length)``: the pipeline's own arguments; with
    ``images`` also ``images=``, a list of PIL images, those of the one prompt, and ``size=``, height and width."""

    guidances: tuple[tuple[float, float | None], ...] = ((1.0, None), (4.0, None))
    """Pairs of ``true_cfg_scale`` and ``guidance_scale``, the last one the strongest."""

    length: int = 24
    """``max_sequence_length``: longer than some prompts."""

    sizes: tuple[tuple[int, int], ...] = ((32, 32), (32, 48))
    """Heights and widths."""

    images: tuple[tuple[int, int], ...] = ()
    """Widths and heights of each prompt's reference images; the pipeline is then called prompt by prompt."""

    alone: bool = False
    """The pipeline is called prompt by prompt, since a prompt's result depends on the others of its batch."""
    reference_area: int | None = None
    """Pixels that the reference images are scaled to, which ``call`` has the pipeline do too."""

    before_loading: Callable[[], Any] = lambda: None
    """Called in every process that loads the model from its folder."""

    during_call: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Entered while the pipeline draws."""

    idle: tuple[str, ...] = ()
    """Endings of the names of LoRA layers that act on nothing, such as the last block's queries of the text."""

    refused: tuple[tuple[dict[str, Any], str], ...] = ()
    """Arguments of ``check_request`` besides a size of 32, and what the refusal says."""


VARIANTS = {
    "flux_schnell": "flux_dev",
    "flux2_klein_references": "flux2_klein",
    "flux2_dev": "flux2_klein",
    "flux2_dev_reference": "flux2_klein",
    "qwen_image_edit": "qwen_image_edit_plus",
    "qwen_image_edit_plus_2511": "qwen_image_edit_plus",
    "bria_static": "bria",
    "sana_with_variance": "sana",
    "wan_ti2v": "wan",
}
"""Families whose blocks are those of another one."""


def run_overrides(name: str, path: str, folder: Path) -> list[str]:
    """A run of the family's model at ``path`` in float32, guided; the prompts of one with images go to ``folder`` where
    it is not there."""
    family = TINY[name]
    family.before_loading()
    scale, embedded = family.guidances[-1]
    height, width = family.sizes[0]
    rollout = "actor_rollout_ref.rollout"
    overrides = [
        f"actor_rollout_ref.model.path={path}",
        f"{rollout}.dtype=float32",
        f"{rollout}.pipeline.height={height}",
        f"{rollout}.pipeline.width={width}",
        f"{rollout}.pipeline.max_sequence_length={family.length}",
        f"{rollout}.pipeline.true_cfg_scale={scale}",
        f"{rollout}.pipeline.guidance_scale={'null' if embedded is None else embedded}",
    ]
    if not family.images:
        return overrides
    if not folder.exists():  # one process has written them for all
        _write_prompts(family, folder)
    if family.reference_area is not None:
        overrides.append(f"{rollout}.pipeline.reference_area={family.reference_area}")
    return [*overrides, *(f"data.{part}_files={folder / 'prompts.jsonl'}" for part in ("train", "val"))]


def _write_prompts(family: TinyFamily, folder: Path) -> None:
    folder.mkdir(parents=True)
    lines = []
    for i in range(8):
        names = [f"{i}_{k}.png" for k in range(len(family.images))]
        for k, (file, size) in enumerate(zip(names, family.images, strict=True)):
            Image.new("RGB", size, (20 * i, 60 * k, 120)).save(folder / file)
        lines.append(json.dumps({"prompt": f'the text "{i}{i}"', "images": names}))
    (folder / "prompts.jsonl").write_text("\n".join(lines))


def _sd3_call(prompts, negative, true_cfg_scale, guidance_scale, length):
    return {"prompt": prompts, "guidance_scale": true_cfg_scale, "max_sequence_length": length}


_EDIT = {
    "call": qwen_image_edit.call,
    "length": 128,
    "images": ((50, 70),),
    "reference_area": qwen_image_edit.AREA,
    "before_loading": qwen_image_edit.read_without_torchvision,
    "during_call": qwen_image_edit.small_references,
    "idle": ("transformer_blocks.1.attn.add_q_proj", "transformer_blocks.1.attn.to_add_out"),
}


def _guided_by_cfg(multiple=8, above=0.0, most=None):
    """Refusals of a size, and of a guidance scale, by a family whose pipeline calls that of CFG ``guidance_scale``."""
    size = {"height": 32 + multiple // 2}
    return (
        (size, f"height={32 + multiple // 2}, width=32: this model draws multiples of {multiple} pixels"),
        ({"guidance_scale": 4.5}, f"set guidance_scale=null and true_cfg_scale={4.5 + above}"),
        *([({"width": most + multiple}, f"this model has positions for at most {most}x{most} pixels")] if most else []),
    )


_DISTILLED = {"guidances": ((1.0, 1.0), (1.0, 4.0)), "length": 64}

TINY: dict[str, TinyFamily] = {
    "stable_diffusion_3": TinyFamily(
        build=stable_diffusion_3.build,
        call=_sd3_call,
        guidances=((1.0, None), (4.5, None)),
        idle=("transformer_blocks.2.attn.add_q_proj",),
        refused=_guided_by_cfg(),
    ),
    "flux_dev": TinyFamily(
        build=flux.build,
        call=flux.call,
        guidances=((1.0, 3.5), (4.0, 1.0)),
        refused=(
            ({"height": 36, "guidance_scale": 3.5}, "this model draws multiples of 8 pixels"),
            (
                {"guidance_scale": None},
                "it is guidance-distilled and needs one; its pipeline's own is guidance_scale=3.5",
            ),
        ),
    ),
    "flux_schnell": TinyFamily(
        build=lambda: flux.build(guidance_embeds=False, dynamic=False),
        call=flux.call,
        refused=(({"guidance_scale": 3.5}, "guidance_scale: got 3.5 for this model; it takes none; set it to null"),),
    ),
    "z_image": TinyFamily(build=z_image.build, call=z_image.call, length=96, refused=_guided_by_cfg(above=1, most=64)),
    "lumina2": TinyFamily(
        build=lumina2.build, call=parts.call, length=80, refused=_guided_by_cfg(multiple=16, most=128)
    ),
    "cogview4": TinyFamily(build=cogview4.build, call=parts.call, length=48, alone=True, refused=_guided_by_cfg()),
    "aura_flow": TinyFamily(build=aura_flow.build, call=parts.call, refused=_guided_by_cfg(most=64)),
    "flux2_klein": TinyFamily(
        build=flux2.build_klein, call=flux2.klein_call, length=64, refused=_guided_by_cfg(multiple=4)
    ),
    "flux2_klein_references": TinyFamily(
        build=flux2.build_klein, call=flux2.klein_call, length=64, images=((64, 96), (82, 70))
    ),
    "flux2_dev": TinyFamily(
        build=flux2.build_dev,
        call=flux2.dev_call,
        **_DISTILLED,
        refused=(
            ({"guidance_scale": None}, "guidance_scale: got None for this model; it is guidance-distilled"),
            ({"true_cfg_scale": 4.0}, "true_cfg_scale: got 4; this model has the guidance in its transformer"),
        ),
    ),
    "flux2_dev_reference": TinyFamily(build=flux2.build_dev, call=flux2.dev_call, images=((64, 96),), **_DISTILLED),
    "qwen_image_edit": TinyFamily(
        build=lambda: qwen_image_edit.build("QwenImageEditPipeline"), **_EDIT | {"images": ((60, 40),)}
    ),
    "qwen_image_edit_plus": TinyFamily(build=qwen_image_edit.build, **_EDIT),
    "qwen_image_edit_plus_2511": TinyFamily(
        build=lambda: qwen_image_edit.build(zero_cond_t=True), **_EDIT | {"images": ((60, 40), (30, 50))}
    ),
    "flux_kontext": TinyFamily(
        build=lambda: flux.build(pipeline="FluxKontextPipeline"),
        call=flux.call_kontext,
        guidances=((1.0, 3.5), (4.0, 1.0)),
        images=((60, 40),),
        reference_area=32 * 32,
    ),
    "chroma": TinyFamily(build=chroma.build, call=parts.call, refused=_guided_by_cfg()),
    "bria": TinyFamily(build=bria.build, call=parts.call, refused=_guided_by_cfg()),
    "bria_static": TinyFamily(
        build=lambda: bria.build(dynamic=False, shift_factor=None), call=parts.call, refused=_guided_by_cfg()
    ),
    "sana": TinyFamily(
        build=sana.build,
        call=sana.call,
        sizes=((64, 64), (32, 96)),
        refused=_guided_by_cfg(multiple=32),
    ),
    "sana_with_variance": TinyFamily(
        build=lambda: sana.build(out_channels=2 * sana.CHANNELS), call=sana.call, sizes=((64, 64), (32, 96))
    ),
    "wan": TinyFamily(build=wan.build, call=wan.call, refused=_guided_by_cfg()),
    "wan_ti2v": TinyFamily(
        build=lambda: wan.build(expand_timesteps=True),
        call=wan.call,
        refused=_guided_by_cfg(multiple=16),
    ),
}
"""By the names of the tests."""
