"""The model families by the name of their diffusers pipeline.

To add one, write its adapter, a subclass of ``base.DiffusionModel``, in a file of this folder and add an entry to
``FAMILIES``. Importing this loads neither torch nor diffusers. What vllm-omni calls the same pipeline, for the families
that it can sample, stands with that engine in ``rollout/vllm_omni/protocol.py``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyEntry:
    """What has to be known about a model family before anything of it is loaded."""

    adapter: str
    """Where the adapter's class is, as ``module:class``."""

    guidance_scale_is_cfg: bool = False
    """Whether the pipeline calls the scale of classifier-free guidance ``guidance_scale``, which is ``true_cfg_scale``
    here. The transformer of such a family embeds no guidance."""

    cfg_above_guidance: float = 0.0
    """With ``guidance_scale_is_cfg``, by how much ``true_cfg_scale`` is above that ``guidance_scale``: 1 where the
    pipeline adds ``guidance_scale`` times the difference to the conditional velocity, not to the unconditional one."""

    takes_cfg: bool = True
    """Whether the pipeline knows negative prompts. One whose transformer embeds the guidance may know none."""

    negative_prompt: str = ""
    """What the pipeline steers away from where no negative prompt is given."""

    images: tuple[int, int] = (0, 0)
    """The fewest and the most reference images that a prompt has."""

    dispatches_attention: bool = True
    """Whether the transformer's attention goes through diffusers' dispatcher, so that ``attn_backend`` acts on it."""

    optional_parts: tuple[str, ...] = ()
    """Parts that the pipeline draws without where its index gives them as ``[null, null]``. A tokenizer among them is
    left out only together with its text encoder."""


FAMILIES = {
    "QwenImagePipeline": FamilyEntry(adapter="flowgrpo_rc.models.qwen_image:QwenImage", negative_prompt=" "),
    "QwenImageEditPipeline": FamilyEntry(
        adapter="flowgrpo_rc.models.qwen_image_edit:QwenImageEdit", negative_prompt=" ", images=(1, 1)
    ),
    "QwenImageEditPlusPipeline": FamilyEntry(
        adapter="flowgrpo_rc.models.qwen_image_edit:QwenImageEditPlus", negative_prompt=" ", images=(1, 3)
    ),
    "FluxPipeline": FamilyEntry(adapter="flowgrpo_rc.models.flux:Flux"),
    "FluxKontextPipeline": FamilyEntry(adapter="flowgrpo_rc.models.flux:FluxKontext", images=(1, 1)),
    "Flux2KleinPipeline": FamilyEntry(
        adapter="flowgrpo_rc.models.flux2:Flux2Klein", guidance_scale_is_cfg=True, images=(0, 10)
    ),
    "Flux2Pipeline": FamilyEntry(adapter="flowgrpo_rc.models.flux2:Flux2", takes_cfg=False, images=(0, 10)),
    "StableDiffusion3Pipeline": FamilyEntry(
        adapter="flowgrpo_rc.models.stable_diffusion_3:StableDiffusion3",
        guidance_scale_is_cfg=True,
        dispatches_attention=False,
        # Its T5 is by far its largest part, and the two CLIPs do without it.
        optional_parts=("text_encoder_3", "tokenizer_3"),
    ),
}
"""Class name in a pipeline's ``model_index.json`` -> its family."""
