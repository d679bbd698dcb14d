"""Qwen-Image (``QwenImagePipeline``): arithmetic as in diffusers' pipeline, one step at a time."""

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowgrpo_rc.models.base import JOINT_ATTENTION, Conditioning, EncodedPrompt
from flowgrpo_rc.models.latents import PackedLatents
from flowgrpo_rc.prompt import Prompt, texts


class QwenImage(PackedLatents):
    """Adapter of ``diffusers.QwenImagePipeline``. Latents are packed 2x2 patches, ``(tokens, channels)``."""

    default_lora_targets = JOINT_ATTENTION
    longest_prompt = 1024
    masks_prompts = True
    keeps_conditional_norm = True
    # vllm-omni's guide to fp8 names them as sensitive: the range of the image's latents moves with the noise level.
    keeps_unrounded = ("img_mlp",)

    def __init__(self, pipe: Any) -> None:
        super().__init__(pipe)
        use_2d_convolutions_for_one_frame(pipe.vae)
        _leave_lengths_out()

    @torch.no_grad()
    def encode(self, prompts: Sequence[str | Prompt], max_sequence_length: int) -> list[EncodedPrompt]:
        encoder = self.pipe.text_encoder
        embeds, mask = self.pipe.encode_prompt(
            texts(prompts), device=encoder.device, max_sequence_length=max_sequence_length
        )
        # The pipeline returns no mask if all prompts have one length.
        lengths = [embeds.shape[1]] * len(prompts) if mask is None else mask.sum(1).tolist()
        return [EncodedPrompt(row[: int(n)].cpu()) for row, n in zip(embeds, lengths, strict=True)]

    def _inputs(self, dtype: torch.dtype, latents: Tensor, timesteps: Tensor, cond: Conditioning) -> dict[str, Any]:
        # One frame: the transformer takes the sizes of a video.
        grid = (1, cond.height // self._multiple, cond.width // self._multiple)
        return {
            "hidden_states": latents.to(dtype),
            "timestep": timesteps.to(dtype) / 1000,
            "guidance": self._embedded_guidance(timesteps, cond),
            "encoder_hidden_states": cond.prompts.embeds.to(dtype),
            "encoder_hidden_states_mask": cond.prompts.mask,
            "img_shapes": [[grid]] * len(latents),
        }

    def _rounded_timesteps(self, timesteps: Tensor, dtype: torch.dtype) -> Tensor:
        """The pipeline rounds and divides in its own precision; the transformer multiplies again in float32."""
        return (timesteps.to(dtype) / 1000).float() * 1000

    def compile_blocks(self, transformer: Any, backend: str | Callable[..., Any]) -> None:
        _use_real_rotations(transformer)
        super().compile_blocks(transformer, backend)

    def _decode(self, latents: Tensor, height: int, width: int) -> Tensor:
        return self._decode_one_frame(self.pipe._unpack_latents(latents, height, width, self.pipe.vae_scale_factor))

    def _encode_pixels(self, pixels: Tensor) -> Tensor:
        return self._pack(self._encode_one_frame(pixels))


def _leave_lengths_out() -> None:
    """Let diffusers' transformers, all of this process, compute no lengths of prompts from their mask: they ignore
    them, and every forward would wait for the device."""
    from diffusers.models.transformers import transformer_qwenimage as theirs

    # Only a speedup: a diffusers without the function works as it is.
    original = getattr(theirs, "compute_text_seq_len_from_mask", None)
    if original is None or original.__module__ == __name__:
        return

    def padded_length(embeds: Tensor, mask: Tensor | None) -> tuple[int, None, Tensor | None]:
        length, _, _ = original(embeds, None)
        real = None if mask is None else mask.bool()
        return length, None, real

    theirs.compute_text_seq_len_from_mask = padded_length


def _use_real_rotations(transformer: Any) -> None:
    """Rotate queries and keys by real numbers, equal to rounding: inductor generates no code for complex ones."""
    from diffusers.models.transformers import transformer_qwenimage as theirs

    def real(_module: Any, _inputs: Any, frequencies: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(torch.view_as_real(one) if one.is_complex() else one for one in frequencies)

    transformer.pos_embed.register_forward_hook(real)
    # diffusers' table of rotations by device, which serves every transformer of this process.
    theirs.ROPE_PER_DEVICE.update(cpu=_rotate, cuda=_rotate)


def _rotate(x: Tensor, frequencies: Tensor) -> Tensor:
    """``x`` ``(B, T, heads, D)`` with each pair of neighbours rotated.

    Args:
        x: queries or keys.
        frequencies: complex ``(T, D/2)``, or their real and imaginary parts ``(T, D/2, 2)``.
    """
    if frequencies.is_complex():
        from diffusers.models.transformers.transformer_qwenimage import apply_rotary_emb_qwen

        return apply_rotary_emb_qwen(x, frequencies, use_real=False)  # pyright: ignore[reportReturnType]
    first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = frequencies.unsqueeze(1).unbind(-1)
    return torch.stack((first * cos - second * sin, first * sin + second * cos), -1).flatten(-2).type_as(x)


def use_2d_convolutions_for_one_frame(vae: nn.Module) -> None:
    """Let this video VAE run its causal 3-D convolutions as 2-D ones when there is one frame, as for an image.

    A causal convolution pads the past with zeros, so over a single frame only the last time slice of its kernel acts: a
    2-D convolution gives the same numbers, to rounding, for a third of the multiplies. Parameters stay where they are,
    so saving and loading are unaffected; several frames, or a cache of earlier ones, run as before.
    """
    from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d

    def forward(self: Any, x: Tensor, cache_x: Tensor | None = None) -> Tensor:
        if x.shape[2] != 1 or cache_x is not None:
            return type(self).forward(self, x, cache_x)
        left, _, top, _, _, _ = self._padding
        return F.conv2d(x[:, :, 0], self.weight[:, :, -1], self.bias, padding=(top, left)).unsqueeze(2)

    for module in vae.modules():
        if isinstance(module, QwenImageCausalConv3d) and module.stride == (1, 1, 1):
            module.forward = MethodType(forward, module)
