"""Bytes and operations of a forward, an update or a decoding, run under fake tensors and scaled to full depth.

The blocks of a transformer repeat, and bytes and operations are linear in their number. So a transformer runs with
``SHORT`` blocks of every kind, then with twice as many of one kind after the other; the difference is the cost of a
further block. The overall peak is not linear, as it may lie elsewhere in a deeper model. The peaks of single stretches
are: a stretch is the time in the first or the last block of a kind.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.overrides import TorchFunctionMode

from flowgrpo_rc.dtypes import torch_dtype
from flowgrpo_rc.models.base import Conditioning, Prompts
from flowgrpo_rc.models.config import ModelConfig
from flowgrpo_rc.models.lora import adapter_active, adapter_parameters, attach_lora, linear_layers, target_layers
from flowgrpo_rc.models.registry import FAMILIES
from flowgrpo_rc.planner.live_bytes import LiveBytes
from flowgrpo_rc.planner.pipeline import FakePipeline, PlanError, bytes_of, replace_tensors
from flowgrpo_rc.prompt import ReferenceImage
from flowgrpo_rc.rollout.config import RolloutConfig
from flowgrpo_rc.sde import log_prob, transition

# Pixels of a side of a reference image; every family scales it down.
LARGE = 4096
# Parts of a stretch's label.
_BACKWARD = "backward"
_INNER = "inner"
# Blocks of a kind in the shorter of the two runs that are compared: a first one and a last one.
SHORT = 2


@dataclass(frozen=True)
class Usage:
    """Bytes and operations of one pass, without the weights."""

    peaks: tuple[int, ...]  # Most bytes alive in each stretch of the pass; gradients of the LoRA among them
    forward_flops: int  # Operations of the forward passes
    backward_flops: int = 0  # Operations of the backward pass, without recomputation
    recomputed_flops: int = 0  # Operations that gradient checkpointing repeats

    @property
    def peak(self) -> int:
        """Most bytes alive at a time."""
        return max(self.peaks)

    def moved(self, start: "Usage", end: "Usage", steps: float) -> "Usage":
        """``self + steps * (end - start)``, number by number.

        Raises:
            ValueError: the three differ in their stretches, so they are not of one model.
        """

        def numbers(usage: Usage) -> tuple[int, ...]:
            return usage.forward_flops, usage.backward_flops, usage.recomputed_flops, *usage.peaks

        moves = zip(numbers(self), numbers(start), numbers(end), strict=True)
        forward, backward, recomputed, *peaks = (round(own + steps * (to - since)) for own, since, to in moves)
        return Usage(tuple(peaks), forward, backward, recomputed)


@dataclass(frozen=True)
class Kind:
    """Blocks of the same shape that follow each other."""

    name: str  # The blocks' class
    place: str  # Name of their list in the transformer
    blocks: tuple[nn.Module, ...]


@dataclass(frozen=True)
class Sizes:
    """Bytes of a pipeline's weights, and numbers of parameters."""

    transformer: int  # Frozen weights of the transformer, without buffers
    buffers: int  # Buffers of the transformer, which sharding leaves whole
    gathered: int
    """Weights that sharding gathers on every GPU: a block at work and the next one, the two largest neighbours, and the
    weights outside of blocks."""
    vae: int
    text_encoders: int
    parameters: int  # Parameters of the transformer
    lora_parameters: int
    adapted: int  # Parameters of the layers that have a LoRA, without it


def kinds_of(transformer: nn.Module) -> list[Kind]:
    """The transformer's blocks in order, by kind; ``_no_split_modules`` names the modules that are blocks."""

    def shape(block: nn.Module) -> tuple[Any, ...]:
        # Blocks of one class may differ, as the last one of SD3 does.
        return type(block), [(name, p.shape) for name, p in block.named_parameters()]

    names = set(getattr(transformer, "_no_split_modules", None) or ())
    found = []
    for place, module in transformer.named_modules():
        if isinstance(module, nn.ModuleList):
            blocks = [block for block in module if type(block).__name__ in names]
            alike = (tuple(group) for _, group in itertools.groupby(blocks, key=shape))
            found += [Kind(type(group[0]).__name__, place, group) for group in alike]
    return found


