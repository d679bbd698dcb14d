"""SDE windows: which of a schedule's steps are stochastic and trained; every other step is an ODE step."""

from dataclasses import dataclass

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
        cls, num_steps: int, size: int | None, window_range: tuple[int, int] | None, *, sde_type: str = "sde"
    ) -> "SDEWindow":
        """The window for a schedule of ``num_steps`` steps.

        ``size=None`` trains every step of the range; ``window_range=None`` is the whole schedule. The last
        step of a ``cps`` schedule ends at noise level 0 and is deterministic, so no ``cps`` window holds it.

        Raises:
            ValueError: the range lies outside the schedule, or the window does not fit into the range.
        """
        usable = num_steps - 1 if sde_type == "cps" else num_steps
        first, stop = (0, usable) if window_range is None else (int(window_range[0]), int(window_range[1]))
        if not 0 <= first < stop:
            raise ValueError(f"sde_window_range=[{first}, {stop}] must satisfy 0 <= first < stop")
        if stop > usable:
            why = " (the last cps step is deterministic)" if sde_type == "cps" else ""
            raise ValueError(
                f"sde_window_range=[{first}, {stop}] lies outside the schedule: num_inference_steps={num_steps} "
                f"has trainable steps [0, {usable}]{why}; lower the range or raise num_inference_steps"
            )
        size = stop - first if size is None else int(size)
        if not 1 <= size <= stop - first:
            raise ValueError(
                f"sde_window_size={size} does not fit into sde_window_range=[{first}, {stop}]; "
                f"choose a size from 1 to {stop - first}"
            )
        return cls(size, first, stop)


def draw_window_start(window: SDEWindow, generator: torch.Generator) -> int:
    """First step of the window, uniform over ``first .. stop - size`` (both included)."""
    high = window.stop - window.size + 1
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
    return sorted({*range(window.first, last, window.size), last})
