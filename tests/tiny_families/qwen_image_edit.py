"""The two Qwen-Image pipelines that edit, in miniature, with random weights.

Tokenizer and text encoder are those of the shipped tiny Qwen-Image, whose builder is an example.
"""

import importlib.util
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from unittest import mock

from tiny_families import parts

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny_qwen_image" / "tiny_components.py"
AREA = 64 * 64
"""Pixels of a reference image, in place of the pipelines' 1024 x 1024."""
CHANNELS = 4


@parts.seeded
def build(pipeline="QwenImageEditPlusPipeline", **settings):
    """Like Qwen-Image-Edit-2509, or with the other class like Qwen-Image-Edit; ``settings`` of the transformer."""
    import diffusers

    example = _example()
    processor_class = read_without_torchvision()
    kind = getattr(diffusers, pipeline)
    blank = kind(scheduler=None, vae=None, text_encoder=None, tokenizer=None, processor=None, transformer=None)
    tokenizer = example.make_tokenizer(blank.prompt_template_encode, "the text 42")
    return kind(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=_vae(),
        text_encoder=example.make_text_encoder(tokenizer),
        tokenizer=tokenizer,
        processor=processor_class(_image_processor(), tokenizer, **_video_processor()),
        transformer=diffusers.QwenImageTransformer2DModel(
            patch_size=2,
            in_channels=4 * CHANNELS,
            out_channels=CHANNELS,
            num_layers=2,
            num_attention_heads=2,
            attention_head_dim=16,
            joint_attention_dim=example.TEXT_WIDTH,
            axes_dims_rope=(4, 6, 6),
            **settings,
        ),
    )


def call(prompts, negative, true_cfg_scale, guidance_scale, length, images, size):
    """One prompt with its images."""
    steered = {"negative_prompt": negative[0]} if true_cfg_scale > 1 else {}
    return {
        "prompt": prompts[0],
        "image": images if len(images) > 1 else images[0],
        "true_cfg_scale": true_cfg_scale,
        "max_sequence_length": length,
        **steered,
    }


@contextmanager
def small_references():
    """Within it the pipelines scale reference images for the VAE to ``AREA``, where they have 1024 x 1024 as a
    constant."""
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus

    own = pipeline_qwenimage_edit.calculate_dimensions

    def small(area, ratio):
        assert area == 1024 * 1024
        return own(AREA, ratio)

    with (
        mock.patch.object(pipeline_qwenimage_edit, "calculate_dimensions", small),
        mock.patch.object(pipeline_qwenimage_edit_plus, "VAE_IMAGE_SIZE", AREA),
    ):
        yield


def read_without_torchvision():
    """The class of the pipelines' processor, which stays known by its name to what loads one.

    transformers' own insists on a processor of videos, which torchvision alone gives, and which no pipeline uses.
    """
    import transformers
    from transformers.utils import is_torchvision_available

    if is_torchvision_available() or hasattr(transformers.Qwen2VLProcessor, "without_videos"):
        return transformers.Qwen2VLProcessor

    class Qwen2VLProcessor(transformers.Qwen2VLProcessor):
        without_videos = True

        def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **kwargs):
            super().__init__(image_processor, tokenizer, None, chat_template, **kwargs)

    Qwen2VLProcessor.__module__ = transformers.Qwen2VLProcessor.__module__
    transformers.Qwen2VLProcessor = Qwen2VLProcessor
    return Qwen2VLProcessor


@cache
def _example():
    spec = importlib.util.spec_from_file_location("tiny_components", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _image_processor():
    """Pictures of 28 to 56 pixels to a side: 1 to 4 tokens."""
    from transformers import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=56 * 56)


def _video_processor():
    """The import that the processor's class makes where torchvision is installed."""
    import transformers
    from transformers.utils import is_torchvision_available

    return {"video_processor": transformers.Qwen2VLVideoProcessor()} if is_torchvision_available() else {}


def _vae():
    """4 pixels a latent; untrained, so its last layer is scaled up."""
    from diffusers import AutoencoderKLQwenImage

    vae = AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=CHANNELS,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, False],
        latents_mean=[0.1, -0.2, 0.3, 0.0],
        latents_std=[0.8, 1.1, 0.9, 1.2],
    )
    vae.decoder.conv_out.weight.data *= 4
    return vae