class WholePrompts(TorchFunctionMode):
    """Inside, every prompt has all its ``tokens``, as a transformer may read their number from the mask, which is
    fake and has no values."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self._tokens = tokens

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.item and isinstance(args[0], FakeTensor) and not args[0].is_floating_point():
            return self._tokens
        return func(*args, **(kwargs or {}))


class Passes:
    """Passes of actor and engine through a fake transformer with a LoRA.

    Args:
        pipeline: its transformer gets the LoRA.
        lora: rank, targets, and the number of calls for guidance.
        lora_dtype: precision of the LoRA's weights.
        lora_compute_dtype: precision of its products; ``None``: as its weights.
        rollout: image size, prompt length, guidance, and the kind of the stochastic steps.
        autocast: run forwards under bfloat16 autocast.

    Raises:
        ValueError: the model cannot draw this size, or a target module is none of its layers.
    """

    def __init__(
        self,
        pipeline: FakePipeline,
        lora: ModelConfig,
        lora_dtype: str,
        rollout: RolloutConfig,
        *,
        autocast: bool,
        lora_compute_dtype: str | None = None,
    ) -> None:
        asked = rollout.pipeline
        pipeline.model.check_request(asked.height, asked.width, asked.guidance_scale, asked.true_cfg_scale)
        pipeline.model.batch_guidance = lora.batch_guidance
        self._pipeline = pipeline
        self._rollout = rollout
        tokens = pipeline.model.prompt_tokens(asked.max_sequence_length)
        multiple = lora.prompt_length_multiple if pipeline.model.masks_prompts else 1
        self._tokens = -(-tokens // multiple) * multiple  # Embeddings of the longest prompt
        self._autocast = autocast
        self.transformer = pipeline.transformer
        self.kinds = kinds_of(self.transformer)
        """Its blocks, by kind."""
        # Weights are counted before the LoRA joins them.
        weights = sum(p.numel() * p.element_size() for p in self.transformer.parameters())
        blocks = [bytes_of(kind.blocks[0]) for kind in self.kinds for _ in kind.blocks]
        layers = linear_layers(self.transformer)
        adapted = [layers[name] for name in target_layers(self.transformer, pipeline.model, lora)]
        # FSDP prefetches the next block while one computes.
        pairs = [a + b for a, b in zip(blocks, [*blocks[1:], 0], strict=True)]
        self.sizes = Sizes(
            transformer=weights,
            buffers=bytes_of(self.transformer) - weights,
            gathered=max(pairs, default=0) + weights - sum(blocks),
            vae=bytes_of(pipeline.vae),
            text_encoders=sum(map(bytes_of, pipeline.text_encoders)),
            parameters=pipeline.parameters,
            lora_parameters=self._attach(lora, lora_dtype, lora_compute_dtype or lora_dtype),
            adapted=sum(layer.in_features * layer.out_features for layer in adapted),
        )
        # Rotary embeddings and the like are cached by the first pass, so no measured pass may be the first.
        self._at([min(SHORT, len(kind.blocks)) for kind in self.kinds], partial(self._forward, 1))

    def _attach(self, lora: ModelConfig, dtype: str, compute_dtype: str) -> int:
        """Attach the LoRA to the blocks that run; returns the number of its parameters in all blocks."""
        # Blocks of one shape count as equal, so their LoRAs must be equal too.
        targets = [lora.target_modules] if isinstance(lora.target_modules, str) else lora.target_modules or ()
        single = [target for target in targets for kind in self.kinds if re.search(rf"{kind.place}\.\d", target)]
        if single:
            raise PlanError(
                f"actor_rollout_ref.model.target_modules: {single[0]} names a single block; a plan takes layers that "
                "every block has, e.g. to_q"
            )
        deepest = [min(2 * SHORT, len(kind.blocks)) for kind in self.kinds]
        with self._with_blocks(deepest):
            # peft moves modules, which fake tensors refuse and tensors on the meta device allow.
            replace_tensors(self.transformer, lambda tensor: torch.empty_like(tensor, device="meta"))
            with torch.device("meta"):
                attach_lora(
                    self.transformer,
                    self._pipeline.model,
                    lora,
                    dtype=torch_dtype(dtype),
                    compute_dtype=torch_dtype(compute_dtype),
                )
            with self._pipeline.fake:
                replace_tensors(self.transformer, lambda tensor: torch.empty_like(tensor, device="cpu"))
            attached = _lora_parameters(self.transformer)
        further = [len(kind.blocks) - depth for kind, depth in zip(self.kinds, deepest, strict=True)]
        own = [_lora_parameters(kind.blocks[0]) for kind in self.kinds]
        return attached + sum(one * blocks for one, blocks in zip(own, further, strict=True))

    def update(self, rows: int, *, recompute: bool, reference: bool, detached: bool, accumulates: bool) -> Usage:
        """Measure forward and backward of one micro-batch.

        Args:
            rows: images times steps of the window.
            recompute: with gradient checkpointing.
            reference: with a forward without the LoRA, for the KL.
            detached: without a gradient through the unconditional half.
            accumulates: onto the gradients of earlier micro-batches.
        """
        # Dropout would allocate masks, and training runs without it.
        self.transformer.train(False)
        if recompute:
            self.transformer.enable_gradient_checkpointing()
        else:
            self.transformer.disable_gradient_checkpointing()
        return self._at_full_depth(partial(self._update, rows, reference, detached, accumulates))

    def forward(self, rows: int) -> Usage:
        """Measure a forward without gradients: a step of sampling, or of scoring."""
        return self._at_full_depth(partial(self._forward, rows))

    def decode(self, images: int) -> Usage:
        """Measure the decoding of latents to pixels."""
        model = self._pipeline.model
        size = self._rollout.pipeline.height, self._rollout.pipeline.width
        vae = self._pipeline.vae
        with self._pipeline.fake, torch.no_grad():
            latents = torch.empty(images, *model.latent_shape(*size))
            # Fake pixels cannot be read; by then the decoder has run.
            looked_at = suppress(DynamicOutputShapeException, DataDependentOutputException)
            with LiveBytes([*vae.parameters(), *vae.buffers()]) as live, looked_at:
                model.decode(latents, *size)
        return Usage((live.peak,), sum(stretch.flops for stretch in live.stretches))

    def _update(self, rows: int, reference: bool, detached: bool, accumulates: bool, live: LiveBytes) -> None:
        trained = list(adapter_parameters(self.transformer).values())
        if accumulates:
            for parameter in trained:
                parameter.grad = torch.empty_like(parameter)
        state = self._state(rows)
        other = None
        if reference:
            with torch.no_grad(), adapter_active(self.transformer, None):
                other, _ = self._policy(state, detached=detached)
        mean, log_probs = self._policy(state, detached=detached)
        # The real loss adds a few scalars per row; any scalar has the same backward pass.
        loss = log_probs.sum()
        if other is not None:
            loss = loss + (mean - other).square().sum()
        live.enter(_BACKWARD)
        loss.backward()
        for parameter in trained:
            parameter.grad = None

    def _forward(self, rows: int, live: LiveBytes) -> None:
        with torch.no_grad():
            self._policy(self._state(rows))

    def _state(self, rows: int) -> tuple[Tensor, Tensor, Conditioning]:
        """Latents, noise levels and conditioning of some rows."""
        asked = self._rollout.pipeline
        model = self._pipeline.model
        one = model.blank_prompt()
        tokens = self._tokens
        latents = torch.empty(rows, *model.latent_shape(asked.height, asked.width))
        # Reference images are large squares, as few as the family takes, and one if the settings have its area.
        images, most = FAMILIES[self._pipeline.class_name].images
        if asked.reference_area is not None:
            images = min(max(images, 1), most)
        large = ReferenceImage("", LARGE, LARGE, "a reference image")
        grids = tuple(model.reference_grid(large, asked.reference_area) for _ in range(images))
        references = sum(height * width for height, width in grids)
        prompts = Prompts(
            embeds=torch.empty(rows, tokens, one.embeds.shape[-1]),
            mask=torch.empty(rows, tokens, dtype=torch.bool) if model.masks_prompts else None,
            pooled=None if one.pooled is None else torch.empty(rows, len(one.pooled)),
            references=torch.empty(rows, references, latents.shape[-1]) if grids else None,
            reference_grids=grids,
            lengths=(tokens,) * rows if model.masks_prompts else None,
        )
        conditioning = Conditioning(
            prompts=prompts,
            negative=prompts if asked.true_cfg_scale > 1 else None,
            true_cfg_scale=asked.true_cfg_scale,
            guidance_scale=asked.guidance_scale,
            height=asked.height,
            width=asked.width,
        )
        return latents, torch.empty(rows), conditioning

    def _policy(self, state: tuple[Tensor, Tensor, Conditioning], *, detached: bool = False) -> tuple[Tensor, Tensor]:
        """Means and log-probs of a step, as the actor computes them."""
        latents, level, conditioning = state
        algo = self._rollout.algo
        with torch.autocast("cpu", torch.bfloat16) if self._autocast else nullcontext():
            velocity = self._pipeline.model.velocity(
                self.transformer, latents, level, conditioning, detach_unconditional=detached
            )
        step = transition(latents, velocity, level, level, noise_level=algo.noise_level, sde_type=algo.sde_type)
        return step.mean, log_prob(step, latents, sde_type=algo.sde_type)

    def _at_full_depth(self, run: Callable[[LiveBytes], None]) -> Usage:
        """Extrapolate the usage of ``run`` to all blocks."""
        depths = [min(SHORT, len(kind.blocks)) for kind in self.kinds]
        # The short run has all kinds, so that every stretch of the full model occurs in it.
        short = self._at(depths, run)
        usage = short
        for number, kind in enumerate(self.kinds):
            missing = len(kind.blocks) - depths[number]
            added = min(SHORT, missing)
            if missing:
                longer = self._at([*depths[:number], depths[number] + added, *depths[number + 1 :]], run)
                usage = usage.moved(short, longer, missing / added)
        return usage

    def _at(self, depths: Sequence[int], run: Callable[[LiveBytes], None]) -> Usage:
        """Measure a run with this many blocks of every kind."""
        resident = [*self.transformer.parameters(), *self.transformer.buffers()]
        whole = WholePrompts(self._tokens)
        with (
            self._pipeline.fake,
            whole,
            self._with_blocks(depths) as kept,
            LiveBytes(resident) as live,
            _labels(kept, live),
        ):
            run(live)
        return _usage(live)

    @contextmanager
    def _with_blocks(self, depths: Sequence[int]) -> Iterator[list[tuple[nn.Module, ...]]]:
        """Inside, the transformer has the first ``depths`` blocks of every kind; yields them."""
        # A forward pass loops over the list, so blocks that are not in it do not run.
        kept = [kind.blocks[:depth] for kind, depth in zip(self.kinds, depths, strict=True)]
        places: dict[str, list[nn.Module]] = {}
        for kind, blocks in zip(self.kinds, kept, strict=True):
            places.setdefault(kind.place, []).extend(blocks)
        whole = {place: self.transformer.get_submodule(place) for place in places}
        try:
            for place, blocks in places.items():
                self.transformer.set_submodule(place, nn.ModuleList(blocks))
            yield kept
        finally:
            for place, blocks in whole.items():
                self.transformer.set_submodule(place, blocks)


def _lora_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in adapter_parameters(module).values())


@contextmanager
def _labels(kept: Sequence[Sequence[nn.Module]], live: LiveBytes) -> Iterator[None]:
    """Inside, ``live`` enters a stretch for the kind of block, its place (first, inner, last) and the direction."""

    def begins(block: tuple[int, str], *_: Any) -> None:
        # Checkpointing runs a block forward again within the backward pass.
        backward = any(stretch.label == _BACKWARD for stretch in live.stretches)
        live.enter((*block, _BACKWARD if backward else "forward"))

    def ends(block: tuple[int, str], _module: nn.Module, _inputs: Any, output: Any) -> None:
        for tensor in output if isinstance(output, tuple) else (output,):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                # Module hooks for the backward pass miss blocks whose inputs need no gradient.
                tensor.register_hook(lambda _: live.enter((*block, _BACKWARD)))

    with ExitStack() as hooks:
        for kind, blocks in enumerate(kept):
            places = ["first", *[_INNER] * (len(blocks) - 2), "last"]
            for place, block in zip(places, blocks, strict=False):
                hooks.callback(block.register_forward_pre_hook(partial(begins, (kind, place))).remove)
                hooks.callback(block.register_forward_hook(partial(ends, (kind, place))).remove)
        yield


def _usage(live: LiveBytes) -> Usage:
    """Usage without stretches of inner blocks, whose peaks lie between those of the first and the last one."""
    peaks = tuple(stretch.peak for stretch in live.stretches if _INNER not in (stretch.label or ()))
    forward = [s for s in live.stretches if _BACKWARD not in (s.label or ())]
    backward = [s for s in live.stretches if _BACKWARD in (s.label or ())]
    recomputed = sum(stretch.recorded_flops for stretch in backward)
    return Usage(
        peaks,
        forward_flops=sum(stretch.flops for stretch in forward),
        backward_flops=sum(stretch.flops for stretch in backward) - recomputed,
        recomputed_flops=recomputed,
    )
