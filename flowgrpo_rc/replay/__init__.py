"""Images that are learned from more than once: the buffer of finished mini-batches. Floor 5.

The configuration needs no torch.
"""

from typing import TYPE_CHECKING

from flowgrpo_rc.lazy import lazy_names

if TYPE_CHECKING:
    from flowgrpo_rc.replay.buffer import Entry as Entry
    from flowgrpo_rc.replay.buffer import ReplayBuffer as ReplayBuffer
    from flowgrpo_rc.replay.buffer import Replayed as Replayed
    from flowgrpo_rc.replay.config import ReplayConfig as ReplayConfig

__getattr__, __dir__ = lazy_names(__name__)
