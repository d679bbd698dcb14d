"""The pipelines that vllm-omni draws for a rollout, and the versions that do. Importing this loads no vllm.

To add one, write a ``Rollout`` in a file of ``families`` and add an entry to ``PIPELINES``.
"""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

WORKING_SET = "vllm 0.30.*, vllm-omni 0.30.*, diffusers 0.40.*"
_SERIES = {"vllm": "0.30", "vllm-omni": "0.30", "diffusers": "0.40"}


@dataclass(frozen=True, slots=True)
class PipelineEntry:
    """Facts about a pipeline in vllm-omni that are needed before its engine is started."""

    rollout: str
    """``module:class`` of its ``Rollout``; the module imports vllm-omni's pipeline."""
    takes_no_adapter: tuple[str, ...] = ()
    """Patterns of ``fnmatch`` for linear layers, by the trainer's names, that vllm-omni gives no adapter because they
    are not vllm's layers."""
    tea_cache: str | None = None
    """vllm-omni's name of the rules by which TeaCache reads this transformer; ``None`` where it has none."""


_HERE = "flowgrpo_rc.rollout.vllm_omni.families"
_SD3 = ("time_text_embed.*", "norm_out.linear", "*.norm1.linear", "*.norm1_context.linear")
_FLUX = ("time_text_embed.*", "x_embedder", "context_embedder", "proj_out")
_QWEN = "QwenImageTransformer2DModel"
_FLUX2 = ("time_guidance_embed.*", *_FLUX[1:], "norm_out.linear", "*_stream_modulation*.linear")
PIPELINES = {
    "QwenImagePipeline": PipelineEntry(f"{_HERE}.qwen_image:QwenImageRollout", tea_cache=_QWEN),
    "QwenImageEditPipeline": PipelineEntry(f"{_HERE}.qwen_image:QwenImageEditRollout", tea_cache=_QWEN),
    "QwenImageEditPlusPipeline": PipelineEntry(f"{_HERE}.qwen_image:QwenImageEditPlusRollout", tea_cache=_QWEN),
    "StableDiffusion3Pipeline": PipelineEntry(f"{_HERE}.stable_diffusion_3:StableDiffusion3Rollout", _SD3),
    "FluxPipeline": PipelineEntry(f"{_HERE}.flux:FluxRollout", _FLUX, "FluxTransformer2DModel"),
    "FluxKontextPipeline": PipelineEntry(f"{_HERE}.flux:FluxKontextRollout", _FLUX, "FluxTransformer2DModel"),
    "Flux2KleinPipeline": PipelineEntry(f"{_HERE}.flux:Flux2KleinRollout", _FLUX2, "Flux2Klein"),
    "Flux2Pipeline": PipelineEntry(f"{_HERE}.flux:Flux2Rollout", _FLUX2, "Flux2Transformer2DModel"),
    "ZImagePipeline": PipelineEntry(f"{_HERE}.z_image:ZImageRollout", tea_cache="ZImageTransformer2DModel"),
    "WanPipeline": PipelineEntry(f"{_HERE}.wan:WanRollout", ("condition_embedder.*", "proj_out")),
}
"""By class name in a pipeline's ``model_index.json``."""


def check_versions() -> None:
    """Refuse other versions than the working set, without importing the packages.

    Raises:
        ImportError: a package is missing or of another series; names the working set.
    """
    wrong = []
    for package, series in _SERIES.items():
        try:
            found = version(package)
        except PackageNotFoundError:
            wrong.append(f"{package} is not installed")
            continue
        # Patch releases and local builds keep the internals that this package uses.
        if found.split("+")[0].split(".")[:2] != series.split("."):
            wrong.append(f"{package} is {found}")
    if wrong:
        raise ImportError(
            f"actor_rollout_ref.rollout.name=vllm_omni works with {WORKING_SET}; {', '.join(wrong)}. "
            "Without a GPU: scripts/install_vllm_omni_cpu.sh; with one, in a checkout: pip install vllm==0.30.0 "
            "'.[vllm-omni]'"
        )
