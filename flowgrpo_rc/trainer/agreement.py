"""All processes of a launch train one run: they must have the same settings, prompts and model. Processes that differ
would train on together, and no configuration would describe the result."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object

from flowgrpo_rc import __version__
from flowgrpo_rc.data import PromptRecord
from flowgrpo_rc.models.digests import short_digest
from flowgrpo_rc.rewards import RewardConfig
from flowgrpo_rc.trainer.config import FlowGRPOConfig

NAMED = 5
"""Differences that a message names at most."""


def require_agreement(own: Mapping[str, Any], gather: Callable[[list[Any]], list[Any]] = gather_object) -> None:
    """Raise ``ValueError`` on every process unless ``own`` is equal on all of them; every process must call it.

    Args:
        own: nested mappings of values with a ``repr`` that depends on the value alone.
        gather: concatenates the lists of all processes in rank order.
    """
    flat = {key: repr(value) for key, value in flatten(own).items()}
    everyones = gather([flat])
    keys = sorted({key for one in everyones for key in one})
    different = [key for key in keys if len({one.get(key) for one in everyones}) > 1]
    named = []
    for key in different[:NAMED]:
        ranks: dict[str, list[str]] = {}
        for rank, one in enumerate(everyones):
            ranks.setdefault(one.get(key, "absent")[:80], []).append(str(rank))
        values = " and ".join(f"{value} on rank(s) {', '.join(having)}" for value, having in ranks.items())
        named.append(f"{key} is {values}")
    if different:
        more = f"; and {len(different) - NAMED} more" if len(different) > NAMED else ""
        raise ValueError(
            f"the processes of this run do not agree: {'; '.join(named)}{more}. Start every process with the same "
            "settings and files"
        )


def settings_of(
    config: FlowGRPOConfig, train: Sequence[PromptRecord], validation: Sequence[PromptRecord]
) -> dict[str, Any]:
    """Everything that the processes read before they know of each other: settings, and the content of files."""
    settings = config.to_dict()
    # Only the main process writes there, and a probe gives every process a temporary folder of its own.
    del settings["trainer"]["default_local_dir"]
    return {
        "flowgrpo_rc": __version__,
        **settings,
        # Content too: the same path may be another file on another machine.
        f"content of data.{'preferences' if config.data.preferences else 'train_files'}": prompts_digest(train),
        "content of data.val_files": prompts_digest(validation),
        "content of rewards": content_of_rewards(config.reward),
    }


def content_of_rewards(reward: RewardConfig) -> dict[str, str]:
    """Digests of the user's own functions' files, by name."""
    return {
        # A module's name, which the reward imports, is no file.
        name: short_digest(file.read_bytes()) if (file := Path(own.path).expanduser()).is_file() else own.path
        for name, own in reward.own_functions().items()
    }


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"a.b": value}`` of nested mappings."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def prompts_digest(records: Sequence[PromptRecord]) -> str:
    """A digest of prompts, images and metadata."""
    content = []
    for record in records:
        # Images count by their digests, since the paths may differ from machine to machine.
        metadata = {name: value for name, value in record.metadata.items() if name != "images"}
        content.append(
            (record.prompt, record.negative_prompt, [image.digest for image in record.images + record.pair], metadata)
        )
    return short_digest(repr(content).encode("utf-8", "backslashreplace"))
