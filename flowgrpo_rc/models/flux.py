"""FLUX.1 (``FluxPipeline``, dev and schnell) and its editor (``FluxKontextPipeline``): arithmetic as in diffusers'
pipelines, one step at a time."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flowgrpo_rc.models.base import JOINT_ATTENTION, Conditioning, EncodedPrompt
from flowgrpo_rc.models.latents import PackedLatents, scaled_size
from flowgrpo_rc.prompt import Prompt, ReferenceImage, as_prompt, texts


class Flux(PackedLatents):
    """Adapter of ``diffusers.FluxPipeline``. Latents are packed 2x2 patches, ``(tokens, channels)``.

    The dev checkpoint is guidance-distilled: its transformer takes ``guidance_scale``. Classifier-free guidance is
    possible besides.
    """

    default_lora_targets = tuple(f"attn.{layer}" for layer in JOINT_ATTENTION)
    longest_prompt = 512
    masks_prompts = False  # its prompts are padded to one length with embeddings that count
    solver_spaces_levels = True

    @torch.no_grad()
    def encode(self, prompts: Sequence[str | Prompt], max_sequence_length: int) -> list[EncodedPrompt]:
        # The third result are text positions, which ``_inputs`` makes for every length.
        embeds, pooled, _ = self.pipe.encode_prompt(
            texts(prompts), None, device=self.pipe.text_encoder_2.device, max_sequence_length=max_sequence_length
        )
        return [EncodedPrompt(row.cpu(), vector.cpu()) for row, vector in zip(embeds, pooled, strict=True)]

    def tokenizers(self, max_sequence_length: int) -> list[tuple[Any, int]]:
        """The CLIP adds a token before the prompt and one after it, the T5 one after it."""
        clip = int(self.pipe.tokenizer_max_length) - 2
        return [(self.pipe.tokenizer, clip), (self.pipe.tokenizer_2, max_sequence_length - 1)]

    def _inputs(self, dtype: torch.dtype, latents: Tensor, timesteps: Tensor, cond: Conditioning) -> dict[str, Any]:
        assert cond.prompts.pooled is not None
        return self._tokens_and_places(dtype, latents, cond) | {
            "timestep": timesteps.to(dtype) / 1000,
            "guidance": self._embedded_guidance(timesteps, cond),
            "pooled_projections": cond.prompts.pooled.to(dtype),
        }

    def _tokens_and_places(self, dtype: torch.dtype, latents: Tensor, cond: Conditioning) -> dict[str, Any]:
        rows = cond.height // self._multiple
        columns = cond.width // self._multiple
        return {
            "hidden_states": latents.to(dtype),
            "encoder_hidden_states": cond.prompts.embeds.to(dtype),
            # Text has no place in the image: its positions are 0 on all three axes.
            "txt_ids": torch.zeros(cond.prompts.embeds.shape[1], 3, device=latents.device),
            "img_ids": grid_positions(0, rows, columns, latents.device),
        }

    def _decode(self, latents: Tensor, height: int, width: int) -> Tensor:
        unpacked = self.pipe._unpack_latents(latents, height, width, self.pipe.vae_scale_factor)
        return self._decode_scaled_and_shifted(unpacked)

    def _encode_pixels(self, pixels: Tensor) -> Tensor:
        return self._pack(self._encode_scaled_and_shifted(pixels))


class FluxKontext(Flux):
    """Adapter of ``diffusers.FluxKontextPipeline``, which edits one image."""

    noise_takes_image = True
    solver_spaces_levels = False

    @torch.no_grad()
    def encode(self, prompts: Sequence[str | Prompt], max_sequence_length: int) -> list[EncodedPrompt]:
        encoded = super().encode(prompts, max_sequence_length)
        return [self._followed_by_images(row, as_prompt(p)) for row, p in zip(encoded, prompts, strict=True)]

    def _followed_by_images(self, encoded: EncodedPrompt, prompt: Prompt) -> EncodedPrompt:
        if not prompt.images:
            return encoded
        area = prompt.reference_area
        tokens = [self._tokens_of(image, *self._reference_size(image, area)) for image in prompt.images]
        grids = tuple(self.reference_grid(image, area) for image in prompt.images)
        return replace(encoded, references=torch.cat(tokens).cpu(), reference_grids=grids)

    def _reference_size(self, image: ReferenceImage, area: int | None) -> tuple[int, int]:
        # The nearest trained resolution in shape counts, for the pipeline's own area only.
        if area is not None:
            return scaled_size(image, area, self._multiple)
        from diffusers.pipelines.flux.pipeline_flux_kontext import PREFERRED_KONTEXT_RESOLUTIONS

        ratio = image.width / image.height
        _, width, height = min((abs(ratio - w / h), w, h) for w, h in PREFERRED_KONTEXT_RESOLUTIONS)
        return width // self._multiple * self._multiple, height // self._multiple * self._multiple

    def _tokens_of(self, image: ReferenceImage, width: int, height: int) -> Tensor:
        vae = self.pipe.vae
        pixels = self.pipe.image_processor.preprocess(image.open(), height, width).to(vae.device, vae.dtype)
        latents = self.pipe._encode_vae_image(pixels, generator=None)
        return self.pipe._pack_latents(latents, 1, *latents.shape[1:])[0]

    def _inputs(self, dtype: torch.dtype, latents: Tensor, timesteps: Tensor, cond: Conditioning) -> dict[str, Any]:
        both = self._with_references(latents, cond.prompts)
        inputs = super()._inputs(dtype, both, timesteps, cond)
        # On the first axis reference tokens have position 1, the drawing's 0.
        places = [grid_positions(1, *grid, latents.device) for grid in cond.prompts.reference_grids]
        return inputs | {"img_ids": torch.cat([inputs["img_ids"], *places])}


def grid_positions(first: int, rows: int, columns: int, device: torch.device) -> Tensor:
    """Positions ``(rows * columns, 3)`` of an image's tokens: ``first``, row, column."""
    # Made on the device: a host tensor would be copied in every forward.
    sides = (torch.arange(number, device=device) for number in (rows, columns))
    grid = torch.meshgrid(*sides, indexing="ij")
    places = [torch.full((rows, columns), float(first), device=device), *grid]
    return torch.stack([place.flatten().float() for place in places], 1)
