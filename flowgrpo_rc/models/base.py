"""What a model family offers to rollout engines and to the actor, and what all families have in common."""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, UInt8
from torch import Tensor, nn

from flowgrpo_rc.dtypes import dtype_name
from flowgrpo_rc.models.guidance import refuse_guidance_scale, refuse_true_cfg_scale
from flowgrpo_rc.models.registry import FAMILIES
from flowgrpo_rc.prompt import Prompt, ReferenceImage
from flowgrpo_rc.quiet import IMPORTS, only_errors
from flowgrpo_rc.transfers import onto

JOINT_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
"""The linear layers of diffusers' attention over image and prompt together."""

PIXELS_DECODED_AT_ONCE = 4 * 512 * 512
"""Pixels of the images that a VAE decodes at a time: a feature map at 512 pixels to a side takes 50 MB an image, and a
decoder holds several."""


FLOW_SOLVERS = ("DPMSolverMultistepScheduler", "UniPCMultistepScheduler")
"""Solvers of higher order that checkpoints of flow models name. A policy takes Euler steps over their noise levels."""

LEVEL_SETTINGS = (
    *("shift", "flow_shift", "use_dynamic_shifting", "shift_terminal", "invert_sigmas", "final_sigmas_type"),
    *("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "use_lu_lambdas"),
)
"""Settings of a scheduler that change its noise levels."""


class UnsupportedSchedulerError(ValueError):
    """A pipeline's scheduler makes other steps than those that a policy is made of."""


class NonFiniteImageError(RuntimeError):
    """A VAE decoded finite latents to pixels that are NaN or infinite; most often its precision is too low."""


@dataclass(frozen=True)
class EncodedPrompt:
    """One prompt out of a model family's text encoders, before prompts of several lengths are padded to one."""

    embeds: Float[Tensor, "T D"]
    pooled: Float[Tensor, " E"] | None = None
    """One vector of the whole prompt, for families that take it besides."""
    references: Float[Tensor, "R C"] | None = None
    """The latent tokens of all reference images, one image after the other, as the transformer takes them."""
    reference_grids: tuple[tuple[int, int], ...] = ()
    """Rows and columns of each image's tokens; ``R`` is the sum of their products."""


@dataclass(frozen=True)
class Prompts:
    """Embeddings of ``P`` distinct prompts, padded to one length; images refer to rows by index."""

    embeds: Float[Tensor, "P T D"]
    mask: Bool[Tensor, "P T"] | None
    """Which embeddings are real; ``None`` when all are."""
    pooled: Float[Tensor, "P E"] | None = None
    """A vector for each whole prompt; ``None`` where the family takes none."""
    references: Float[Tensor, "P R C"] | None = None
    """The latent tokens of each prompt's reference images; ``None`` where no prompt has any."""
    reference_grids: tuple[tuple[int, int], ...] = ()
    """Rows and columns of each reference image's tokens, the same for all prompts."""
    lengths: tuple[int, ...] | None = None
    """How many embeddings of each prompt are real, the first ones: what ``mask`` says, for those who need it on the
    host and must not wait for a device. Left out, it is read off the mask, once."""

    def __post_init__(self) -> None:
        if self.mask is not None and self.lengths is None:
            object.__setattr__(self, "lengths", tuple(self.mask.sum(1).tolist()))
        elif self.mask is None and self.lengths is not None:
            raise ValueError("Prompts.lengths: are given without Prompts.mask, which says the same; give both")

    def map(self, change: Callable[[Tensor], Tensor]) -> "Prompts":
        """The same prompts with every tensor changed."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **{name: change(tensor) for name, tensor in tensors.items()})

    def rows(self, index: Tensor, device: torch.device) -> "Prompts":
        """The prompts of some images, on ``device``; ``index`` is on the host."""
        there = onto(index, self.embeds.device)
        lengths = None if self.lengths is None else tuple(self.lengths[row] for row in index.tolist())
        return replace(self.map(lambda tensor: onto(tensor[there], device)), lengths=lengths)

    def followed_by(self, other: "Prompts") -> "Prompts":
        """These prompts and then the other ones, padded with zeros to the longer of both lengths."""
        both = (self, other)
        longest = max(part.embeds.shape[1] for part in both)
        embeds = torch.cat([F.pad(part.embeds, (0, 0, 0, longest - part.embeds.shape[1])) for part in both])
        mask = None
        lengths = None
        if any(part.mask is not None or part.embeds.shape[1] < longest for part in both):
            mask = torch.cat([F.pad(part._real(), (0, longest - part.embeds.shape[1])) for part in both])
            lengths = self._all_lengths() + other._all_lengths()
        pooled = None
        if self.pooled is not None and other.pooled is not None:
            pooled = torch.cat([self.pooled, other.pooled])
        references = None
        if self.references is not None and other.references is not None:
            references = torch.cat([self.references, other.references])
        return Prompts(embeds, mask, pooled, references, self.reference_grids, lengths)

    def _real(self) -> Bool[Tensor, "P T"]:
        """``mask``, also where all embeddings are real."""
        if self.mask is None:
            return torch.ones(self.embeds.shape[:2], dtype=torch.bool, device=self.embeds.device)
        return self.mask

    def _all_lengths(self) -> tuple[int, ...]:
        """``lengths``, also where all embeddings are real."""
        return (self.embeds.shape[1],) * len(self.embeds) if self.lengths is None else self.lengths


@dataclass(frozen=True)
class Conditioning:
    """Everything besides latents and noise level that a velocity depends on."""

    prompts: Prompts
    negative: Prompts | None
    """Prompts to steer away from; ``None`` without classifier-free guidance."""
    true_cfg_scale: float
    guidance_scale: float | None
    height: int
    width: int

    def to(self, device: torch.device) -> "Conditioning":
        """All of it, on ``device``."""
        negative = None if self.negative is None else self.negative.map(lambda tensor: onto(tensor, device))
        return replace(self, prompts=self.prompts.map(lambda tensor: onto(tensor, device)), negative=negative)

    def rows(self, index: Tensor, device: torch.device) -> "Conditioning":
        """The conditioning of some images, on ``device``; ``index`` is on the host."""
        negative = None if self.negative is None else self.negative.rows(index, device)
        return replace(self, prompts=self.prompts.rows(index, device), negative=negative)


@dataclass(frozen=True)
class Schedule:
    """A sampling schedule of ``N`` steps."""

    timesteps: Float[Tensor, " N"]
    """As the scheduler names them (0 to 1000)."""
    sigmas: Float[Tensor, " N+1"]
    """Noise levels, from at most 1 down to 0."""


class DiffusionModel(ABC):
    """A loaded pipeline of one family. ``transformer`` arguments are any copy of its transformer.

    A family, which is a subclass, says how its transformer is called, and what is special about its latents.
    """

    default_lora_targets: tuple[str, ...]
    longest_prompt: int
    """The largest ``max_sequence_length`` that ``encode`` takes."""

    text_width = "joint_attention_dim"
    """The entry of the transformer's configuration that is the width of a prompt's embeddings."""

    masks_prompts: bool
    """Whether the transformer is told which embeddings of a prompt are padding, and leaves them out."""

    instructs_prompts: bool = False
    """Whether the pipeline puts an instruction before prompts and none before negative ones. ``encode`` is then given
    negative prompts as such; a blank text always is one."""
    masks_attention = False
    """Whether its attention takes a mask though it leaves none of them out."""

    solver_spaces_levels = False
    """The pipeline leaves the spacing of the noise levels to a scheduler with ``use_flow_sigmas``."""

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe
        self.batch_guidance = True
        """Whether both halves of a guided velocity are one call of the transformer, ``ModelConfig.batch_guidance``."""
        self.text_encoders: Callable[[], AbstractContextManager[None]] = nullcontext
        """``with model.text_encoders():`` has the text encoders loaded, which ``encode`` needs. Where they are kept in
        their files, each ``with`` reads them and gives up their memory after."""
        self.digests: Mapping[str, str] = {}
        """What tells text encoders and tokenizers from others, by their names in the pipeline."""

    @property
    def transformer(self) -> Any:
        """The transformer that the pipeline was loaded with."""
        return self.pipe.transformer

    @property
    def negative_prompt(self) -> str:
        """What stands for the negative prompt of a prompt that has none, as in the pipeline's own call."""
        return FAMILIES[type(self.pipe).__name__].negative_prompt

    @property
    def takes_images(self) -> bool:
        """Whether prompts may have reference images."""
        return FAMILIES[type(self.pipe).__name__].images[1] > 0

    @property
    def smallest_image(self) -> int:
        """Pixels to a side of a small image that every network of the family takes."""
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
        sigmas = self.schedule(4, self.smallest_image, self.smallest_image).sigmas.tolist()
        # Written so that a NaN fails too. The first may be above 1 by a rounding.
        falling = all(after < before for before, after in itertools.pairwise(sigmas))
        if not (falling and len(sigmas) == 5 and 0 < sigmas[0] < 1 + 1e-5 and sigmas[-1] == 0):
            config = self.pipe.scheduler.config
            settings = ", ".join(f"{name}={config[name]}" for name in LEVEL_SETTINGS if config.get(name))
            raise ValueError(
                f"the noise levels of scheduler_config.json do not fall from at most 1 to 0: {sigmas}; its settings "
                f"are {settings or 'none'}"
            )

    def check_request(
        self,
        height: int,
        width: int,
        guidance_scale: float | None,
        true_cfg_scale: float = 1.0,
        section: str = "pipeline",
    ) -> None:
        """Raise ``ValueError`` when the model cannot draw this size, or takes no such guidance; names the ``section``
        of ``actor_rollout_ref.rollout`` that asks for it."""
        if height % self._multiple or width % self._multiple:
            raise ValueError(
                f"actor_rollout_ref.rollout.{section}.height={height}, width={width}: this model draws multiples of "
                f"{self._multiple} pixels"
            )
        pipeline = type(self.pipe).__name__
        embeds = bool(self.transformer.config.get("guidance_embeds"))
        refuse_guidance_scale(pipeline, embeds, guidance_scale, section)
        refuse_true_cfg_scale(pipeline, bool(self.pipe.config.get("is_distilled")), true_cfg_scale, section)

    def reference_grid(self, image: ReferenceImage, area: int | None) -> tuple[int, int]:
        """Rows and columns of the tokens that the VAE makes of a reference image scaled to ``area`` pixels, from its
        size alone; ``area=None`` is the pipeline's own. Families that take no images have none."""
        raise NotImplementedError(f"{type(self.pipe).__name__} takes no reference images")

    @abstractmethod
    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        """Shape of one image's latents, without the batch dimension."""

    @abstractmethod
    def initial_noise(self, generator: torch.Generator, height: int, width: int) -> Float[Tensor, "*L"]:
        """One image's starting latents, the same as the diffusers pipeline draws from this generator."""

    def schedule(self, num_inference_steps: int, height: int, width: int) -> Schedule:
        """The diffusers pipeline's schedule for this many steps and this size."""
        scheduler = self._scheduler()
        tokens = (height // self._multiple) * (width // self._multiple)
        scheduler.set_timesteps(**self._schedule_arguments(scheduler.config, num_inference_steps, tokens))
        return Schedule(scheduler.timesteps.float(), scheduler.sigmas.float())

    @abstractmethod
    def tokenizers(self, max_sequence_length: int) -> list[tuple[Any, int]]:
        """The tokenizers, each with how many tokens of a prompt it keeps; the special ones are not counted."""

    def prompt_tokens(self, max_sequence_length: int) -> int:
        """How many embeddings the longest prompt gives the transformer."""
        return max_sequence_length

    @abstractmethod
    def encode(self, prompts: Sequence[str | Prompt], max_sequence_length: int) -> list[EncodedPrompt]:
        """Unpadded prompt embeddings, one a prompt, on the host; ``text_encoders`` must be loaded."""

    def blank_prompt(self) -> EncodedPrompt:
        """A token of zeros as wide as the transformer takes it; no text encoder is needed for it."""
        config = self.transformer.config
        pooled = config.get("pooled_projection_dim")
        return EncodedPrompt(torch.zeros(1, config[self.text_width]), None if pooled is None else torch.zeros(pooled))

    def velocity(
        self,
        transformer: nn.Module,
        latents: Float[Tensor, " B *L"],
        timesteps: Float[Tensor, " B"],
        conditioning: Conditioning,
        *,
        detach_unconditional: bool = False,
    ) -> Float[Tensor, " B *L"]:
        """The flow's velocity with guidance, float32, computed in the transformer's own precision.

        With guidance the conditional and the unconditional half are one call of the transformer for twice as many rows,
        and two calls where ``batch_guidance`` says so or the family cannot join prompts of these lengths.

        Args:
            detach_unconditional: no gradient flows through the unconditional half, which is then a call without graph.
        """
        negative = conditioning.negative
        if negative is None:
            return self._forward(transformer, latents, timesteps, conditioning.prompts, conditioning)
        if self.batch_guidance and not detach_unconditional and self._can_join(conditioning.prompts, negative):
            twice = torch.cat([latents, latents])
            prompts = conditioning.prompts.followed_by(negative)
            cond, uncond = self._forward(transformer, twice, timesteps.repeat(2), prompts, conditioning).chunk(2)
        else:
            cond = self._forward(transformer, latents, timesteps, conditioning.prompts, conditioning)
            # After the conditional half: autocast keeps the weights that it has rounded, with their graph or without.
            with torch.set_grad_enabled(torch.is_grad_enabled() and not detach_unconditional):
                uncond = self._forward(transformer, latents, timesteps, negative, conditioning)
        return self._guide(cond, uncond, conditioning.true_cfg_scale)

    def as_embedded(
        self, timesteps: Float[Tensor, " B"], conditioning: Conditioning, dtype: torch.dtype
    ) -> tuple[Float[Tensor, " B"], Conditioning]:
        """Timesteps and conditioning with which ``velocity`` embeds, in float32, the very timestep and guidance scale
        that it embeds in ``dtype``.

        Pipelines and transformers of some families round both on their way to the embedding, by up to one part in 256
        in bfloat16. With ``dtype`` float32 both come back unchanged.
        """
        if dtype == torch.float32:
            return timesteps, conditioning
        scale = conditioning.guidance_scale
        if scale is not None:
            # Every transformer that embeds one multiplies it in its own precision.
            embedded = torch.tensor(scale).to(dtype) * 1000
            conditioning = replace(conditioning, guidance_scale=float(embedded) / 1000)
        return self._rounded_timesteps(timesteps, dtype), conditioning

    @torch.no_grad()
    def decode(self, latents: Float[Tensor, " B *L"], height: int, width: int) -> UInt8[Tensor, "B H W 3"]:
        """Images of clean latents, on the host.

        Raises:
            NonFiniteImageError: a pixel is NaN or infinite; names the images and the remedy.
        """
        at_once = max(1, PIXELS_DECODED_AT_ONCE // (height * width))
        images: list[Tensor] = []
        finite: list[Tensor] = []
        for part in latents.split(at_once):
            decoded = self._decode(part, height, width)
            finite.append(torch.isfinite(decoded.flatten(1)).all(1))
            image = (decoded.float() / 2 + 0.5).clamp(0, 1) * 255
            images.append(image.round().to(torch.uint8).permute(0, 2, 3, 1))
        _check_pixels(torch.cat(finite), latents, self.pipe.vae.dtype)
        return torch.cat(images).cpu()

    @property
    def _channels(self) -> int:
        """Input channels of the transformer."""
        return int(self.transformer.config.in_channels)

    @property
    def _multiple(self) -> int:
        """Pixels to a side of what becomes one token."""
        return self.pipe.vae_scale_factor * 2

    def _can_join(self, prompts: Prompts, negative: Prompts) -> bool:
        """Whether one call takes both: of one length, or padded to one where the padding is left out."""
        return self.masks_prompts or prompts.embeds.shape[1] == negative.embeds.shape[1]

    def _forward(
        self, transformer: Any, latents: Tensor, timesteps: Tensor, prompts: Prompts, conditioning: Conditioning
    ) -> Tensor:
        inputs = self._inputs(compute_dtype(transformer), latents, timesteps, prompts, conditioning)
        return self._velocity_of(self._call(transformer, inputs), latents).float()

    def _call(self, transformer: Any, inputs: dict[str, Any]) -> Any:
        """What the transformer answers; engines whose transformers answer otherwise have their own."""
        return transformer(**inputs, return_dict=False)[0]

    def _velocity_of(self, output: Any, latents: Tensor) -> Tensor:
        """The velocity out of the transformer's answer, without what stands behind it: the predictions for reference
        tokens, or the second half of the channels where a transformer also predicts a variance."""
        return output[:, : latents.shape[1]]

    @abstractmethod
    def _inputs(
        self, dtype: torch.dtype, latents: Tensor, timesteps: Tensor, prompts: Prompts, conditioning: Conditioning
    ) -> dict[str, Any]:
        """What a transformer of this family is called with, whoever built it."""

    def _rounded_timesteps(self, timesteps: Float[Tensor, " B"], dtype: torch.dtype) -> Float[Tensor, " B"]:
        """What pipeline and transformer make of ``timesteps`` before they embed them, if they compute in ``dtype``;
        float32. Most families leave them as they are."""
        return timesteps

    @staticmethod
    def _embedded_guidance(timesteps: Float[Tensor, " B"], conditioning: Conditioning) -> Float[Tensor, " B"] | None:
        """What a guidance-distilled transformer is told; ``None`` for one that is not."""
        if conditioning.guidance_scale is None:
            return None
        return torch.full_like(timesteps, conditioning.guidance_scale)

    @staticmethod
    def _with_references(latents: Tensor, prompts: Prompts) -> Tensor:
        """Packed latents, and behind them the tokens of the reference images."""
        return latents if prompts.references is None else torch.cat([latents, prompts.references.to(latents)], 1)

    def _guide(self, cond: Tensor, uncond: Tensor, scale: float) -> Tensor:
        """The guided velocity, from the conditional and the unconditional one."""
        return uncond + scale * (cond - uncond)

    def _sizes(self) -> list[tuple[str, int, int]]:
        """What two parts must agree on: its name with those of the parts, and the number that each has."""
        return []

    def _factors(self) -> dict[str, list[Any]]:
        """The numbers that latents are multiplied by or shifted by before they are decoded, by name."""
        return {}

    def _scheduler(self) -> Any:
        """A copy of the pipeline's scheduler, which gives timesteps and noise levels; the steps are always Euler's.

        Raises:
            UnsupportedSchedulerError: the pipeline's steps are not those of a flow.
        """
        with only_errors(IMPORTS):
            from diffusers import FlowMatchEulerDiscreteScheduler

        scheduler = self.pipe.scheduler
        config = scheduler.config
        name = type(scheduler).__name__
        if name in FLOW_SOLVERS:
            # Higher orders reuse earlier velocities, and a policy's step depends on its own alone. The levels stay the
            # solver's: an Euler scheduler of the same shift has others.
            fits = bool(config.get("use_flow_sigmas")) and config.get("prediction_type") == "flow_prediction"
        else:
            fits = isinstance(scheduler, FlowMatchEulerDiscreteScheduler) and not config.get("stochastic_sampling")
        if fits:
            return type(scheduler).from_config(config)
        stochastic = " with stochastic_sampling" if config.get("stochastic_sampling") else ""
        raise UnsupportedSchedulerError(
            f"its scheduler is a {name}{stochastic}; a policy is made of the flow's Euler steps, so "
            "scheduler/scheduler_config.json must be of a FlowMatchEulerDiscreteScheduler without "
            f"stochastic_sampling, or of {' or '.join(FLOW_SOLVERS)} with use_flow_sigmas and "
            "prediction_type=flow_prediction"
        )

    def _schedule_arguments(self, config: Any, num_inference_steps: int, tokens: int) -> dict[str, Any]:
        """Arguments of the scheduler's ``set_timesteps``, for an image of so many tokens: evenly spaced levels and the
        shift for this size."""
        mu = self._shift(config, num_inference_steps, tokens)
        if self.solver_spaces_levels and config.get("use_flow_sigmas"):
            return {"num_inference_steps": num_inference_steps, "mu": mu}
        return {"sigmas": np.linspace(1.0, 1 / num_inference_steps, num_inference_steps), "mu": mu}

    def _shift(self, config: Any, num_inference_steps: int, tokens: int) -> float:
        """``mu``, the logarithm of the shift, of a pipeline whose schedule depends on the image's size."""
        return self._dynamic_shift(config, tokens, 1.15)

    @staticmethod
    def _dynamic_shift(config: Any, tokens: int, default_max_shift: float) -> float:
        """``mu`` that rises linearly with the number of tokens, between the two shifts of the scheduler's config."""
        with only_errors(IMPORTS):
            from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift

        return calculate_shift(
            tokens,
            config.get("base_image_seq_len", 256),
            config.get("max_image_seq_len", 4096),
            config.get("base_shift", 0.5),
            config.get("max_shift", default_max_shift),
        )

    def _scale_and_shift(self, *, shifted: bool = True) -> dict[str, list[Any]]:
        """``_factors`` of a VAE whose latents have one scale, and are ``shifted`` by one number or not."""
        vae = self.pipe.vae.config
        scale = vae.scaling_factor
        found = {"1 / the vae's scaling_factor": [1 / scale if scale else None]}
        return found | ({"the vae's shift_factor": [vae.shift_factor]} if shifted else {})

    def _decode_scaled_and_shifted(self, latents: Float[Tensor, "B C h w"]) -> Float[Tensor, "B 3 H W"]:
        """``_decode`` of such a VAE."""
        vae = self.pipe.vae
        latents = latents.to(vae.device, vae.dtype) / vae.config.scaling_factor
        return vae.decode(latents + (vae.config.get("shift_factor") or 0), return_dict=False)[0]

    @abstractmethod
    def _decode(self, latents: Tensor, height: int, width: int) -> Tensor:
        """Images ``(B, 3, H, W)``, -1 to 1."""


def compute_dtype(transformer: nn.Module) -> torch.dtype:
    """What a transformer computes in: the precision of its weights, besides those that its class keeps in float32.

    diffusers' ``dtype`` says the same and looks through all modules for it, at every call: on a tiny model a twentieth
    of a forward.
    """
    return next(p.dtype for name, p in transformer.named_parameters() if not keeps_float32(transformer, name))


def keeps_float32(transformer: nn.Module, name: str) -> bool:
    """Whether a parameter, with this full ``name``, stays in float32 by its transformer's class, whatever precision the
    transformer is loaded in."""
    kept = getattr(transformer, "_keep_in_fp32_modules", None) or ()
    return not {*kept}.isdisjoint(name.split("."))


def _check_pixels(finite: Tensor, latents: Tensor, dtype: torch.dtype) -> None:
    """Refuse pixels that are not finite: converted to whole numbers they would become an ordinary grey or white."""
    bad = (~finite).nonzero().flatten().tolist()
    if not bad:
        return
    if dtype == torch.float32:
        remedy = (
            f"the latents reach {float(latents.abs().max()):.3g}: go back to a checkpoint from before it diverged, "
            "or repair the model if its vae is damaged"
        )
    else:
        remedy = "that precision is too low for it, so set actor_rollout_ref.model.dtype=float32"
        if dtype == torch.float16:
            remedy += " or bfloat16 (float16 ends at 65504)"
    raise NonFiniteImageError(
        f"the vae decoded {len(bad)} of {len(finite)} images (rows {bad[:8]}) to pixels that are NaN or infinite, in "
        f"{dtype_name(dtype)}; {remedy}"
    )
