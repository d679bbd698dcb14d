"""What the `reward` section of a configuration may hold. Importing this loads no engine."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

REWARD_NAMES = ("jpeg_compressibility", "ocr")
"""The built-in rewards, by the names used in `reward.functions`."""

OCR_MODES = ("recognition", "full")


@dataclass(kw_only=True, slots=True)
class OCRConfig:
    """How the reward `ocr` reads an image."""

    mode: str = "recognition"
    """`recognition`: the image is one line of text (small images). `full`: find the lines, then read them."""

    rec_image_shape: list[int] = field(default_factory=lambda: [3, 48, 64])
    """Channels, height, width of the recogniser's input; a wider image widens it. 8 columns a character."""

    num_threads: int = 0
    """Threads that read images side by side. 0: one per core this process may use, at most 8."""

    contained_is_match: bool = False
    """True: a reading that contains the whole target scores 1, as flow_grpo's image scorer has it."""

    def __post_init__(self) -> None:
        if self.mode not in OCR_MODES:
            raise ValueError(f"reward.ocr.mode: got {self.mode!r}; choose one of {', '.join(OCR_MODES)}")
        shape = list(self.rec_image_shape)
        if len(shape) != 3 or shape[:2] != [3, 48] or shape[2] < 8:
            raise ValueError(
                f"reward.ocr.rec_image_shape: got {shape}; the recogniser takes [3, 48, width] with "
                "a width of at least 8"
            )
        if self.num_threads < 0:
            raise ValueError(f"reward.ocr.num_threads: got {self.num_threads}; give 0 (all cores) or more")


@dataclass(kw_only=True, slots=True)
class CustomRewardConfig:
    """A reward function of the user's own, loaded from a Python file."""

    path: str | None = None
    """Python file that defines the function. None: no such function."""

    name: str = "compute_score"
    """Name of the function in that file: `fn(images, prompts, metadata) -> scores` or `(scores, info)`."""

    weight: float = 1.0
    """Weight in the sum. 0 turns the function off."""

    def __post_init__(self) -> None:
        _check_weight("reward.custom_reward_function.weight", self.weight)
        if self.path is not None and not Path(self.path).is_file():
            raise ValueError(
                f"reward.custom_reward_function.path: {self.path!r} is not a file; give the path of the "
                f"Python file that defines {self.name!r}, or null for none"
            )


@dataclass(kw_only=True, slots=True)
class RewardConfig:
    """The rewards of a run: a weighted sum of built-in functions and at most one of the user's own."""

    functions: dict[str, float] = field(default_factory=lambda: {"ocr": 1.0, "jpeg_compressibility": 0.0})
    """Built-in reward -> weight. Weight 0 turns a reward off: it is neither loaded nor computed."""

    custom_reward_function: CustomRewardConfig = field(default_factory=CustomRewardConfig)
    """The user's own function, added to `functions`; set `functions.ocr=0` to use it alone."""

    ocr: OCRConfig = field(default_factory=OCRConfig)
    """Options of the reward `ocr`."""

    def __post_init__(self) -> None:
        for name, weight in self.functions.items():
            if name not in REWARD_NAMES:
                raise ValueError(
                    f"reward.functions: {name!r} is not a known reward; known are "
                    f"{', '.join(REWARD_NAMES)}, and a function of your own goes into "
                    "reward.custom_reward_function"
                )
            _check_weight(f"reward.functions.{name}", weight)
        custom = self.custom_reward_function
        if custom.path is not None and custom.name in REWARD_NAMES:
            raise ValueError(
                f"reward.custom_reward_function.name: {custom.name!r} is the name of a built-in reward; "
                "rename your function, so that their metrics can be told apart"
            )
        if not self.weights():
            raise ValueError(
                f"reward.functions: got {dict(self.functions)} and no custom function, so every weight "
                "is 0 and there is nothing to train on; give one reward a weight, e.g. reward.functions.ocr=1"
            )

    def weights(self) -> dict[str, float]:
        """Name -> weight of every reward that is on, the user's own function last."""
        weights = {name: float(weight) for name, weight in self.functions.items() if weight != 0}
        custom = self.custom_reward_function
        if custom.path is not None and custom.weight != 0:
            weights[custom.name] = float(custom.weight)
        return weights

    def validate(self) -> None:
        """Repeat the checks of construction and load the user's function, before any model is loaded.

        Raises:
            ValueError: names the field, its value and what to do.
        """
        from flowgrpo_rc.rewards.custom import load_function

        self.ocr.__post_init__()
        self.custom_reward_function.__post_init__()
        self.__post_init__()
        if self.custom_reward_function.path is not None:
            load_function(self.custom_reward_function.path, self.custom_reward_function.name)


def _check_weight(field_name: str, weight: float) -> None:
    if not math.isfinite(weight):
        raise ValueError(f"{field_name}: got {weight}; a weight must be a finite number")
