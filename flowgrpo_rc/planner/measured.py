"""Memory and operations of a run's passes, measured under fake tensors once and interpolated in the number of rows."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from flowgrpo_rc.dtypes import torch_dtype
from flowgrpo_rc.planner.passes import Passes, Usage
from flowgrpo_rc.planner.pipeline import FakePipeline, bytes_of, parameters_of
from flowgrpo_rc.planner.settings import PlannedRun

# Most rows of a measured pass: a transformer that takes its rows one by one, as Z-Image's does, needs a second for
# so many.
MOST_ROWS = 32


@dataclass(frozen=True)
class Sizes:
    """Bytes of a pipeline's weights, and numbers of parameters."""

    transformer: int
    """Frozen weights of the transformer, without buffers."""
    buffers: int
    """Buffers of the transformer, which sharding leaves whole."""
    gathered: int
    """Weights that sharding gathers on every GPU: a block at work and the next one, the two largest neighbours, and the
    weights outside of blocks."""
    vae: int
    text_encoders: int
    parameters: int
    """Parameters of the transformer."""
    lora_parameters: int


class Measured:
    """Passes of one model in one precision.

    Args:
        run: its settings.
        of_engine: measure the engine's transformer, in the engine's precision, LoRA included.
    """

    def __init__(self, run: PlannedRun, *, of_engine: bool = False) -> None:
        self.run = run
        dtype = run.rollout.dtype if of_engine else run.model.dtype
        lora_dtype = run.rollout.dtype if of_engine else run.model.lora_dtype
        self._pipeline = FakePipeline(run.model.path, torch_dtype(dtype))
        # Numbers of the weights are taken before the LoRA joins them.
        transformer = self._pipeline.transformer
        self._parameters = parameters_of(transformer)
        self._weights = sum(p.numel() * p.element_size() for p in transformer.parameters())
        autocast = run.autocast and not of_engine
        self._passes = Passes(self._pipeline, run.model, lora_dtype, run.rollout, autocast=autocast)
        self.kinds = [(kind.name, len(kind.blocks)) for kind in self._passes.kinds]
        """Class and number of the blocks of each kind, in order."""
        self._known: dict[tuple[Any, ...], Usage] = {}

    @cached_property
    def sizes(self) -> Sizes:
        """Of all parts."""
        blocks = [self._passes.block_bytes[id(kind)] for kind in self._passes.kinds for _ in kind.blocks]
        # FSDP prefetches the next block while one computes.
        pairs = [a + b for a, b in zip(blocks, [*blocks[1:], 0], strict=True)]
        return Sizes(
            transformer=self._weights,
            buffers=self._passes.base_bytes - self._weights,
            gathered=max(pairs, default=0) + self._weights - sum(blocks),
            vae=bytes_of(self._pipeline.vae),
            text_encoders=sum(map(bytes_of, self._pipeline.text_encoders)),
            parameters=self._parameters,
            lora_parameters=self._passes.lora_parameters,
        )

    def update(self, rows: int, *, recompute: bool, accumulates: bool) -> Usage:
        """Forward and backward of ``rows``, images times steps of the window."""
        actor = self.run.actor
        measure = partial(
            self._passes.update,
            recompute=recompute,
            reference=actor.use_kl_loss,
            detached=actor.detach_unconditional,
            accumulates=accumulates,
        )
        return self._at_rows(rows, ("update", recompute, accumulates), measure)

    def forward(self, rows: int) -> Usage:
        """A forward of ``rows`` without gradients."""
        return self._at_rows(rows, ("forward",), self._passes.forward)

    def decode(self, images: int) -> Usage:
        """Decoding of a micro-batch of the engine."""
        if ("decode", images) not in self._known:
            self._known["decode", images] = self._passes.decode(images)
        return self._known["decode", images]

    def _at_rows(self, rows: int, name: tuple[Any, ...], measure: Callable[[int], Usage]) -> Usage:
        """Interpolate between the configured micro-batch, or ``MOST_ROWS``, and twice its rows."""
        # Two measurements determine the line; a run's own micro-batch is exact.
        usual = min(self.run.micro_rows(1), MOST_ROWS)
        for at in {usual} if rows == usual else {usual, 2 * usual}:
            if (*name, at) not in self._known:
                self._known[(*name, at)] = measure(at)
        known = self._known[(*name, usual)]
        if rows == usual:
            return known
        return known.moved(known, self._known[(*name, 2 * usual)], rows / usual - 1)
