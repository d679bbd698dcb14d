"""Several reward functions as one: a weighted sum, with every function's answer checked before it is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flowgrpo_rc.rewards.config import RewardConfig
from flowgrpo_rc.rewards.custom import load_function
from flowgrpo_rc.rewards.jpeg import jpeg_compressibility

RewardFunction = Callable[[np.ndarray, list[str], list[dict[str, Any]]], Any]
"""`fn(images, prompts, metadata)` -> N scores, or `(N scores, info dict)`; images (N, H, W, 3) uint8 RGB."""


class RewardError(RuntimeError):
    """A reward function failed or gave an answer unfit for training. The message names the function."""


@dataclass(kw_only=True, slots=True)
class RewardResult:
    """The rewards of N images."""

    total: np.ndarray
    """(N,) float32: the weighted sum."""

    parts: dict[str, np.ndarray]
    """Function name -> (N,) float32, before weighting."""

    info: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Function name -> what that function reports besides its scores."""

    @property
    def texts(self) -> list[str] | None:
        """The captions that the first function with `info["text"]` gave, None when none did."""
        return next((info["text"] for info in self.info.values() if "text" in info), None)


class RewardMix:
    """Calls each function once per batch and adds up `weight * score`.

    Args:
        functions: name -> function; at least one.
        weights: name -> weight, for the same names.
    """

    def __init__(self, functions: Mapping[str, RewardFunction], weights: Mapping[str, float]) -> None:
        if not functions or functions.keys() != weights.keys():
            raise ValueError(
                "functions and weights must name the same rewards, at least one: got "
                f"{sorted(functions)} and {sorted(weights)}"
            )
        self.functions = dict(functions)
        self.weights = dict(weights)

    def __call__(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[dict[str, Any]] | None = None
    ) -> RewardResult:
        """Score N images.

        Args:
            images: (N, H, W, 3) uint8, RGB.
            prompts: N prompts.
            metadata: N dicts for the functions that read them; by default empty.

        Raises:
            ValueError: the arguments do not fit together.
            RewardError: a function raised, or returned the wrong number of scores or non-finite ones.
        """
        prompts = list(prompts)
        metadata = [{} for _ in prompts] if metadata is None else list(metadata)
        _check_batch(images, prompts, metadata)
        total = np.zeros(len(prompts), dtype=np.float64)
        parts: dict[str, np.ndarray] = {}
        info: dict[str, dict[str, Any]] = {}
        for name, function in self.functions.items():
            parts[name], info[name] = _score(name, function, images, prompts, metadata)
            total += self.weights[name] * parts[name].astype(np.float64)
        return RewardResult(total=total.astype(np.float32), parts=parts, info=info)

    def check_prompts(
        self,
        prompts: Sequence[str],
        *,
        image_size: tuple[int, int] | None = None,
        sources: Sequence[str] | None = None,
    ) -> None:
        """Let every function that can refuse prompts do so before training; see `OCRReward.check_prompts`.

        Args:
            prompts: any number of prompts.
            image_size: (height, width) in pixels of the images to come, if known.
            sources: where each prompt comes from, for the message; by default its index is named.

        Raises:
            ValueError: a function cannot score one of the prompts.
        """
        for function in self.functions.values():
            check = getattr(function, "check_prompts", None)
            if check is not None:
                check(prompts, image_size=image_size, sources=sources)


def build_reward(config: RewardConfig | None = None) -> RewardMix:
    """The reward of a run. The user's own function is loaded first, then the engines.

    Raises:
        ValueError: the configuration is wrong; names the field, its value and what to do.
        ImportError: an engine's extra is not installed.
    """
    config = RewardConfig() if config is None else config
    config.validate()
    weights = config.weights()
    return RewardMix({name: _build(name, config) for name in weights}, weights)


def _build(name: str, config: RewardConfig) -> RewardFunction:
    if name == "ocr":
        from flowgrpo_rc.rewards.ocr import OCRReward

        return OCRReward(config.ocr)
    if name == "jpeg_compressibility":
        return jpeg_compressibility
    custom = config.custom_reward_function
    return load_function(str(custom.path), custom.name)


def _check_batch(images: np.ndarray, prompts: list[str], metadata: list[dict[str, Any]]) -> None:
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8:
        kind = images.dtype if isinstance(images, np.ndarray) else type(images).__name__
        raise ValueError(f"images must be a uint8 numpy array (N, H, W, 3) in RGB, got {kind}")
    if images.ndim != 4 or images.shape[3] != 3:
        raise ValueError(f"images must have the shape (N, H, W, 3), got {images.shape}")
    if not len(images) == len(prompts) == len(metadata):
        raise ValueError(
            f"images, prompts and metadata must be equally many, got {len(images)}, {len(prompts)} and {len(metadata)}"
        )


def _score(
    name: str,
    function: RewardFunction,
    images: np.ndarray,
    prompts: list[str],
    metadata: list[dict[str, Any]],
) -> tuple[np.ndarray, dict[str, Any]]:
    """One function's checked scores, (N,) float32, and its info."""
    try:
        answer = function(images, prompts, metadata)
    except Exception as error:
        raise RewardError(f"reward function {name!r} raised {type(error).__name__}: {error}") from error
    info: dict[str, Any] = {}
    if isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], dict):
        answer, info = answer
    try:
        scores = np.asarray(answer, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"reward function {name!r} returned {type(answer).__name__} that does not convert to floats "
            f"({error}); return one float per image, or (floats, info dict)"
        ) from error
    if scores.shape != (len(prompts),):
        raise RewardError(
            f"reward function {name!r} returned scores of shape {scores.shape}, expected ({len(prompts)},): "
            "one float per image"
        )
    _check_finite(name, scores, prompts)
    return scores, info


def _check_finite(name: str, scores: np.ndarray, prompts: list[str]) -> None:
    bad = np.flatnonzero(~np.isfinite(scores))
    if bad.size:
        first = int(bad[0])
        raise RewardError(
            f"reward function {name!r} returned {bad.size} non-finite of {scores.size} scores; the first is "
            f"{scores[first]} for sample {first}, prompt {prompts[first]!r}"
        )
