"""SDE windows: which of a schedule's steps are stochastic and trained; every other step is an ODE step.

Loads no torch, so that the configuration checks its window with the code that the run uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowgrpo_rc.sde.types import sde_type_named

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class SDEWindow:
    """``size`` contiguous steps that start at random in ``[first, stop - size]``, drawn once per prompt group.

    Restricting the stochastic steps follows MixGRPO (arXiv 2507.21802).
    """

    size: int
    first: int
    stop: int

    @classmethod
    def for_schedule(
        cls, num_steps: int, size: int | None, window_range: Sequence[int] | None, *, sde_type: str = "sde"
    ) -> SDEWindow:
        """The window for a schedule of ``num_steps`` steps.

        ``size=None`` trains every step of the range; ``window_range=None`` is the whole schedule. The last
        step of a ``cps`` schedule ends at noise level 0 and is deterministic, so no ``cps`` window holds it.

        Raises:
            ValueError: ``sde_type`` is unknown, the range lies outside the schedule, or the window does not fit into
                the range.
        """
        # A deterministic step has no log-prob and cannot be trained.
        usable = num_steps if sde_type_named(sde_type).last_step_is_stochastic else num_steps - 1
        first, stop = (0, usable) if window_range is None else window_range
        if not 0 <= first < stop <= usable:
            why = "" if usable == num_steps else f" (the last {sde_type} step is deterministic)"
            raise ValueError(
                f"sde_window_range: got [{first}, {stop}]; with num_inference_steps={num_steps} and "
                f"sde_type={sde_type} it must lie in [0, {usable}]{why} and must satisfy 0 <= first < stop"
            )
        size = stop - first if size is None else size
        if not 1 <= size <= stop - first:
            raise ValueError(
                f"sde_window_size: got {size}; the range [{first}, {stop}] holds {stop - first} steps, so choose a "
                f"size from 1 to {stop - first}"
            )
        return cls(size, first, stop)


def draw_window_start(window: SDEWindow, generator: torch.Generator) -> int:
    """First step of the window, uniform over ``first .. stop - size`` (both included)."""
    import torch

    high = window.stop - window.size + 1  # randint excludes its upper end
    return int(torch.randint(window.first, high, (), generator=generator))


def progressive_window_start(window: SDEWindow, step: int, iters_per_group: int) -> int:
    """First step of a window that slides through the range: on by ``size`` every ``iters_per_group`` batches.

    The last place is moved back to fit into the range; after it the window starts over. MixGRPO's progressive
    strategy (arXiv 2507.21802).
    """
    places = progressive_places(window)
    return places[step // iters_per_group % len(places)]


def progressive_places(window: SDEWindow) -> list[int]:
    """The first steps that a sliding window takes, in order."""
    last = window.stop - window.size
    # A set, because the last place may already be a multiple of the size.
    return sorted({*range(window.first, last, window.size), last})
