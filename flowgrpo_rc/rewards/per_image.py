"""Rewards with verl-omni's signature: one image a call, its ground truth from the prompt file's columns."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from flowgrpo_rc.rewards import awaiting
from flowgrpo_rc.rewards.errors import AnswerError, shown

IMAGE = "solution_image"
GIVEN = ("data_source", "ground_truth", "extra_info")
"""What such a function is given besides the image, by name."""

SCORE = "score"
"""Where a dict that it returns holds the score."""

_COLUMNS = {"data_source": "data_source", "ground_truth": "reward_model.ground_truth"}


class PerImageReward:
    """Calls `fn(data_source=, solution_image=, ground_truth=, extra_info=)` for every image of a batch.

    The image is a uint8 torch tensor (3, H, W) in RGB. The others are columns of the prompt file as verl-omni's data
    preparation lays them out: `data_source`, `reward_model: {"ground_truth": ...}` (a column `ground_truth` will do)
    and `extra_info`, to which `num_turns` (None) and `rollout_reward_scores` ({}) are added as there. Only parameters
    that the function declares are given, unless it takes `**kwargs`. It returns a number or a dict with `"score"`,
    whose other entries become `info`. Coroutines of a batch are awaited side by side.

    Args:
        function: the function.
        signature: of the function.
        shown: the function's name and parameters, for messages.
        kwargs: further keyword arguments of every call.

    Raises:
        ValueError: the function needs a parameter that nobody gives it, or torch is not installed.
    """

    def __init__(
        self, function: Callable[..., Any], signature: inspect.Signature, shown: str, kwargs: Mapping[str, Any]
    ) -> None:
        self.function = function
        self._shown = shown
        self._kwargs = dict(kwargs)
        if importlib.util.find_spec("torch") is None:
            raise ValueError(f"reward function {shown} takes its image as a torch tensor; install torch")
        parameters = signature.parameters.values()
        open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._takes = [name for name in GIVEN if open_ended or name in signature.parameters]
        by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self._needs = [p.name for p in by_name if p.default is p.empty and p.name in _COLUMNS]
        lacking = [p.name for p in by_name if p.default is p.empty and p.name not in (IMAGE, *GIVEN, *kwargs)]
        if lacking:
            raise ValueError(
                f"reward function {shown} needs {', '.join(lacking)}, which nothing here supplies; give it with "
                f"reward.custom_reward_function.reward_kwargs.{lacking[0]}=..."
            )
        try:
            signature.bind(**dict.fromkeys([IMAGE, *self._takes]), **self._kwargs)
        except TypeError as error:
            raise ValueError(
                f"reward function {shown} does not take its arguments by name ({error}); declare {IMAGE} and what "
                f"else it needs of {', '.join(GIVEN)} as ordinary parameters"
            ) from error

    def __call__(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> tuple[list[Any], dict[str, list[Any]]]:
        """The score of every image, and the other entries of what the function returned."""
        calls = [
            self._arguments(image, row, f"sample {index}, prompt {shown(prompts[index])},")
            for index, (image, row) in enumerate(zip(images, metadata, strict=True))
        ]
        answers: list[Any] = []
        try:
            for call in calls:
                answers.append(self.function(**call))
        except BaseException:
            _close(answers)
            raise
        waiting = [index for index, answer in enumerate(answers) if awaiting.is_awaitable(answer)]
        if waiting:
            for index, result in zip(waiting, awaiting.gather([answers[i] for i in waiting]), strict=True):
                answers[index] = result
        parts = [self._parts(answer, index) for index, answer in enumerate(answers)]
        keys = dict.fromkeys(key for _, extra in parts for key in extra)
        return [score for score, _ in parts], {key: [extra.get(key) for _, extra in parts] for key in keys}

    def check_metadata(self, metadata: Sequence[Mapping[str, Any]], sources: Sequence[str]) -> None:
        """Raise `ValueError` for the first row that lacks a column which the function needs."""
        for row, source in zip(metadata, sources, strict=True):
            self._columns(row, source, ValueError)

    def _arguments(self, image: np.ndarray, row: Mapping[str, Any], where: str) -> dict[str, Any]:
        import torch

        pixels = torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))
        return {IMAGE: pixels, **self._columns(row, where, AnswerError), **self._kwargs}

    def _columns(self, row: Mapping[str, Any], where: str, error: type[Exception]) -> dict[str, Any]:
        """What the function takes of one row of the prompt file; raises `error` where that is not there."""
        nested = row.get("reward_model")
        truth = nested.get("ground_truth") if isinstance(nested, Mapping) else None
        found = {
            "data_source": row.get("data_source"),
            "ground_truth": row.get("ground_truth") if truth is None else truth,
        }
        for name in self._needs:
            if found[name] is None:
                raise error(
                    f"{where} has no {_COLUMNS[name]}, which the reward function {self._shown} needs; add it as a "
                    "column of a .parquet or .jsonl file (a .txt file has none but the prompt), as "
                    "flowgrpo-rc prepare-data writes them"
                )
        extra = row.get("extra_info")
        if extra is not None and not isinstance(extra, Mapping):
            raise error(
                f"{where} has extra_info={shown(extra)}; the reward function {self._shown} expects a mapping there"
            )
        found["extra_info"] = {**(extra or {}), "num_turns": None, "rollout_reward_scores": {}}
        return {name: found[name] for name in self._takes if found[name] is not None}

    def _parts(self, answer: Any, index: int) -> tuple[Any, dict[str, Any]]:
        """Score and other entries of one image's answer."""
        if not isinstance(answer, Mapping):
            return answer, {}
        if SCORE not in answer:
            keys = ", ".join(map(shown, answer)) or "none"
            raise AnswerError(
                f"reward function {self._shown} returned for sample {index} a dict without the key {SCORE!r} (it has "
                f"{keys}); return a float, or a dict with {SCORE!r}"
            )
        return answer[SCORE], {key: value for key, value in answer.items() if key != SCORE}


def _close(answers: Sequence[Any]) -> None:
    """Coroutines that will not be awaited would say so at a random later moment."""
    for answer in answers:
        if inspect.iscoroutine(answer):
            answer.close()
