"""The model families by the name of their diffusers pipeline.

To add one, write its adapter, a subclass of ``base.DiffusionModel``, in a file of this folder and add an entry to
``FAMILIES``. Importing this loads neither torch nor diffusers. ``rollout/vllm_omni/registry.py`` has the
names of the same pipelines in vllm-omni.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyEntry:
    """Facts about a model family that are needed before anything of it is loaded."""

    adapter: str
    """Import path of the adapter, as ``module:class``."""
    guidance_scale_is_cfg: bool = False
    """The pipeline's ``guidance_scale`` is the scale of classifier-free guidance, ``true_cfg_scale`` here. The
    transformer of such a family embeds no guidance."""
    cfg_above_guidance: float = 0.0
    """With ``guidance_scale_is_cfg``, ``true_cfg_scale`` minus that ``guidance_scale``: 1 if the pipeline adds
    ``guidance_scale`` times the difference to the conditional velocity, not to the unconditional one."""
    takes_cfg: bool = True
    """The pipeline takes negative prompts. One whose transformer embeds the guidance may take none."""
    negative_prompt: str = ""
    """Default negative prompt of the pipeline."""
    images: tuple[int, int] = (0, 0)
    """Fewest and most reference images of a prompt."""
    dispatches_attention: bool = True
    """The transformer's attention goes through diffusers' dispatcher, so that ``attn_backend`` acts on it."""
    optional_parts: tuple[str, ...] = ()
    """Parts that may be ``[null, null]`` in the pipeline's index. A tokenizer among them is left out only together with
    its text encoder."""


FAMILIES = {
    "QwenImagePipeline": FamilyEntry(adapter="flowgrpo_rc.models.qwen_image:QwenImage", negative_prompt=" "),
    "QwenImageEditPipeline": FamilyEntry(
        adapter="flowgrpo_rc.models.qwen_image_edit:QwenImageEdit", negative_prompt=" ", images=(1, 1)
    ),
    "QwenImageEditPlusPipeline": FamilyEntry(
        adapter="flowgrpo_rc.models.qwen_image_edit:QwenImageEditPlus", negative_prompt=" ", images=(1, 3)
    ),
    "FluxPipeline": FamilyEntry(adapter="flowgrpo_rc.models.flux:Flux"),
    "Flux2KleinPipeline": FamilyEntry(
        adapter="flowgrpo_rc.models.flux2:Flux2Klein", guidance_scale_is_cfg=True, images=(0, 10)
    ),
    # Its guidance is distilled into the transformer, and its pipeline takes no negative prompt.
    "Flux2Pipeline": FamilyEntry(adapter="flowgrpo_rc.models.flux2:Flux2", takes_cfg=False, images=(0, 10)),
    "FluxKontextPipeline": FamilyEntry(adapter="flowgrpo_rc.models.flux:FluxKontext", images=(1, 1)),
    "ChromaPipeline": FamilyEntry(adapter="flowgrpo_rc.models.chroma:Chroma", guidance_scale_is_cfg=True),
    "BriaPipeline": FamilyEntry(adapter="flowgrpo_rc.models.bria:Bria", guidance_scale_is_cfg=True),
    # Its self-attention is linear attention, which has no other backend.
    "SanaPipeline": FamilyEntry(
        adapter="flowgrpo_rc.models.sana:Sana", guidance_scale_is_cfg=True, dispatches_attention=False
    ),
    "WanPipeline": FamilyEntry(adapter="flowgrpo_rc.models.wan:Wan", guidance_scale_is_cfg=True),
    "StableDiffusion3Pipeline": FamilyEntry(
        adapter="flowgrpo_rc.models.stable_diffusion_3:StableDiffusion3",
        guidance_scale_is_cfg=True,
        dispatches_attention=False,
        # Its T5 is by far its largest part, and the two CLIPs do without it.
        optional_parts=("text_encoder_3", "tokenizer_3"),
    ),
    # Its pipeline computes ``c + s (c - u)``, which is ``u + (s + 1)(c - u)``.
    "ZImagePipeline": FamilyEntry(
        adapter="flowgrpo_rc.models.z_image:ZImage", guidance_scale_is_cfg=True, cfg_above_guidance=1.0
    ),
    "Lumina2Pipeline": FamilyEntry(
        adapter="flowgrpo_rc.models.lumina2:Lumina2", guidance_scale_is_cfg=True, dispatches_attention=False
    ),
    "CogView4Pipeline": FamilyEntry(
        adapter="flowgrpo_rc.models.cogview4:CogView4", guidance_scale_is_cfg=True, dispatches_attention=False
    ),
    "AuraFlowPipeline": FamilyEntry(
        adapter="flowgrpo_rc.models.aura_flow:AuraFlow", guidance_scale_is_cfg=True, dispatches_attention=False
    ),
}
"""Class name in a pipeline's ``model_index.json`` -> its family."""
