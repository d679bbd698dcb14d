"""Z-Image and Z-Image-Turbo (``ZImagePipeline``): arithmetic as in diffusers' pipeline, step by step."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flowgrpo_rc.models.base import Conditioning
from flowgrpo_rc.models.latents import SpatialLatents

POSITIONS_A_STEP = 32
"""The transformer pads a caption to a multiple of this, with a token that it has learned."""


class ZImage(SpatialLatents):
    """Adapter of ``diffusers.ZImagePipeline``. Latents are ``(channels, H / 8, W / 8)``.

    ``true_cfg_scale`` is one more than what the pipeline calls ``guidance_scale``, which is 0 without guidance; the
    transformer embeds no guidance. The pipeline's ``cfg_normalization`` and ``cfg_truncation`` are as by default: off,
    and at the end of the schedule, so that guidance is plain and acts in every step.
    """

    default_lora_targets = ("attention.to_q", "attention.to_k", "attention.to_v", "attention.to_out.0")
    masks_prompts = True
    text_width = "cap_feat_dim"

    def __init__(self, pipe: Any) -> None:
        super().__init__(pipe)
        # A caption has the positions from 1 on, and the image the one after it.
        room = int(pipe.transformer.config.axes_lens[0]) - 2
        self.longest_prompt = room // POSITIONS_A_STEP * POSITIONS_A_STEP

    def tokenizers(self, max_sequence_length: int) -> list[tuple[Any, int]]:
        """The chat template's tokens count; those before the prompt are never cut off."""
        tokenizer = self.pipe.tokenizer
        template = tokenizer.apply_chat_template(
            [{"role": "user", "content": "{}"}], tokenize=False, add_generation_prompt=True, enable_thinking=True
        )
        # The pipeline truncates the whole template from its end.
        before = len(tokenizer(template.split("{}")[0]).input_ids)
        return [(tokenizer, max_sequence_length - before)]

    def _most_tokens(self) -> Sequence[int]:
        return self.transformer.config.axes_lens[1:]

    def _inputs(self, dtype: torch.dtype, latents: Tensor, timesteps: Tensor, cond: Conditioning) -> dict[str, Any]:
        # The image's positions begin after its own caption, so that a batch's padding must not be among the captions.
        lengths = cond.prompts.lengths or [None] * len(latents)
        captions = zip(cond.prompts.embeds.to(dtype), lengths, strict=True)
        return {
            "x": list(latents.to(dtype).unsqueeze(2)),
            "t": (1000 - timesteps) / 1000,
            "cap_feats": [caption[:length] for caption, length in captions],
        }

    def _velocity_of(self, output: list[Tensor], latents: Tensor) -> Tensor:
        """The transformer's time runs from noise to image, and so does what it answers."""
        return -torch.stack(output).squeeze(2)

    def _schedule_arguments(self, config: Any, num_inference_steps: int, tokens: int) -> dict[str, Any]:
        sigmas = torch.linspace(1.0, 1 / num_inference_steps, num_inference_steps).tolist()
        return {"sigmas": sigmas, "mu": self._dynamic_shift(config, tokens, 1.15)}
