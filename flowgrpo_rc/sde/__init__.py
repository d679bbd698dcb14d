"""One SDE transition for sampling and for scoring, and the windows in which it is stochastic.

Floor 1: imports torch and nothing else of this package.
"""

from flowgrpo_rc.sde.transition import (
    SDE_TYPES,
    Transition,
    draw,
    gaussian_log_prob,
    log_prob,
    transition,
    transition_kl,
)
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
