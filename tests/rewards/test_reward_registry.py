"""The table of built-in rewards: what is added to it can be configured, built and trained with at once."""

import sys
from pathlib import Path
from pkgutil import resolve_name

import numpy as np
import pytest

from flowgrpo_rc.rewards import REWARD_NAMES, RewardConfig, build_reward
from flowgrpo_rc.rewards.check.findings import EXPECTATIONS
from flowgrpo_rc.rewards.registry import REWARDS

SOURCE = """
import numpy as np

def redness(images, prompts, metadata):
    return images[..., 0].mean((1, 2)) / 255

class Contrast:
    def __call__(self, images, prompts, metadata):
        return np.ptp(images.reshape(len(images), -1), axis=1)
"""


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file with two rewards, and their lines in the table."""
    (tmp_path / "added_rewards.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(REWARDS, "redness", "added_rewards:redness")
    monkeypatch.setitem(REWARDS, "contrast", "added_rewards:Contrast")
    yield
    sys.modules.pop("added_rewards", None)


@pytest.mark.usefixtures("added")
def test_a_line_in_the_table_makes_a_reward() -> None:
    config = RewardConfig(functions={"redness": 2.0, "contrast": -0.5})
    assert {"redness", "contrast"} <= set(REWARD_NAMES)
    with pytest.raises(ValueError, match=f"known are {', '.join(REWARD_NAMES)}, and a function"):
        RewardConfig(functions={"oxr": 1.0})
    images = np.zeros((2, 4, 4, 3), np.uint8)
    images[1, ..., 0] = 51
    result = build_reward(config)(images, ["a", "b"])
    # 2 * [0, 51 / 255] - 0.5 * [0, 51]
    np.testing.assert_allclose(result.total, [0.0, 0.4 - 25.5], rtol=1e-6)


@pytest.mark.parametrize("name", REWARDS)
def test_every_line_leads_somewhere(name: str) -> None:
    assert callable(resolve_name(REWARDS[name]))
    assert name in EXPECTATIONS
