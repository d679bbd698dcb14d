"""The built-in rewards by name, and the names that rewards may have.

To add a reward, write it in a file of this folder and add a line to ``REWARDS``. Importing this loads no reward.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from pkgutil import resolve_name
from typing import Any

REWARDS = {
    "jpeg_compressibility": "flowgrpo_rc.rewards.jpeg:jpeg_compressibility",
    "judge": "flowgrpo_rc.rewards.judge.reward:JudgeReward",
    "ocr": "flowgrpo_rc.rewards.ocr:OCRReward",
    "pickscore": "flowgrpo_rc.rewards.clip.text_image:PickScore",
    "clipscore": "flowgrpo_rc.rewards.clip.text_image:CLIPScore",
    "clip_cosine": "flowgrpo_rc.rewards.clip.text_image:CLIPCosine",
    "hpsv2": "flowgrpo_rc.rewards.clip.text_image:HPSv2",
    "aesthetic": "flowgrpo_rc.rewards.clip.text_image:Aesthetic",
    "clip_similarity": "flowgrpo_rc.rewards.clip.similarity:CLIPSimilarity",
    "dino_similarity": "flowgrpo_rc.rewards.clip.similarity:DINOSimilarity",
    "siglip_similarity": "flowgrpo_rc.rewards.clip.similarity:SigLIPSimilarity",
}
"""Name in ``reward.functions`` -> the reward as ``module:attribute``.

A function is called as ``fn(images, prompts, metadata)``. A class is made into such a function once a run: with its
section of ``RewardConfig`` where there is one of the reward's name, otherwise without arguments."""
DEFAULT_REWARD = "ocr"
"""The reward of a run that names none, with weight 1."""
STATISTICS = ("mean", "std", "max", "min", "group_std_mean", "zero_std_fraction")
"""Metrics ``reward/...`` of the total, beside ``reward/<name>`` and ``reward/std/<name>`` of every function, which may
have none of these names."""
Places = Sequence[str] | None
"""The origin of each prompt, e.g. ``train.txt:3``; None for its index."""
Rows = Sequence[Mapping[str, Any]] | None
"""The other columns of each prompt."""
METRIC_NAME = re.compile("[A-Za-z_][A-Za-z0-9_]*")
"""Names that every tracker can store as one level of a metric's name."""


def check_name(field_name: str, name: str, taken: Collection[str | None] = ()) -> None:
    """Raise ``ValueError`` unless ``reward/<name>`` is a metric of its own, which every tracker can store.

    Args:
        taken: the names of other rewards.
    """
    if name in STATISTICS:
        raise ValueError(
            f"{field_name}: got {name!r}, but the run logs reward/{name} about the total; rename your function, or "
            f"give it a second name in its file (my_{name} = {name})"
        )
    if not METRIC_NAME.fullmatch(name):
        metric = f"which becomes the metric reward/{name}"
        raise ValueError(f"{field_name}: got {name!r}, {metric}; use the letters a to z, digits and underscores")
    if name in taken:
        raise ValueError(f"{field_name}: another reward is called {name!r} too; rename this one")


def load_builtin(name: str, options: Any = None, workers: int = 0) -> Any:
    """The built-in reward ``name``, a function or an object of its class.

    Args:
        options: its section of the configuration; None where it has none.
        workers: number of processes of its own, for a class with ``worker_options``, which gives the options in each.

    Raises:
        ImportError: a package that the reward needs is not installed.
    """
    reward = resolve_name(REWARDS[name])
    if not isinstance(reward, type):
        return reward
    for_worker = getattr(reward, "worker_options", None)
    # Rewards on the GPU have no ``worker_options``: each process would hold a copy of the weights.
    if workers and for_worker is not None:
        from flowgrpo_rc.rewards.workers import WorkerReward

        return WorkerReward(name, for_worker(options), workers, getattr(reward, "streams", False))
    return reward() if options is None else reward(options)
