"""FLUX.2 klein and dev (``Flux2KleinPipeline``, ``Flux2Pipeline``): arithmetic as in diffusers' pipelines."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flowgrpo_rc.models.base import JOINT_ATTENTION, Conditioning, EncodedPrompt
from flowgrpo_rc.models.latents import PackedLatents
from flowgrpo_rc.prompt import Prompt, ReferenceImage, as_prompt, texts
from flowgrpo_rc.quiet import IMPORTS, only_errors

LARGEST_REFERENCE = 1024 * 1024
"""Pixels of a reference image that the pipelines take as it is; they make a larger one smaller."""
MARK = "@"
"""A prompt that occurs in no chat template."""


class Flux2Klein(PackedLatents):
    """Adapter of ``diffusers.Flux2KleinPipeline``. Latents are packed 2x2 patches, ``(tokens, channels)``."""

    default_lora_targets = tuple(f"attn.{layer}" for layer in (*JOINT_ATTENTION, "to_qkv_mlp_proj", "to_out"))
    """The attention; blocks that have one stream for image and prompt compute their feed-forward layer with it."""
    longest_prompt = 512
    masks_prompts = False  # its prompts are padded to one length with embeddings that count
    solver_spaces_levels = True
    text_layers: tuple[int, ...] = (9, 18, 27)
    """The layers of the text encoder whose outputs stand side by side in an embedding."""

    @torch.no_grad()
    def encode(self, prompts: Sequence[str | Prompt], max_sequence_length: int) -> list[EncodedPrompt]:
        embeds, _ = self.pipe.encode_prompt(
            texts(prompts),
            device=self.pipe.text_encoder.device,
            max_sequence_length=max_sequence_length,
            text_encoder_out_layers=self.text_layers,
        )
        references = [self._references(as_prompt(prompt)) for prompt in prompts]
        return [EncodedPrompt(row.cpu(), None, *images) for row, images in zip(embeds, references, strict=True)]

    def _references(self, prompt: Prompt) -> tuple[Tensor | None, tuple[tuple[int, int], ...]]:
        """The packed tokens of a prompt's images, scaled as latents are, with their grids."""
        if not prompt.images:
            return None, ()
        area = prompt.reference_area or LARGEST_REFERENCE
        grids = tuple(self.reference_grid(image, area) for image in prompt.images)
        processor = self.pipe.image_processor
        pixels = []
        for image, (rows, columns) in zip(prompt.images, grids, strict=True):
            picture = processor._resize_if_exceeds_area(image.open(), area)
            size = {"height": rows * self._multiple, "width": columns * self._multiple}
            # Cropped to whole tokens, as in the pipelines, so that the grid is exact.
            pixels.append(processor.preprocess(picture, **size, resize_mode="crop"))
        vae = self.pipe.vae
        tokens, _ = self.pipe.prepare_image_latents(pixels, 1, None, vae.device, vae.dtype)
        return tokens[0].cpu(), grids

    def reference_grid(self, image: ReferenceImage, area: int | None) -> tuple[int, int]:
        """As the pipelines' own, which scale down what is larger than ``area`` and cut off what is no whole token.
        Raises ``ValueError`` for an image smaller or more oblong than the pipelines take it, or an ``area`` without a
        token."""
        area = area or LARGEST_REFERENCE
        here = f"{image.source}: got a reference image of {image.width}x{image.height} pixels"
        short, long = sorted((image.width, image.height))
        if short < 64 or long > 8 * short:
            raise ValueError(f"{here}; this model takes at least 64 to a side and at most 8 times as many to the other")
        # The pipelines never enlarge a reference.
        scale = min(1.0, math.sqrt(area / (short * long)))
        rows, columns = (int(side * scale) // self._multiple for side in (image.height, image.width))
        if not rows * columns:
            raise ValueError(f"{here}, of which reference_area={area} leaves less than a token; set it higher")
        return rows, columns

    def tokenizers(self, max_sequence_length: int) -> list[tuple[Any, int]]:
        """The chat template's tokens before a prompt take room; those behind it are cut off first."""
        tokenizer = self.pipe.tokenizer
        before, _, _ = self._chat(MARK).partition(MARK)
        return [(tokenizer, max_sequence_length - len(tokenizer(before, add_special_tokens=False).input_ids))]

    def _chat(self, prompt: str) -> str:
        """Input text of the text encoder: the chat template with the prompt in it."""
        messages = [{"role": "user", "content": prompt}]
        return self.pipe.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
        )

    def _inputs(self, dtype: torch.dtype, latents: Tensor, timesteps: Tensor, cond: Conditioning) -> dict[str, Any]:
        target = (cond.height // self._multiple, cond.width // self._multiple)
        # The target's time is 0, that of the first reference 10, of the second 20.
        grids = enumerate([target, *cond.prompts.reference_grids])
        device = latents.device
        image = torch.cat([_positions(10 * i, rows, columns, 1, device) for i, (rows, columns) in grids])
        text = _positions(0, 1, 1, cond.prompts.embeds.shape[1], device)
        return {
            "hidden_states": self._with_references(latents, cond.prompts).to(dtype),
            "timestep": timesteps.to(dtype) / 1000,
            "guidance": self._embedded_guidance(timesteps, cond),
            "encoder_hidden_states": cond.prompts.embeds.to(dtype),
            "txt_ids": text.expand(len(latents), -1, -1),
            "img_ids": image.expand(len(latents), -1, -1),
        }

    def _shift(self, config: Any, num_inference_steps: int, tokens: int) -> float:
        with only_errors(IMPORTS):
            from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

        return compute_empirical_mu(tokens, num_inference_steps)

    def _decode(self, latents: Tensor, height: int, width: int) -> Tensor:
        vae = self.pipe.vae
        grid = (height // self._multiple, width // self._multiple)
        mean, std = self._patch_moments()
        packed = latents.to(vae.device, vae.dtype).transpose(1, 2).unflatten(2, grid) * std + mean
        return vae.decode(self.pipe._unpatchify_latents(packed), return_dict=False)[0]

    def _encode_pixels(self, pixels: Tensor) -> Tensor:
        mean, std = self._patch_moments()
        packed = (self.pipe._patchify_latents(self._vae_mode(pixels)) - mean) / std
        return packed.flatten(2).transpose(1, 2)

    def _patch_moments(self) -> tuple[Tensor, Tensor]:
        """The VAE normalises packed latents with the statistics of a batch norm, not with one scale."""
        vae = self.pipe.vae
        mean, std = vae.bn.running_mean, torch.sqrt(vae.bn.running_var + vae.config.batch_norm_eps)
        return mean[:, None, None], std[:, None, None]


class Flux2(Flux2Klein):
    """Adapter of ``diffusers.Flux2Pipeline``, FLUX.2-dev: its transformer embeds the guidance, and its text encoder is
    a Mistral 3, which reads a system message before the prompt."""

    text_layers = (10, 20, 30)

    def _chat(self, prompt: str) -> str:
        with only_errors(IMPORTS):
            from diffusers.pipelines.flux2.pipeline_flux2 import format_input

        (messages,) = format_input([prompt], self.pipe.system_message)
        return self.pipe.tokenizer.apply_chat_template(messages, tokenize=False)


def _positions(time: int, rows: int, columns: int, tokens: int, device: torch.device) -> Tensor:
    """Positions ``(rows * columns * tokens, 4)``: time, row, column, token."""
    # Made on the device: a host tensor would be copied in every forward.
    first = torch.full((1,), time, device=device)
    return torch.cartesian_prod(first, *(torch.arange(n, device=device) for n in (rows, columns, tokens)))
