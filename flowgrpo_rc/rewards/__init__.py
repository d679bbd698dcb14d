"""Rewards: what an image is worth, given its prompt.

``registry`` names the built-in rewards (``ocr``, ``jpeg``), ``custom`` loads a function of the user's own, and ``mix``
makes their weighted sum. ``forms`` calls a function as it is written, ``answer`` checks what it returns, and
``isolation`` keeps it from ending, hanging or changing the run. Importing this package loads no engine;
``build_reward`` does.
"""

from flowgrpo_rc.rewards.config import REWARD_NAMES, STATISTICS, CustomRewardConfig, OCRConfig, RewardConfig
from flowgrpo_rc.rewards.custom import load_function, load_reward
from flowgrpo_rc.rewards.errors import RewardError
from flowgrpo_rc.rewards.jpeg import jpeg_compressibility
from flowgrpo_rc.rewards.mix import RewardFunction, RewardMix, RewardResult, build_reward
from flowgrpo_rc.rewards.ocr import OCRReward, quoted_target, text_similarity

__all__ = [
    "REWARD_NAMES",
    "STATISTICS",
    "CustomRewardConfig",
    "OCRConfig",
    "OCRReward",
    "RewardConfig",
    "RewardError",
    "RewardFunction",
    "RewardMix",
    "RewardResult",
    "build_reward",
    "jpeg_compressibility",
    "load_function",
    "load_reward",
    "quoted_target",
    "text_similarity",
]
