"""Qwen-Image (``QwenImagePipeline``): arithmetic as in diffusers' pipeline, one step at a time."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flowgrpo_rc.models.base import Conditioning, Prompts, Schedule
from flowgrpo_rc.models.single_frame import use_2d_convolutions_for_one_frame


class QwenImage:
    """Adapter of ``diffusers.QwenImagePipeline``. Latents are packed 2x2 patches, ``(tokens, channels)``."""

    default_lora_targets: tuple[str, ...] = (
        "to_q",
        "to_k",
        "to_v",
        "to_out.0",
        "add_q_proj",
        "add_k_proj",
        "add_v_proj",
        "to_add_out",
    )

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe
        use_2d_convolutions_for_one_frame(pipe.vae)

    @property
    def transformer(self) -> Any:
        return self.pipe.transformer

    def check_request(self, height: int, width: int, guidance_scale: float | None) -> None:
        multiple = self.pipe.vae_scale_factor * 2
        if height % multiple or width % multiple:
            raise ValueError(
                f"actor_rollout_ref.rollout.pipeline.height={height}, width={width}: this model draws multiples of "
                f"{multiple} pixels"
            )
        distilled = bool(self.transformer.config.guidance_embeds)
        if distilled != (guidance_scale is not None):
            remedy = "it is guidance-distilled and needs one" if distilled else "it takes none; set it to null"
            raise ValueError(
                f"actor_rollout_ref.rollout.pipeline.guidance_scale: got {guidance_scale} for this model; {remedy}"
            )

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        multiple = self.pipe.vae_scale_factor * 2
        return (height // multiple) * (width // multiple), int(self.transformer.config.in_channels)

    def initial_noise(self, generator: torch.Generator, height: int, width: int) -> Tensor:
        channels = int(self.transformer.config.in_channels) // 4
        latents = self.pipe.prepare_latents(
            1, channels, height, width, torch.float32, torch.device("cpu"), generator, None
        )
        return latents[0]

    def schedule(self, num_inference_steps: int, height: int, width: int) -> Schedule:
        from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift

        scheduler = type(self.pipe.scheduler).from_config(self.pipe.scheduler.config)
        config = scheduler.config
        mu = calculate_shift(
            self.latent_shape(height, width)[0],
            config.get("base_image_seq_len", 256),
            config.get("max_image_seq_len", 4096),
            config.get("base_shift", 0.5),
            config.get("max_shift", 1.15),
        )
        sigmas = np.linspace(1.0, 1 / num_inference_steps, num_inference_steps)
        scheduler.set_timesteps(sigmas=sigmas, mu=mu)
        return Schedule(scheduler.timesteps.float(), scheduler.sigmas.float())

    @torch.no_grad()
    def encode(self, prompts: list[str], max_sequence_length: int) -> list[Tensor]:
        encoder = self.pipe.text_encoder
        embeds, mask = self.pipe.encode_prompt(prompts, device=encoder.device, max_sequence_length=max_sequence_length)
        lengths = [embeds.shape[1]] * len(prompts) if mask is None else mask.sum(1).tolist()
        return [row[: int(n)].cpu() for row, n in zip(embeds, lengths, strict=True)]

    def velocity(
        self, transformer: nn.Module, latents: Tensor, timesteps: Tensor, conditioning: Conditioning
    ) -> Tensor:
        cond = self._forward(transformer, latents, timesteps, conditioning.prompts, conditioning)
        if conditioning.negative is None:
            return cond
        uncond = self._forward(transformer, latents, timesteps, conditioning.negative, conditioning)
        guided = uncond + conditioning.true_cfg_scale * (cond - uncond)
        # The pipeline rescales every token to the length of its conditional prediction.
        return guided * (cond.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True))

    def _forward(
        self,
        transformer: Any,
        latents: Tensor,
        timesteps: Tensor,
        prompts: Prompts,
        conditioning: Conditioning,
    ) -> Tensor:
        inputs = self._inputs(transformer.dtype, latents, timesteps, prompts, conditioning)
        return transformer(**inputs, return_dict=False)[0].float()

    def _inputs(
        self, dtype: torch.dtype, latents: Tensor, timesteps: Tensor, prompts: Prompts, conditioning: Conditioning
    ) -> dict[str, Any]:
        """What a Qwen-Image transformer is called with, whoever built it."""
        multiple = self.pipe.vae_scale_factor * 2
        grid = (1, conditioning.height // multiple, conditioning.width // multiple)
        guidance = None
        if conditioning.guidance_scale is not None:
            guidance = torch.full_like(timesteps, conditioning.guidance_scale)
        return {
            "hidden_states": latents.to(dtype),
            "timestep": timesteps.to(dtype) / 1000,
            "guidance": guidance,
            "encoder_hidden_states": prompts.embeds.to(dtype),
            "encoder_hidden_states_mask": prompts.mask,
            "img_shapes": [[grid]] * len(latents),
        }

    @torch.no_grad()
    def decode(self, latents: Tensor, height: int, width: int) -> Tensor:
        vae = self.pipe.vae
        unpacked = self.pipe._unpack_latents(latents, height, width, self.pipe.vae_scale_factor)
        unpacked = unpacked.to(vae.device, vae.dtype)
        mean, std = (
            torch.tensor(values, device=vae.device, dtype=vae.dtype).view(1, -1, 1, 1, 1)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        image = vae.decode(unpacked * std + mean, return_dict=False)[0][:, :, 0]
        image = (image.float() / 2 + 0.5).clamp(0, 1) * 255
        return image.round().to(torch.uint8).permute(0, 2, 3, 1).cpu()
