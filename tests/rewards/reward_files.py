"""Reward functions written to files, as a user's are."""

import textwrap
from pathlib import Path
from typing import Any

import numpy as np

from flowgrpo_rc.rewards import CustomRewardConfig, RewardConfig, RewardMix, build_reward

IMAGES = np.arange(3 * 8 * 8 * 3, dtype=np.uint8).reshape(3, 8, 8, 3)
PROMPTS = ["a", "bb", "ccc"]
METADATA: list[dict[str, Any]] = [
    {
        "data_source": "test/ocr",
        "reward_model": {"style": "model", "ground_truth": prompt.upper()},
        "extra_info": {"index": index},
    }
    for index, prompt in enumerate(PROMPTS)
]
"""Rows as verl-omni's data preparation, and ours, lay them out."""

IMPORTS = "import asyncio, os, signal, sys, threading, time, warnings\nimport numpy as np\nimport torch\n"
GOOD = "return [1.0, 2.0, 3.0]"


def write(folder: Path, text: str, name: str = "mine.py") -> Path:
    """The file `name` with these lines after a line of imports."""
    path = folder / name
    path.write_text(IMPORTS + textwrap.dedent(text))
    return path


def function(body: str) -> str:
    """A function `f` of our form with this body."""
    return "def f(images, prompts, metadata):\n" + textwrap.indent(textwrap.dedent(body), "    ")


def build(path: Path, *, timeout_s: float | None = 60.0, **custom: Any) -> RewardMix:
    """The reward `f` of that file alone."""
    config = CustomRewardConfig(path=str(path), **{"name": "f", **custom})
    return build_reward(RewardConfig(custom_reward_function=config, timeout_s=timeout_s))
