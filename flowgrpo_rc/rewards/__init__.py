"""Rewards: the worth of an image, given its prompt.

``registry`` names the built-in rewards (``ocr``, ``judge``, those of ``clip``, ...) and ``custom`` loads a function of
the user's own. ``mix`` makes their weighted sum, ``scoring`` makes it from parts of a batch. ``forms`` calls a function
in the form that its signature has, ``user_code`` bounds and reports the call, and ``answer`` checks the result.
Importing this package loads no engine; ``build_reward`` does.
"""

from flowgrpo_rc.rewards.answer import RewardError as RewardError
from flowgrpo_rc.rewards.config import REWARD_NAMES as REWARD_NAMES
from flowgrpo_rc.rewards.config import AestheticConfig as AestheticConfig
from flowgrpo_rc.rewards.config import CustomRewardConfig as CustomRewardConfig
from flowgrpo_rc.rewards.config import HPSv2Config as HPSv2Config
from flowgrpo_rc.rewards.config import OCRConfig as OCRConfig
from flowgrpo_rc.rewards.config import RewardConfig as RewardConfig
from flowgrpo_rc.rewards.config import RewardModelConfig as RewardModelConfig
from flowgrpo_rc.rewards.config import ScorerConfig as ScorerConfig
from flowgrpo_rc.rewards.custom import load_function as load_function
from flowgrpo_rc.rewards.custom import load_reward as load_reward
from flowgrpo_rc.rewards.http_client import ServerError as ServerError
from flowgrpo_rc.rewards.jpeg import jpeg_compressibility as jpeg_compressibility
from flowgrpo_rc.rewards.judge.config import JudgeConfig as JudgeConfig
from flowgrpo_rc.rewards.judge.config import JudgeQuestion as JudgeQuestion
from flowgrpo_rc.rewards.judge.reward import JudgeReward as JudgeReward
from flowgrpo_rc.rewards.mix import RewardFunction as RewardFunction
from flowgrpo_rc.rewards.mix import RewardMix as RewardMix
from flowgrpo_rc.rewards.mix import RewardResult as RewardResult
from flowgrpo_rc.rewards.mix import build_observers as build_observers
from flowgrpo_rc.rewards.mix import build_reward as build_reward
from flowgrpo_rc.rewards.ocr import OCRReward as OCRReward
from flowgrpo_rc.rewards.ocr import quoted_target as quoted_target
from flowgrpo_rc.rewards.ocr import text_similarity as text_similarity
from flowgrpo_rc.rewards.registry import STATISTICS as STATISTICS
from flowgrpo_rc.rewards.scoring import PartialScoring as PartialScoring
