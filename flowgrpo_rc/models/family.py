"""What all model families share: guidance, schedule, sizes and pixels around a diffusers pipeline."""

import itertools
import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from flowgrpo_rc.dtypes import dtype_name
from flowgrpo_rc.models.base import Conditioning, NonFiniteImageError, Prompts, Schedule


class Family(ABC):
    """Base of the adapters: a family says how its transformer is called, and what is special about its latents."""

    default_lora_targets: tuple[str, ...]
    longest_prompt: int

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe

    @property
    def transformer(self) -> Any:
        return self.pipe.transformer

    @property
    def smallest_image(self) -> int:
        return self._multiple * 8

    def check_parts(self) -> None:
        """The parts were made for each other, and the noise schedule is one.

        Raises:
            ValueError: names the two that differ, or what is wrong with the schedule.
        """
        for name, first, second in self._sizes():
            if first != second:
                raise ValueError(f"{name} must agree and are {first} and {second}")
        for name, values in self._factors().items():
            if not all(isinstance(value, (int, float)) and math.isfinite(value) for value in values):
                raise ValueError(f"{name} holds what is not a finite number")
        schedule = self.schedule(4, self.smallest_image, self.smallest_image)
        sigmas = schedule.sigmas.tolist()
        # Written so that a NaN fails too. The first may be above 1 by a rounding.
        falling = all(after < before for before, after in itertools.pairwise(sigmas))
        if not (falling and len(sigmas) == 5 and 0 < sigmas[0] < 1 + 1e-5 and sigmas[-1] == 0):
            raise ValueError(f"the noise levels of scheduler_config.json do not fall from at most 1 to 0: {sigmas}")

    def schedule(self, num_inference_steps: int, height: int, width: int) -> Schedule:
        # A scheduler of its own: the pipeline's is left as it was loaded.
        scheduler = type(self.pipe.scheduler).from_config(self.pipe.scheduler.config)
        tokens = (height // self._multiple) * (width // self._multiple)
        scheduler.set_timesteps(**self._schedule_arguments(scheduler.config, num_inference_steps, tokens))
        return Schedule(scheduler.timesteps.float(), scheduler.sigmas.float())

    def velocity(
        self, transformer: nn.Module, latents: Tensor, timesteps: Tensor, conditioning: Conditioning
    ) -> Tensor:
        cond = self._forward(transformer, latents, timesteps, conditioning.prompts, conditioning)
        if conditioning.negative is None:
            return cond
        # Two passes: the negative prompts may have another length, and half the activations are held at a time.
        uncond = self._forward(transformer, latents, timesteps, conditioning.negative, conditioning)
        return self._rescale(uncond + conditioning.true_cfg_scale * (cond - uncond), cond)

    @torch.no_grad()
    def decode(self, latents: Tensor, height: int, width: int) -> Tensor:
        decoded = self._decode(latents, height, width)
        _check_pixels(decoded, latents)
        image = (decoded.float() / 2 + 0.5).clamp(0, 1) * 255
        return image.round().to(torch.uint8).permute(0, 2, 3, 1).cpu()

    @property
    def _channels(self) -> int:
        """Input channels of the transformer."""
        return int(self.transformer.config.in_channels)

    @property
    def _multiple(self) -> int:
        """Pixels to a side of what becomes one token."""
        return self.pipe.vae_scale_factor * 2

    def _check_size(self, height: int, width: int) -> None:
        multiple = self._multiple
        if height % multiple or width % multiple:
            raise ValueError(
                f"actor_rollout_ref.rollout.pipeline.height={height}, width={width}: this model draws multiples of "
                f"{multiple} pixels"
            )

    def _forward(
        self, transformer: Any, latents: Tensor, timesteps: Tensor, prompts: Prompts, conditioning: Conditioning
    ) -> Tensor:
        inputs = self._inputs(transformer.dtype, latents, timesteps, prompts, conditioning)
        return transformer(**inputs, return_dict=False)[0].float()

    @abstractmethod
    def _inputs(
        self, dtype: torch.dtype, latents: Tensor, timesteps: Tensor, prompts: Prompts, conditioning: Conditioning
    ) -> dict[str, Any]:
        """What a transformer of this family is called with, whoever built it."""

    def _rescale(self, guided: Tensor, cond: Tensor) -> Tensor:
        """What the family's pipeline does with a guided velocity, ``cond`` being the conditional one."""
        return guided

    def _sizes(self) -> list[tuple[str, int, int]]:
        """What two parts must agree on: its name with those of the parts, and the number that each has."""
        return []

    def _factors(self) -> dict[str, list[Any]]:
        """The numbers that latents are multiplied by or shifted by before they are decoded, by name."""
        return {}

    @abstractmethod
    def _schedule_arguments(self, config: Any, num_inference_steps: int, tokens: int) -> dict[str, Any]:
        """Of the scheduler's ``set_timesteps``, for so many image tokens."""

    @abstractmethod
    def _decode(self, latents: Tensor, height: int, width: int) -> Tensor:
        """Images ``(B, 3, H, W)``, -1 to 1."""


def _check_pixels(decoded: Tensor, latents: Tensor) -> None:
    """Refuse pixels that are not finite: converted to whole numbers they would become an ordinary grey or white."""
    bad = (~torch.isfinite(decoded.flatten(1)).all(1)).nonzero().flatten().tolist()
    if not bad:
        return
    if decoded.dtype == torch.float32:
        remedy = (
            f"the latents reach {float(latents.abs().max()):.3g}: go back to a checkpoint from before it diverged, "
            "or repair the model if its vae is damaged"
        )
    else:
        remedy = "that precision is too low for it, so set actor_rollout_ref.model.dtype=float32"
        if decoded.dtype == torch.float16:
            remedy += " or bfloat16 (float16 ends at 65504)"
    raise NonFiniteImageError(
        f"the vae decoded {len(bad)} of {len(decoded)} images (rows {bad[:8]}) to pixels that are NaN or infinite, in "
        f"{dtype_name(decoded.dtype)}; {remedy}"
    )


def dynamic_shift(config: Any, tokens: int, default_max_shift: float) -> float:
    """``mu`` of the pipelines whose schedule depends on the image's size."""
    from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift

    return calculate_shift(
        tokens,
        config.get("base_image_seq_len", 256),
        config.get("max_image_seq_len", 4096),
        config.get("base_shift", 0.5),
        config.get("max_shift", default_max_shift),
    )
