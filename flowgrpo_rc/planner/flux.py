"""FLUX.1, as far as a plan needs it: how diffusers' pipeline calls its transformer and its decoder.

It is no family that trains here (``models.registry.FAMILIES``), so the plan brings this description of its own. It has
the part of ``models.base.DiffusionModel`` that plans read.
"""

from typing import Any

import torch
from torch import Tensor, nn

from flowgrpo_rc.models.base import JOINT_ATTENTION, Conditioning, Prompts

PIPELINE = "FluxPipeline"


class Flux:
    """``diffusers.FluxPipeline``. Latents are packed 2x2 patches, ``(tokens, channels)``."""

    default_lora_targets = JOINT_ATTENTION

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe

    def check_request(self, height: int, width: int, guidance_scale: float | None) -> None:
        """Raise ``ValueError`` for a size that the model cannot draw, or without the guidance that it embeds."""
        if height % self._multiple or width % self._multiple:
            raise ValueError(
                f"actor_rollout_ref.rollout.pipeline.height={height}, width={width}: this model draws multiples of "
                f"{self._multiple} pixels"
            )
        if self.pipe.transformer.config.guidance_embeds and guidance_scale is None:
            raise ValueError(
                "actor_rollout_ref.rollout.pipeline.guidance_scale: got null for this model; it is guidance-distilled "
                "and needs one, e.g. 3.5"
            )

    def latent_shape(self, height: int, width: int) -> tuple[int, int]:
        """Shape of one image's latents, without the batch dimension."""
        return (height // self._multiple) * (width // self._multiple), int(self.pipe.transformer.config.in_channels)

    def prompt_tokens(self, max_sequence_length: int) -> int:
        """The T5's alone: CLIP gives one vector of the whole prompt."""
        return max_sequence_length

    def velocity(
        self, transformer: nn.Module, latents: Tensor, timesteps: Tensor, conditioning: Conditioning
    ) -> Tensor:
        """The flow's velocity with guidance, float32, computed in the transformer's own precision."""
        cond = self._forward(transformer, latents, timesteps, conditioning.prompts, conditioning)
        if conditioning.negative is None:
            return cond
        uncond = self._forward(transformer, latents, timesteps, conditioning.negative, conditioning)
        return uncond + conditioning.true_cfg_scale * (cond - uncond)

    def decode(self, latents: Tensor, height: int, width: int) -> Tensor:
        """Images ``(B, 3, H, W)``, -1 to 1."""
        vae = self.pipe.vae
        unpacked = self.pipe._unpack_latents(latents, height, width, self.pipe.vae_scale_factor).to(vae.dtype)
        return vae.decode(unpacked / vae.config.scaling_factor + vae.config.shift_factor, return_dict=False)[0]

    @property
    def _multiple(self) -> int:
        """Pixels to a side of what becomes one token."""
        return self.pipe.vae_scale_factor * 2

    def _forward(
        self, transformer: Any, latents: Tensor, timesteps: Tensor, prompts: Prompts, conditioning: Conditioning
    ) -> Tensor:
        dtype = transformer.dtype
        assert prompts.pooled is not None
        rows = conditioning.height // self._multiple
        columns = conditioning.width // self._multiple
        guidance = None
        if transformer.config.guidance_embeds:
            guidance = torch.full_like(timesteps, float(conditioning.guidance_scale or 1.0))
        out = transformer(
            hidden_states=latents.to(dtype),
            timestep=timesteps.to(dtype) / 1000,
            guidance=guidance,
            pooled_projections=prompts.pooled.to(dtype),
            encoder_hidden_states=prompts.embeds.to(dtype),
            txt_ids=torch.zeros(prompts.embeds.shape[1], 3, dtype=dtype),
            img_ids=torch.zeros(rows * columns, 3, dtype=dtype),
            return_dict=False,
        )
        return out[0].float()
