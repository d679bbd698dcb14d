"""The reward of pairs that a file gives."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from flowgrpo_rc.rewards.mix import RewardMix


def preference(images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Any]) -> list[float]:
    """1 for the chosen image of every pair, which comes first, and 0 for the rejected one."""
    return [1.0, 0.0] * (len(images) // 2)


def preference_reward() -> RewardMix:
    """The reward ``preference``."""
    return RewardMix({"preference": preference}, {"preference": 1.0}, builtin=["preference"])
