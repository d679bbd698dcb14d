"""One SDE transition for sampling and for scoring, and the windows in which it is stochastic.

Floor 1: imports torch and nothing else of this package but the ground. Names load on first use; the table of SDE types
and the windows need no torch.
"""

from typing import TYPE_CHECKING

from flowgrpo_rc.lazy import lazy_names

if TYPE_CHECKING:
    from flowgrpo_rc.sde.transitions import Transition as Transition
    from flowgrpo_rc.sde.transitions import draw as draw
    from flowgrpo_rc.sde.transitions import gaussian_log_prob as gaussian_log_prob
    from flowgrpo_rc.sde.transitions import log_prob as log_prob
    from flowgrpo_rc.sde.transitions import transition as transition
    from flowgrpo_rc.sde.transitions import transition_kl as transition_kl
    from flowgrpo_rc.sde.types import SDE_TYPES as SDE_TYPES
    from flowgrpo_rc.sde.window import SDEWindow as SDEWindow
    from flowgrpo_rc.sde.window import draw_window_start as draw_window_start
    from flowgrpo_rc.sde.window import progressive_places as progressive_places
    from flowgrpo_rc.sde.window import progressive_window_start as progressive_window_start

__getattr__, __dir__ = lazy_names(__name__)
