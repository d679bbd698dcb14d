"""One SDE transition for sampling and for scoring, and the windows in which it is stochastic.

Floor 1: imports torch and nothing else of this package but the ground. Names load on first use; the table of SDE types
and the windows need no torch.
"""

from typing import TYPE_CHECKING

from flowgrpo_rc.lazy import lazy_names

if TYPE_CHECKING:
    from flowgrpo_rc.sde.transitions import Transition, draw, gaussian_log_prob, log_prob, transition, transition_kl
    from flowgrpo_rc.sde.types import SDE_TYPES
    from flowgrpo_rc.sde.window import SDEWindow, draw_window_start, progressive_places, progressive_window_start

__all__ = [
    "SDE_TYPES",
    "SDEWindow",
    "Transition",
    "draw",
    "draw_window_start",
    "gaussian_log_prob",
    "log_prob",
    "progressive_places",
    "progressive_window_start",
    "transition",
    "transition_kl",
]

__getattr__, __dir__ = lazy_names(__name__)
