"""Rewards: what an image is worth, given its prompt.

``registry`` names the built-in rewards (``ocr``, ``jpeg``), ``custom`` loads a function of the user's own, and ``mix``
makes their weighted sum. ``forms`` calls a function as it is written, ``answer`` checks what it returns, and
``isolation`` keeps it from ending, hanging or changing the run. Importing this package loads no engine;
``build_reward`` does.
"""

from flowgrpo_rc.rewards.config import REWARD_NAMES as REWARD_NAMES
from flowgrpo_rc.rewards.config import STATISTICS as STATISTICS
from flowgrpo_rc.rewards.config import CustomRewardConfig as CustomRewardConfig
from flowgrpo_rc.rewards.config import OCRConfig as OCRConfig
from flowgrpo_rc.rewards.config import RewardConfig as RewardConfig
from flowgrpo_rc.rewards.custom import load_function as load_function
from flowgrpo_rc.rewards.custom import load_reward as load_reward
from flowgrpo_rc.rewards.errors import RewardError as RewardError
from flowgrpo_rc.rewards.jpeg import jpeg_compressibility as jpeg_compressibility
from flowgrpo_rc.rewards.mix import RewardFunction as RewardFunction
from flowgrpo_rc.rewards.mix import RewardMix as RewardMix
from flowgrpo_rc.rewards.mix import RewardResult as RewardResult
from flowgrpo_rc.rewards.mix import build_observers as build_observers
from flowgrpo_rc.rewards.mix import build_reward as build_reward
from flowgrpo_rc.rewards.ocr import OCRReward as OCRReward
from flowgrpo_rc.rewards.ocr import quoted_target as quoted_target
from flowgrpo_rc.rewards.ocr import text_similarity as text_similarity
