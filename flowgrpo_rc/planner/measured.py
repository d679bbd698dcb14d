"""Memory and operations of a run's passes, measured under fake tensors once and interpolated in the number of rows."""

from collections.abc import Callable
from functools import cache, partial

from flowgrpo_rc.dtypes import torch_dtype
from flowgrpo_rc.planner.passes import Passes, Usage
from flowgrpo_rc.planner.pipeline import FakePipeline
from flowgrpo_rc.planner.settings import PlannedRun

# Most rows of a measured pass: a transformer that takes its rows one by one, as Z-Image's does, needs a second for
# so many.
MOST_ROWS = 32


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
        pipeline = FakePipeline(run.model.path, torch_dtype(dtype))
        autocast = run.autocast and not of_engine
        passes = Passes(pipeline, run.model, lora_dtype, run.rollout, autocast=autocast)
        self.sizes = passes.sizes
        """Sizes of the pipeline and of the LoRA."""
        self.kinds = passes.kinds
        """The transformer's blocks, by kind."""
        self.decode = cache(passes.decode)
        """Decoding of a micro-batch of the engine, by its number of images."""
        self._forward = cache(passes.forward)
        self._update = cache(passes.update)

    def update(self, rows: int, *, recompute: bool, accumulates: bool) -> Usage:
        """Forward and backward of ``rows``, images times steps of the window."""
        actor = self.run.actor
        given = {"reference": actor.use_kl_loss, "detached": actor.detach_unconditional}
        return self._at_rows(rows, partial(self._update, recompute=recompute, accumulates=accumulates, **given))

    def forward(self, rows: int) -> Usage:
        """A forward of ``rows`` without gradients."""
        return self._at_rows(rows, self._forward)

    def _at_rows(self, rows: int, measure: Callable[[int], Usage]) -> Usage:
        """Interpolate between the configured micro-batch, or ``MOST_ROWS``, and twice its rows."""
        # Two measurements determine the line; a run's own micro-batch is exact.
        usual = min(self.run.micro_rows(1), MOST_ROWS)
        known = measure(usual)
        if rows == usual:
            return known
        return known.moved(known, measure(2 * usual), rows / usual - 1)
