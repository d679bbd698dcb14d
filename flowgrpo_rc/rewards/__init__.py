"""Rewards: what an image is worth, given its prompt.

Importing this package loads no engine; `build_reward` does.
"""

from flowgrpo_rc.rewards.config import REWARD_NAMES, STATISTICS, CustomRewardConfig, OCRConfig, RewardConfig
from flowgrpo_rc.rewards.custom import load_function, load_reward
from flowgrpo_rc.rewards.errors import RewardError
from flowgrpo_rc.rewards.jpeg import jpeg_compressibility
from flowgrpo_rc.rewards.mix import RewardFunction, RewardMix, RewardResult, build_reward
from flowgrpo_rc.rewards.ocr import OCRReward
from flowgrpo_rc.rewards.text import quoted_target, text_similarity

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
