"""Interface of a model family, for rollout engines and the actor, and the parts that all families share."""

import inspect
import sys
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
from flowgrpo_rc.models.registry import FAMILIES, FamilyEntry
from flowgrpo_rc.models.sharding import is_sharded
from flowgrpo_rc.prompt import Prompt, ReferenceImage, texts
from flowgrpo_rc.quiet import IMPORTS, only_errors
from flowgrpo_rc.transfers import onto

JOINT_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
"""The linear layers of diffusers' attention over image and prompt together."""

PIXELS_DECODED_AT_ONCE = 4 * 512 * 512
"""Pixels that a VAE decodes at a time: a feature map of 512 x 512 pixels takes 50 MB, and a decoder holds several."""

COMPILE_BACKEND = "inductor"
"""Backend of ``torch.compile`` for a transformer's blocks."""

FLOW_SOLVERS = ("DPMSolverMultistepScheduler", "UniPCMultistepScheduler")
"""Solvers of higher order that checkpoints of flow models name. A policy takes Euler steps over their noise levels."""

LEVEL_SETTINGS = (
    *("shift", "flow_shift", "use_dynamic_shifting", "shift_terminal", "invert_sigmas", "final_sigmas_type"),
    *("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "use_lu_lambdas"),
)
"""Settings of a scheduler that change its noise levels."""


class UnsupportedSchedulerError(ValueError):
    """A pipeline's scheduler is not that of a flow."""


class NonFiniteImageError(RuntimeError):
    """A VAE decoded finite latents to NaN or infinite pixels; most often its precision is too low."""


@dataclass(frozen=True)
class EncodedPrompt:
    """Embeddings of one prompt, not yet padded to the length of others."""

    embeds: Float[Tensor, "T D"]
    pooled: Float[Tensor, " E"] | None = None
    """A vector of the whole prompt, in families that take one."""
    references: Float[Tensor, "R C"] | None = None
    """Latent tokens of all reference images, one image after the other."""
    reference_grids: tuple[tuple[int, int], ...] = ()
    """Rows and columns of each image's tokens; ``R`` is the sum of their products."""


@dataclass(frozen=True)
class Prompts:
    """Embeddings of ``P`` distinct prompts, padded to one length; images refer to rows by index."""

    embeds: Float[Tensor, "P T D"]
    mask: Bool[Tensor, "P T"] | None
    """True for real embeddings, false for padding; ``None`` without padding."""
    pooled: Float[Tensor, "P E"] | None = None
    """A vector of each whole prompt; ``None`` in families that take none."""
    references: Float[Tensor, "P R C"] | None = None
    """Latent tokens of each prompt's reference images; ``None`` without any."""
    reference_grids: tuple[tuple[int, int], ...] = ()
    """Rows and columns of each reference image's tokens, the same for all prompts."""
    lengths: tuple[int, ...] | None = None
    """Number of real embeddings of each prompt, which come first: ``mask`` without a
    host sync. Computed from the mask by default."""

    def __post_init__(self) -> None:
        # One host sync here instead of one in every forward that needs the lengths.
        if self.mask is not None and self.lengths is None:
            object.__setattr__(self, "lengths", tuple(self.mask.sum(1).tolist()))

    def map(self, change: Callable[[Tensor], Tensor]) -> "Prompts":
        """The same prompts with every tensor changed."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **{name: change(tensor) for name, tensor in tensors.items()})

    def rows(self, index: Tensor, device: torch.device) -> "Prompts":
        """The prompts of some images, on ``device``; ``index`` is on the host."""
        # Rows are picked where the embeddings are, so that only these rows are copied.
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
        # Attention without a mask is faster, so that none is made unless a row has padding.
        if any(part.mask is not None or part.embeds.shape[1] < longest for part in both):
            mask = torch.cat([F.pad(part._real(), (0, longest - part.embeds.shape[1])) for part in both])
            lengths = sum((part.lengths or (part.embeds.shape[1],) * len(part.embeds) for part in both), ())
        pooled, references = (
            None if own is None or more is None else torch.cat([own, more])
            for own, more in ((self.pooled, other.pooled), (self.references, other.references))
        )
        return Prompts(embeds, mask, pooled, references, self.reference_grids, lengths)

    def _real(self) -> Bool[Tensor, "P T"]:
        """``mask``, also where all embeddings are real."""
        if self.mask is None:
            return torch.ones(self.embeds.shape[:2], dtype=torch.bool, device=self.embeds.device)
        return self.mask


@dataclass(frozen=True)
class Conditioning:
    """Inputs of a velocity besides latents and noise level."""

    prompts: Prompts
    negative: Prompts | None
    """Prompts to steer away from; ``None`` without classifier-free guidance."""
    true_cfg_scale: float
    guidance_scale: float | None
    height: int
    width: int
    guidance_interval: tuple[float, float] | None = None
    """Lowest and highest noise level with classifier-free guidance; ``None``: guidance at every level."""
    guided: tuple[bool, ...] | None = None
    """Rows with classifier-free guidance, see ``at_levels``; ``None``: all of them."""

    def at_levels(self, sigmas: Sequence[float]) -> "Conditioning":
        """The conditioning of rows at these noise levels, with guidance where ``guidance_interval`` has it."""
        if self.negative is None or self.guidance_interval is None:
            return self
        low, high = self.guidance_interval
        guided = tuple(low <= sigma <= high for sigma in sigmas)
        return replace(self, guided=None if all(guided) else guided)

    def to(self, device: torch.device) -> "Conditioning":
        """All of it, on ``device``."""
        negative = None if self.negative is None else self.negative.map(lambda tensor: onto(tensor, device))
        return replace(self, prompts=self.prompts.map(lambda tensor: onto(tensor, device)), negative=negative)

    def rows(self, index: Tensor, device: torch.device) -> "Conditioning":
        """The conditioning of some images, on ``device``; ``index`` is on the host."""
        negative = None if self.negative is None else self.negative.rows(index, device)
        guided = None if self.guided is None else tuple(self.guided[row] for row in index.tolist())
        return replace(self, prompts=self.prompts.rows(index, device), negative=negative, guided=guided)


@dataclass(frozen=True)
class Schedule:
    """A sampling schedule of ``N`` steps."""

    timesteps: Float[Tensor, " N"]  # as the scheduler names them (0 to 1000)
    sigmas: Float[Tensor, " N+1"]  # noise levels, from at most 1 down to 0


class DiffusionModel(ABC):
    """A loaded pipeline of one family; a family is a subclass.

    Methods with a ``transformer`` argument take any copy of the pipeline's transformer.
    """

    default_lora_targets: tuple[str, ...]
    longest_prompt: int
    """The largest ``max_sequence_length`` that ``encode`` takes."""
    text_width = "joint_attention_dim"
    """Entry of the transformer's configuration that holds the width of a prompt's embeddings."""
    masks_prompts: bool
    """The transformer takes a mask of each prompt's padding and ignores the padding."""
    instructs_prompts: bool = False
    """The pipeline puts an instruction before prompts, but not before negative ones. ``encode`` then takes negative
    prompts as ``Prompt(text, negative=True)``; a blank text always is one."""
    masks_attention = False
    """The attention takes a mask, but not one that removes the padding."""
    solver_spaces_levels = False
    """The pipeline leaves the spacing of the noise levels to a scheduler with ``use_flow_sigmas``."""
    scheduler_spaces_levels = False
    """The pipeline leaves the spacing of the noise levels, and their shift, to any scheduler."""
    shifts_latents = True
    """The pipeline adds the VAE's ``shift_factor``, if it has one, before it decodes."""
    keeps_conditional_norm = False
    """The pipeline gives every row of a guided velocity the length of its conditional prediction."""
    keeps_unrounded: tuple[str, ...] = ()
    """Layers that an engine in 8 bits leaves as they are, by the part of their names that blocks have in common."""

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe
        self.batch_guidance = True
        """Compute both halves of a guided velocity in one call of the transformer: ``ModelConfig.batch_guidance``."""
        self.prompt_multiple = 1
        """Pad prompts to a multiple of so many embeddings: ``ModelConfig.prompt_length_multiple``."""
        self.text_encoders: Callable[[], AbstractContextManager[None]] = nullcontext
        """``with model.text_encoders():`` holds the text encoders in memory, which ``encode`` needs. A
        ``PipelineLoader`` reads them at the beginning of the ``with`` and frees them at its end."""
        self.digests: Mapping[str, str] = {}
        """Digests of text encoders and tokenizers, by their names in the pipeline."""

    @property
    def transformer(self) -> Any:
        """The transformer that the pipeline was loaded with."""
        return self.pipe.transformer

    @property
    def _family(self) -> FamilyEntry:
        return FAMILIES[type(self.pipe).__name__]

    @property
    def negative_prompt(self) -> str:
        """Default negative prompt of the pipeline's own call."""
        return self._family.negative_prompt

    @property
    def takes_images(self) -> bool:
        """Prompts may have reference images."""
        return self._family.images[1] > 0

    @property
    def smallest_image(self) -> int:
        """Side in pixels of a small image that every network of the family takes."""
        return self._multiple * 8

    def check_schedule(self) -> None:
        """Raise ``UnsupportedSchedulerError`` unless the pipeline's noise levels fall from at most 1 to 0."""
        sigmas = self.schedule(4, self.smallest_image, self.smallest_image).sigmas
        # Written so that a NaN fails too. The first may be above 1 by a rounding.
        if len(sigmas) == 5 and 0 < sigmas[0] < 1 + 1e-5 and (sigmas.diff() < 0).all() and sigmas[-1] == 0:
            return
        config = self.pipe.scheduler.config
        levels = ", ".join(f"{sigma:.4g}" for sigma in sigmas.tolist())
        settings = ", ".join(f"{name}={config[name]}" for name in LEVEL_SETTINGS if config.get(name))
        raise UnsupportedSchedulerError(
            f"the noise levels of scheduler_config.json do not fall from at most 1 to 0: {levels}; its settings are "
            f"{settings or 'none'}"
        )

    def check_request(
        self,
        height: int,
        width: int,
        guidance_scale: float | None,
        true_cfg_scale: float = 1.0,
        section: str = "pipeline",
    ) -> None:
        """Raise ``ValueError`` for a size or a guidance that the model does not support. The messages name it in this
        ``section`` of ``actor_rollout_ref.rollout``."""
        here = f"actor_rollout_ref.rollout.{section}"
        size = f"{here}.height={height}, width={width}"
        if height % self._multiple or width % self._multiple:
            raise ValueError(f"{size}: this model draws multiples of {self._multiple} pixels")
        # Sizes beyond the positions would fail inside the transformer, after the prompts were encoded.
        rows, columns = (number * self._multiple for number in self._most_tokens())
        if height > rows or width > columns:
            raise ValueError(f"{size}: this model has positions for at most {rows}x{columns} pixels")
        family = self._family
        embeds = bool(self.transformer.config.get("guidance_embeds"))
        if embeds != (guidance_scale is not None):
            fault = f"{here}.guidance_scale: got {guidance_scale} for this model"
            # The most common mistake: the value of the pipeline's own guidance_scale.
            if family.guidance_scale_is_cfg and guidance_scale is not None:
                raise ValueError(
                    f"{fault}, which embeds none; what its pipeline calls guidance_scale is true_cfg_scale here, so "
                    f"set guidance_scale=null and true_cfg_scale={guidance_scale + family.cfg_above_guidance:g}"
                )
            remedy = "it takes none; set it to null"
            if embeds:
                usual = inspect.signature(type(self.pipe).__call__).parameters["guidance_scale"].default
                own = "" if usual is None else f"; its pipeline's own is guidance_scale={usual:g}"
                remedy = f"it is guidance-distilled and needs one{own}"
            raise ValueError(f"{fault}; {remedy}")
        # The pipeline would ignore the scale, or refuse it minutes later.
        distilled = bool(self.pipe.config.get("is_distilled"))
        if true_cfg_scale > 1 and (distilled or not family.takes_cfg):
            why = "is distilled" if distilled else "has the guidance in its transformer (guidance_scale)"
            raise ValueError(
                f"{here}.true_cfg_scale: got {true_cfg_scale:g}; this model {why} and its pipeline takes no "
                "classifier-free guidance; set it to 1"
            )

    def reference_grid(self, image: ReferenceImage, area: int | None) -> tuple[int, int]:
        """Rows and columns of a reference image's tokens, scaled to ``area`` pixels; ``None``: the pipeline's area."""
        width, height = self._reference_size(image, area)
        return height // self._multiple, width // self._multiple

    def _reference_size(self, image: ReferenceImage, area: int | None) -> tuple[int, int]:
        """Width and height of the VAE's input for a reference image."""
        raise NotImplementedError(f"{type(self.pipe).__name__} takes no reference images")

    @abstractmethod
    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        """Shape of one image's latents, without the batch dimension."""

    def initial_noise(self, generator: torch.Generator, height: int, width: int) -> Float[Tensor, "*L"]:
        """Initial latents of one image, equal to those of the diffusers pipeline with this generator."""
        return torch.randn(self.latent_shape(height, width), generator=generator)

    def schedule(self, num_inference_steps: int, height: int, width: int) -> Schedule:
        """The diffusers pipeline's schedule."""
        # A copy: engines and actor ask for several schedules at the same time.
        scheduler = self._scheduler()
        # The shift of most pipelines depends on the number of tokens.
        tokens = (height // self._multiple) * (width // self._multiple)
        scheduler.set_timesteps(**self._schedule_arguments(scheduler.config, num_inference_steps, tokens))
        return Schedule(scheduler.timesteps.float(), scheduler.sigmas.float())

    def timesteps_of(self, sigmas: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """The timesteps at which the transformer sees these noise levels, in the unit of ``schedule``."""
        return sigmas.float() * self._scheduler().config.num_train_timesteps

    def tokenizers(self, max_sequence_length: int) -> list[tuple[Any, int]]:
        """The tokenizers, each with the number of a prompt's tokens that it keeps, not counting special tokens."""
        tokenizer = self.pipe.tokenizer
        return [(tokenizer, max_sequence_length - tokenizer.num_special_tokens_to_add())]

    def prompt_tokens(self, max_sequence_length: int) -> int:
        """Number of embeddings of the longest prompt."""
        return max_sequence_length

    @torch.no_grad()
    def encode(self, prompts: Sequence[str | Prompt], max_sequence_length: int) -> list[EncodedPrompt]:
        """Unpadded embeddings of each prompt, on the host; call it inside ``text_encoders``."""
        options = {"device": self.pipe.text_encoder.device, "max_sequence_length": max_sequence_length}
        embeds = self.pipe.encode_prompt(texts(prompts), do_classifier_free_guidance=False, **options)[0]
        return [EncodedPrompt(row.cpu()) for row in embeds]

    def blank_prompt(self) -> EncodedPrompt:
        """A token of zeros in the width that the transformer takes; needs no text encoder."""
        config = self.transformer.config
        pooled = config.get("pooled_projection_dim")
        return EncodedPrompt(torch.zeros(1, config[self.text_width]), None if pooled is None else torch.zeros(pooled))

    def compile_blocks(self, transformer: Any, backend: str | Callable[..., Any]) -> None:
        """Compile the blocks of ``transformer`` with a backend of ``torch.compile``, at their first forward."""
        # All blocks share a graph. It is made anew for sizes, adapters and gradients that differ. Past torch's limit of
        # eight, blocks would go on uncompiled.
        torch._dynamo.config.recompile_limit = max(32, torch._dynamo.config.recompile_limit)
        transformer.compile_repeated_blocks(backend=backend)

    def velocity(
        self,
        transformer: nn.Module,
        latents: Float[Tensor, " B *L"],
        timesteps: Float[Tensor, " B"],
        conditioning: Conditioning,
        *,
        detach_unconditional: bool = False,
    ) -> Float[Tensor, " B *L"]:
        """The flow's velocity with guidance of the rows that ``conditioning.guided`` names, float32, computed in the
        transformer's own precision.

        With guidance, one call of the transformer computes the conditional and the unconditional half, for twice as
        many rows. It takes two calls without ``batch_guidance``, or if the family cannot join prompts of these lengths.

        Args:
            detach_unconditional: stop the gradient of the unconditional half, which is then a call without graph.
        """
        negative = conditioning.negative
        if negative is None:
            return self._forward(transformer, latents, timesteps, conditioning)
        # Rows without guidance take no part in the unconditional half.
        rows = None
        if conditioning.guided is not None:
            rows = torch.tensor(conditioning.guided).nonzero().flatten()
        # Prompts of other lengths can join them only if the transformer ignores the padding.
        joins = self.masks_prompts or conditioning.prompts.embeds.shape[1] == negative.embeds.shape[1]
        twice = not (self.batch_guidance and joins) or detach_unconditional
        unguided = rows is not None and not len(rows)
        if unguided and not (twice and is_sharded(transformer)):
            return self._forward(transformer, latents, timesteps, conditioning)
        there = None
        half = (latents, timesteps)
        if rows is not None:
            # Without any guided row this is the call that the other processes of a sharded transformer make.
            rows = torch.zeros(1, dtype=torch.long) if unguided else rows
            there = onto(rows, latents.device)
            half = (latents[there], timesteps[there])
            negative = negative.rows(rows, latents.device)
        if not twice:
            # One call with more rows: a small batch leaves a GPU waiting for the next launch.
            both = replace(conditioning, prompts=conditioning.prompts.followed_by(negative))
            times = torch.cat([timesteps, half[1]])
            found = self._forward(transformer, torch.cat([latents, half[0]]), times, both)
            cond, uncond = found.split([len(latents), len(half[0])])
        else:
            cond = self._forward(transformer, latents, timesteps, conditioning)
            # After the conditional half: autocast keeps the weights that it has rounded, with their graph or without.
            with torch.set_grad_enabled(torch.is_grad_enabled() and not detach_unconditional):
                uncond = self._forward(transformer, *half, replace(conditioning, prompts=negative), "negative")
        if unguided:
            return cond + 0.0 * uncond.mean()  # in the graph: the other processes have a backward pass of it
        if there is None:
            return self._guide(cond, uncond, conditioning.true_cfg_scale)
        return cond.index_put((there,), self._guide(cond[there], uncond, conditioning.true_cfg_scale))

    def as_embedded(
        self, timesteps: Float[Tensor, " B"], conditioning: Conditioning, dtype: torch.dtype
    ) -> tuple[Float[Tensor, " B"], Conditioning]:
        """Timesteps and conditioning rounded as a transformer in ``dtype`` rounds them before it embeds them.

        Pipelines and transformers of some families round both on their way to the embedding, by up to one part in 256
        in bfloat16. A float32 transformer that gets these values embeds the same numbers. With ``dtype`` float32 both
        are returned unchanged.
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
        """Images of clean latents, on the host. Raises ``NonFiniteImageError`` with the images and the remedy if a
        pixel is NaN or infinite."""
        # By area, not by rows: one image of 2048 pixels to a side is as large as sixteen of 512.
        at_once = max(1, PIXELS_DECODED_AT_ONCE // (height * width))
        images: list[Tensor] = []
        finite: list[Tensor] = []
        for part in latents.split(at_once):
            decoded = self._decode(part, height, width)
            finite.append(torch.isfinite(decoded.flatten(1)).all(1))
            # Rounded as in diffusers, so that images equal the pipeline's.
            image = (decoded.float() / 2 + 0.5).clamp(0, 1) * 255
            images.append(image.round().to(torch.uint8).permute(0, 2, 3, 1))
        # After the loop: a check inside would wait for the device at every part. Pixels that are not finite must be
        # refused, because converted to whole numbers they became an ordinary grey or white.
        bad = (~torch.cat(finite)).nonzero().flatten().tolist()
        if bad:
            dtype = self.pipe.vae.dtype
            others = "float32" if dtype == torch.bfloat16 else "float32 or bfloat16"
            remedy = f"that precision is too low for it, so set actor_rollout_ref.model.dtype={others}"
            if dtype == torch.float32:
                remedy = f"the latents reach {float(latents.abs().max()):.3g}: go back to a checkpoint from before it "
                remedy += "diverged, or repair the model if its vae is damaged"
            raise NonFiniteImageError(
                f"the vae decoded {len(bad)} of {len(latents)} images (rows {bad[:8]}) to pixels that are NaN or "
                f"infinite, in {dtype_name(dtype)}; {remedy}"
            )
        return torch.cat(images).cpu()

    @torch.no_grad()
    def encode_images(self, images: UInt8[Tensor, "B H W 3"]) -> Float[Tensor, " B *L"]:
        """Clean latents of images, float32 and on the host: the inverse of ``decode``, with the mode of the VAE's
        distribution."""
        height, width = images.shape[1:3]
        at_once = max(1, PIXELS_DECODED_AT_ONCE // (height * width))
        parts = [self._encode_pixels(part.permute(0, 3, 1, 2) / 127.5 - 1) for part in images.split(at_once)]
        return torch.cat(parts).float().cpu()

    @property
    def _channels(self) -> int:
        """Input channels of the transformer."""
        return int(self.transformer.config.in_channels)

    @property
    def _multiple(self) -> int:
        """Side in pixels of one token."""
        return self.pipe.vae_scale_factor * 2

    def _most_tokens(self) -> Sequence[int]:
        """Most rows and columns of tokens that have positions."""
        return sys.maxsize, sys.maxsize

    def _forward(
        self, transformer: Any, latents: Tensor, timesteps: Tensor, cond: Conditioning, half: str = "positive"
    ) -> Tensor:
        inputs = self._inputs(compute_dtype(transformer), latents, timesteps, cond)
        cached = nullcontext()
        if getattr(transformer, "is_cache_enabled", False):
            # A cache compares outputs of equal shape, and not those of one half with the other's.
            cached = transformer.cache_context(f"{half} {len(latents)}")
        with cached:
            output = self._call(transformer, inputs)
        # Guidance multiplies differences of velocities, and with them any rounding: float32 from here on.
        return self._velocity_of(output, latents).float()

    def _call(self, transformer: Any, inputs: dict[str, Any]) -> Any:
        """Output of the transformer; engines with other transformers override it."""
        return transformer(**inputs, return_dict=False)[0]

    def _velocity_of(self, output: Any, latents: Tensor) -> Tensor:
        """The velocity in the transformer's output, without the predictions for reference tokens behind it, or the
        second half of the channels if the transformer also predicts a variance."""
        return output[:, : latents.shape[1]]

    @abstractmethod
    def _inputs(self, dtype: torch.dtype, latents: Tensor, timesteps: Tensor, cond: Conditioning) -> dict[str, Any]:
        """Keyword arguments of the transformer; the same for diffusers and vLLM-Omni."""

    def _rounded_timesteps(self, timesteps: Float[Tensor, " B"], dtype: torch.dtype) -> Float[Tensor, " B"]:
        """``timesteps`` as pipeline and transformer round them in ``dtype`` before the embedding; most do not."""
        return timesteps

    @staticmethod
    def _embedded_guidance(timesteps: Float[Tensor, " B"], conditioning: Conditioning) -> Float[Tensor, " B"] | None:
        """Guidance argument of a guidance-distilled transformer; ``None`` for others."""
        scale = conditioning.guidance_scale
        return None if scale is None else torch.full_like(timesteps, scale)

    @staticmethod
    def _with_references(latents: Tensor, prompts: Prompts) -> Tensor:
        """Packed latents followed by the tokens of the reference images."""
        return latents if prompts.references is None else torch.cat([latents, prompts.references.to(latents)], 1)

    def _guide(self, cond: Tensor, uncond: Tensor, scale: float) -> Tensor:
        """The guided velocity, from the conditional and the unconditional one."""
        guided = uncond + scale * (cond - uncond)
        if self.keeps_conditional_norm:
            guided = guided * (cond.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True))
        return guided

    def _scheduler(self) -> Any:
        """A copy of the pipeline's scheduler; the steps over its noise levels are always Euler's. Raises
        ``UnsupportedSchedulerError`` if the pipeline's steps are not those of a flow."""
        with only_errors(IMPORTS):
            from diffusers import FlowMatchEulerDiscreteScheduler

        scheduler = self.pipe.scheduler
        config = scheduler.config
        name = type(scheduler).__name__
        stochastic = " with stochastic_sampling" if config.get("stochastic_sampling") else ""
        fits = isinstance(scheduler, FlowMatchEulerDiscreteScheduler) and not stochastic
        if name in FLOW_SOLVERS:
            # Higher orders reuse earlier velocities, and a policy's step depends on its own alone. The levels stay the
            # solver's: an Euler scheduler of the same shift has others.
            fits = bool(config.get("use_flow_sigmas")) and config.get("prediction_type") == "flow_prediction"
        if fits:
            return type(scheduler).from_config(config)
        raise UnsupportedSchedulerError(
            f"its scheduler is a {name}{stochastic}; a policy is made of the flow's Euler steps, so "
            "scheduler/scheduler_config.json must be of a FlowMatchEulerDiscreteScheduler without "
            f"stochastic_sampling, or of {' or '.join(FLOW_SOLVERS)} with use_flow_sigmas and "
            "prediction_type=flow_prediction"
        )

    def _schedule_arguments(self, config: Any, num_inference_steps: int, tokens: int) -> dict[str, Any]:
        """Arguments of the scheduler's ``set_timesteps``, for an image of so many tokens: evenly spaced levels and the
        shift for this size."""
        if self.scheduler_spaces_levels:
            return {"num_inference_steps": num_inference_steps}
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

    def _decode_scaled_and_shifted(self, latents: Float[Tensor, "B C h w"]) -> Float[Tensor, "B 3 H W"]:
        """``_decode`` with a VAE whose latents have one scale, and one shift or none."""
        vae = self.pipe.vae
        latents = latents.to(vae.device, vae.dtype) / vae.config.scaling_factor
        return vae.decode(latents + self._latent_shift, return_dict=False)[0]

    def _encode_scaled_and_shifted(self, pixels: Float[Tensor, "B 3 H W"]) -> Float[Tensor, "B C h w"]:
        """The inverse of ``_decode_scaled_and_shifted``."""
        return (self._vae_mode(pixels) - self._latent_shift) * self.pipe.vae.config.scaling_factor

    @property
    def _latent_shift(self) -> float:
        return (self.pipe.vae.config.get("shift_factor") if self.shifts_latents else None) or 0.0

    def _decode_one_frame(self, latents: Float[Tensor, "B C 1 h w"]) -> Float[Tensor, "B 3 H W"]:
        """``_decode`` with the VAE of a video, whose latents have a mean and a deviation for each channel."""
        vae = self.pipe.vae
        mean, std = self._channel_moments()
        return vae.decode(latents.to(vae.device, vae.dtype) * std + mean, return_dict=False)[0][:, :, 0]

    def _encode_one_frame(self, pixels: Float[Tensor, "B 3 H W"]) -> Float[Tensor, "B C 1 h w"]:
        """The inverse of ``_decode_one_frame``."""
        mean, std = self._channel_moments()
        return (self._vae_mode(pixels.unsqueeze(2)) - mean) / std

    def _channel_moments(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of each channel of a video VAE's latents, ``(1, C, 1, 1, 1)``."""
        vae = self.pipe.vae
        mean, std = (
            onto(torch.tensor(values, dtype=vae.dtype).view(1, -1, 1, 1, 1), vae.device)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        return mean, std

    def _vae_mode(self, pixels: Tensor) -> Tensor:
        """The mode of the VAE's distribution; an autoencoder without one gives its latents."""
        vae = self.pipe.vae
        encoded = vae.encode(pixels.to(vae.device, vae.dtype), return_dict=False)[0]
        return encoded if isinstance(encoded, Tensor) else encoded.mode()

    @abstractmethod
    def _decode(self, latents: Tensor, height: int, width: int) -> Tensor:
        """Images ``(B, 3, H, W)``, -1 to 1."""

    def _encode_pixels(self, pixels: Float[Tensor, "B 3 H W"]) -> Float[Tensor, " B *L"]:
        """Clean latents of images, -1 to 1: the inverse of ``_decode``. A family without it has no
        ``data.preferences``."""
        raise NotImplementedError(f"{type(self).__name__} has no _encode_pixels, which data.preferences needs")


def compute_dtype(transformer: nn.Module) -> torch.dtype:
    """Dtype that a transformer computes in: that of its weights, except for those that its class keeps in float32.

    diffusers' ``dtype`` gives the same, but searches all modules at every call: a twentieth of a tiny model's forward.
    """
    weights = ((name, p) for name, p in transformer.named_parameters() if p.is_floating_point())
    return next(p.dtype for name, p in weights if not keeps_float32(transformer, name))


def keeps_float32(transformer: nn.Module, name: str) -> bool:
    """The transformer's class keeps the parameter with this full ``name`` in float32 whatever its own precision."""
    kept = getattr(transformer, "_keep_in_fp32_modules", None) or ()
    return not {*kept}.isdisjoint(name.split("."))
