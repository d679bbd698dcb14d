"""Qwen-Image-Edit (``QwenImageEditPipeline``) and its successors (``QwenImageEditPlusPipeline``): arithmetic as in
diffusers' pipelines, one step at a time."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flowgrpo_rc.models.base import Conditioning, EncodedPrompt
from flowgrpo_rc.models.latents import scaled_size
from flowgrpo_rc.models.qwen_image import QwenImage
from flowgrpo_rc.prompt import Prompt, ReferenceImage, as_prompt

AREA = 1024 * 1024
"""Pixels that both pipelines scale a reference image to for the VAE."""
SHOWN_AREA = 384 * 384
"""Pixels of the image that ``QwenImageEditPlusPipeline`` gives the text encoder."""
MULTIPLE = 32
"""Both pipelines round the sides of reference images to multiples of this."""
TOKEN_AREA = 28 * 28
"""Pixels of one token of the text encoder."""


class QwenImageEdit(QwenImage):
    """Adapter of ``diffusers.QwenImageEditPipeline``, which edits one image; text encoder and VAE get the same picture.

    Prompts are cut to ``max_sequence_length`` tokens besides those of the images, where the pipeline cuts none.
    """

    noise_takes_image = True

    def prompt_tokens(self, max_sequence_length: int) -> int:
        return max_sequence_length + AREA // TOKEN_AREA

    @torch.no_grad()
    def encode(self, prompts: Sequence[str | Prompt], max_sequence_length: int) -> list[EncodedPrompt]:
        # One by one, as their images are numbered through within a call.
        return [self._encode(as_prompt(prompt), max_sequence_length) for prompt in prompts]

    def _encode(self, prompt: Prompt, max_sequence_length: int) -> EncodedPrompt:
        area = prompt.reference_area
        pictures = [image.open() for image in prompt.images]
        shown = []
        tokens = []
        for image, picture in zip(prompt.images, pictures, strict=True):
            width, height = self._shown_size(image, area)
            shown.append(self.pipe.image_processor.resize(picture, height, width))
            tokens.append(self._tokens_of(picture, *self._reference_size(image, area)))
        embeds, _ = self.pipe.encode_prompt(prompt.text, shown or None, device=self.pipe.text_encoder.device)
        # An image ends with a token of its own, so that what follows is cut into the same tokens without it.
        ending = self.pipe.prompt_template_encode.split("{}")[1]
        text = len(self.pipe.tokenizer(prompt.text + ending).input_ids)
        kept = embeds.shape[1] - max(0, text - max_sequence_length)
        grids = tuple(self.reference_grid(image, area) for image in prompt.images)
        return EncodedPrompt(embeds[0, :kept].cpu(), None, torch.cat(tokens).cpu() if tokens else None, grids)

    def _reference_size(self, image: ReferenceImage, area: int | None) -> tuple[int, int]:
        return scaled_size(image, area or AREA, MULTIPLE)

    def _shown_size(self, image: ReferenceImage, area: int | None) -> tuple[int, int]:
        """Width and height of the text encoder's input."""
        return self._reference_size(image, area)

    def _tokens_of(self, picture: Any, width: int, height: int) -> Tensor:
        vae = self.pipe.vae
        pixels = self.pipe.image_processor.preprocess(picture, height, width).unsqueeze(2)
        latents = self.pipe._encode_vae_image(pixels.to(vae.device, vae.dtype), generator=None)
        rows, columns = latents.shape[3:]
        return self.pipe._pack_latents(latents, 1, latents.shape[1], rows, columns)[0]

    def _inputs(self, dtype: torch.dtype, latents: Tensor, timesteps: Tensor, cond: Conditioning) -> dict[str, Any]:
        both = self._with_references(latents, cond.prompts)
        inputs = super()._inputs(dtype, both, timesteps, cond)
        # Every reference is a frame of its own behind the drawing.
        references = [(1, rows, columns) for rows, columns in cond.prompts.reference_grids]
        return inputs | {"img_shapes": [[*shapes, *references] for shapes in inputs["img_shapes"]]}


class QwenImageEditPlus(QwenImageEdit):
    """Adapter of ``diffusers.QwenImageEditPlusPipeline``, which takes several images."""

    def prompt_tokens(self, max_sequence_length: int) -> int:
        return max_sequence_length + SHOWN_AREA // TOKEN_AREA

    def _shown_size(self, image: ReferenceImage, area: int | None) -> tuple[int, int]:
        return scaled_size(image, SHOWN_AREA, MULTIPLE)
