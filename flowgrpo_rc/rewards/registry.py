"""The built-in rewards by name.

To add one, write it in a file of this folder and add a line to ``REWARDS``. Importing this loads no reward.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

REWARDS = {
    "jpeg_compressibility": "flowgrpo_rc.rewards.jpeg:jpeg_compressibility",
    "judge": "flowgrpo_rc.rewards.judge.reward:JudgeReward",
    "ocr": "flowgrpo_rc.rewards.ocr:OCRReward",
}
"""Name in ``reward.functions`` -> where the reward is, as ``module:attribute``.

A function is called as ``fn(images, prompts, metadata)``. A class is made into such a function once a run: with its
section of ``RewardConfig`` where there is one of the reward's name, otherwise without arguments."""

DEFAULT_REWARD = "ocr"
"""The reward of a run that names none, with weight 1."""


def load_builtin(name: str, options: Any = None) -> Any:
    """The built-in reward of this name, made with its section of the configuration; None where it has none.

    Raises:
        ImportError: a package that the reward needs is not installed.
    """
    reward = resolve_name(REWARDS[name])
    if not isinstance(reward, type):
        return reward
    return reward() if options is None else reward(options)
