"""The section ``reward`` of a configuration: which rewards count, and their options. Importing this loads none."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from flowgrpo_rc.checks import choice, fit, fit_fields, non_negative, plain, show
from flowgrpo_rc.field_docs import documented_fields
from flowgrpo_rc.rewards.clip.config import AestheticConfig, HPSv2Config, ScorerConfig
from flowgrpo_rc.rewards.judge.config import JudgeConfig
from flowgrpo_rc.rewards.names import check_name, refuse_taken
from flowgrpo_rc.rewards.own_function import DEFAULT_NAME, OwnFunction, of_entry
from flowgrpo_rc.rewards.registry import DEFAULT_REWARD, REWARDS
from flowgrpo_rc.rewards.remote.config import RemoteConfig, remote_scorers
from flowgrpo_rc.rewards.reward_model.config import RewardModelConfig

REWARD_NAMES = REWARDS.keys()
"""The names of the built-in rewards, as ``reward.functions`` takes them."""

NORMALIZATIONS = ("group",)
"""How several rewards may be normalised before they are weighted."""

VERL_OMNIS = ("weight", "required")
"""Keys of an entry of ``reward_functions`` beside ``path``, ``name`` and the function's arguments."""


@documented_fields
@dataclass(kw_only=True, slots=True)
class OCRConfig:
    """How the reward ``ocr`` reads an image."""

    mode: str = "recognition"
    """How an image is read. ``recognition`` takes it as it is for one line of text, which is right for small images
    that hold little else. ``full`` finds the lines first and then reads them, for images of about 256 pixels and up:
    the finder misses text in very small ones. It takes some 25 times as long."""

    rec_image_shape: list[int] = field(default_factory=lambda: [3, 48, 64])
    """Channels, height and width in pixels of the recogniser's input, which takes 8 columns a character. A wider image
    widens it."""

    num_threads: int = 0
    """Number of threads that read images side by side. 0 stands for one per core this process may use, at most 8; in
    each of ``reward.num_workers`` processes for one."""

    contained_is_match: bool = False
    """Whether a reading that contains the whole target scores 1, whatever is around it, as in flow_grpo's image
    scorer."""

    def __post_init__(self) -> None:
        fit_fields("reward.ocr", self)
        choice("reward.ocr.mode", self.mode, ("recognition", "full"))
        shape = self.rec_image_shape
        if len(shape) != 3 or shape[:2] != [3, 48] or shape[2] < 8:
            raise ValueError(
                f"reward.ocr.rec_image_shape: got {shape}; give [3, 48, width] with a width of at least 8 pixels"
            )
        non_negative("reward.ocr.num_threads", self.num_threads)


@documented_fields
@dataclass(kw_only=True, slots=True)
class CustomRewardConfig:
    """A reward function of the user's own, loaded from a Python file."""

    path: str | None = None
    """Path of the Python file that defines the function; null where there is no such function."""

    name: str = DEFAULT_NAME
    """Name of the function in that file, and of its metric ``reward/<name>``. It is called as
    ``fn(images, prompts, metadata)`` for a batch, or where it has a parameter ``solution_image`` as verl-omni's
    ``fn(data_source, solution_image, ground_truth, extra_info)`` for one image; it may be ``async``, an object with
    ``__call__``, or a class of such objects that is made without arguments."""

    weight: float = 1.0
    """Weight of the function in the sum of rewards. 0 turns the function off."""

    reward_kwargs: Any = field(default_factory=dict)
    """Further keyword arguments of every call of the function, by name."""

    def __post_init__(self) -> None:
        section = "reward.custom_reward_function"
        fit_fields(section, self)
        self.weight = _weight(f"{section}.weight", self.weight)
        if self.path is None:
            return
        if self.reward_kwargs is None:
            self.reward_kwargs = {}
        self.function.check()
        check_name(f"{section}.name", self.name)
        if self.name in REWARD_NAMES:
            raise ValueError(
                f"{section}.name: {self.name!r} is the name of a built-in reward; "
                "rename your function, so that their metrics can be told apart"
            )

    @property
    def function(self) -> OwnFunction:
        """The function that the section names; only where ``path`` is given."""
        section = "reward.custom_reward_function"
        return OwnFunction(
            section=section,
            path=str(self.path),
            name=self.name,
            kwargs=self.reward_kwargs,
            kwargs_field=f"{section}.reward_kwargs",
        )


@documented_fields
@dataclass(kw_only=True, slots=True)
class RewardConfig:
    """The rewards of a run: a weighted sum of built-in functions and of the user's own."""

    functions: Any = field(default_factory=dict)
    """Weights of the built-in rewards and of the servers in ``remote``, by name. Weight 0 turns a reward off: it is
    neither loaded nor computed. Where no reward is named here and there is no function of the user's own, ``ocr``
    counts alone, with weight 1."""

    custom_reward_function: CustomRewardConfig = field(default_factory=CustomRewardConfig)
    """The user's own function. It counts alone, unless ``functions`` or ``reward_functions`` name others beside it."""

    reward_functions: Any = field(default_factory=dict)
    """Several functions of the user's own, as verl-omni names them: name -> ``{path, name, weight, ...}``. The metrics
    have the name on the left; ``path`` is the Python file, ``name`` the function in it (``compute_score`` where it is
    not given), ``weight`` its weight in the sum (1), and every further key an argument of each call. ``required`` is
    taken and changes nothing: a function that fails ends the run."""

    val_functions: Any = field(default_factory=dict)
    """Scorers that only look: they score the images of every validation, as ``val/reward/<name>``, and count nowhere.
    Name -> true for a built-in reward, or ``{path, name, ...}`` for a function of the user's own; false turns one off.
    A reward that climbs while a scorer that it is not trained on falls is being gamed."""

    normalization: str | None = None
    """How several rewards become one advantage. null: the weighted sum of the scores. ``group``: every reward is
    normalised within its prompt's group, less its mean and divided by its standard deviation there, before it is
    weighted; see ``normalised_sum``. The logged rewards are the scores in either case."""

    ocr: OCRConfig = field(default_factory=OCRConfig)
    """Options of the reward ``ocr``."""

    pickscore: ScorerConfig = field(default_factory=ScorerConfig)
    """Options of the reward ``pickscore``."""

    clipscore: ScorerConfig = field(default_factory=ScorerConfig)
    """Options of the reward ``clipscore``, flow_grpo's."""

    clip_cosine: ScorerConfig = field(default_factory=ScorerConfig)
    """Options of the reward ``clip_cosine``."""

    hpsv2: HPSv2Config = field(default_factory=HPSv2Config)
    """Options of the reward ``hpsv2``."""

    aesthetic: AestheticConfig = field(default_factory=AestheticConfig)
    """Options of the reward ``aesthetic``."""

    clip_similarity: ScorerConfig = field(default_factory=ScorerConfig)
    """Options of the reward ``clip_similarity``."""

    dino_similarity: ScorerConfig = field(default_factory=ScorerConfig)
    """Options of the reward ``dino_similarity``."""

    siglip_similarity: ScorerConfig = field(default_factory=ScorerConfig)
    """Options of the reward ``siglip_similarity``."""

    judge: JudgeConfig = field(default_factory=JudgeConfig)
    """Options of the reward ``judge``."""

    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    """A model that the run serves itself, for the judge and for functions that ask one."""

    num_workers: int = 0
    """Worker processes of each training process for the built-in rewards that read images on the processor (``ocr``),
    which share a batch. 0 stands for none: then they are called in the training process itself."""

    overlap: bool = True
    """Whether functions with ``streams = True`` (``judge``, ``ocr``, ...) score the images of a rollout's
    micro-batch in another thread while the next ones are drawn; those of them that other processes compute, with
    ``rollout.ahead`` while the actor learns. The scores are the same either way: such functions are called for one
    micro-batch of ``rollout.micro_batch_size`` at a time in both. All others are called in the main thread when all
    images are drawn."""

    remote: Any = field(default_factory=dict)
    """Reward servers, by names of your choice that ``functions`` gives weights: name -> the keys of ``RemoteConfig``,
    of which ``url`` must be given. Example: ``reward.remote.deqa.url=http://127.0.0.1:18080 reward.functions.deqa=1``.
    A server without a weight is not asked."""

    timeout_s: float | None = 3600.0
    """Longest time in seconds that one call of a reward function, or its import, may take; null for no limit.
    A function that takes longer ends the run with a message that says what it was doing."""

    def __post_init__(self) -> None:
        fit_fields("reward", self)
        for scorer in fields(self):
            if isinstance(section := getattr(self, scorer.name), ScorerConfig):
                section.check(f"reward.{scorer.name}")
        if self.functions is None:
            self.functions = {}
        if not isinstance(self.functions, Mapping):
            raise ValueError(
                f"reward.functions: got {self.functions!r}; give weights by name, e.g. reward.functions.ocr=1"
            )
        self.remote = self._checked_remote()
        # Names before weights: an unknown reward is told as such, whatever its weight.
        for name in self.functions:
            if name not in REWARD_NAMES and name not in self.remote:
                raise ValueError(
                    f"reward.functions: {name!r} is not a known reward; known are "
                    f"{', '.join([*REWARD_NAMES, *self.remote])}, and a function of your own goes into "
                    f"reward.custom_reward_function, a server into reward.remote.{name}"
                )
        self.functions = {name: _weight(f"reward.functions.{name}", w) for name, w in self.functions.items()}
        non_negative("reward.num_workers", self.num_workers)
        choice("reward.normalization", self.normalization, (None, *NORMALIZATIONS))
        self.reward_functions = self._checked_reward_functions()
        if self.timeout_s is not None and not 0 < self.timeout_s < math.inf:
            raise ValueError(f"reward.timeout_s: got {self.timeout_s!r}; give seconds above 0, or null for no limit")
        if not self.weights():
            raise ValueError(
                f"reward.functions: got {dict(self.functions)} and no custom function, so every weight "
                "is 0 and there is nothing to train on; give one reward a weight, e.g. reward.functions.ocr=1"
            )
        self._check_val_functions()

    def _checked_reward_functions(self) -> dict[str, dict[str, Any]]:
        """``reward_functions`` with weights that are numbers."""
        section = "reward.reward_functions"
        checked: dict[str, dict[str, Any]] = {}
        taken = [*self.remote, *(name for name, weight in self.functions.items() if weight)]
        for name, entry in _entries(section, self.reward_functions).items():
            check_name(f"{section}.{name}", name)
            if not isinstance(entry, Mapping):
                raise ValueError(f"{section}.{name}: got {show(entry)}; give its keys, {{path, name, weight}}")
            refuse_taken(f"{section}.{name}", name, [*taken, self._custom_name])
            checked[name] = {**entry, "weight": _weight(f"{section}.{name}.weight", entry.get("weight", 1.0))}
            of_entry(f"{section}.{name}", _without(entry, VERL_OMNIS))
        return checked

    def _check_val_functions(self) -> None:
        section = "reward.val_functions"
        self.val_functions = dict(_entries(section, self.val_functions))
        for name, entry in self.val_functions.items():
            check_name(f"{section}.{name}", name)
            if name in self.weights():
                raise ValueError(
                    f"{section}.{name}: {name!r} is a reward of the training, whose validation is val/reward/{name} "
                    "already; leave it out here"
                )
            if isinstance(entry, Mapping) and "path" in entry:
                of_entry(f"{section}.{name}", entry)
            elif entry not in (True, False, None, {}):
                raise ValueError(
                    f"{section}.{name}: got {show(entry)}; give true, or {{path, name}} of a function of your own"
                )
            elif name not in REWARD_NAMES and name not in self.remote:
                known = ", ".join([*REWARD_NAMES, *self.remote])
                raise ValueError(
                    f"{section}: {name!r} is not a known reward; known are {known}, and a function of your own is "
                    f"{section}.{name}={{path: my_reward.py, name: {DEFAULT_NAME}}}"
                )

    def _checked_remote(self) -> dict[str, RemoteConfig]:
        servers = remote_scorers(self.remote)
        for name in servers:
            check_name(f"reward.remote.{name}", name)
            refuse_taken(f"reward.remote.{name}", name, [*REWARD_NAMES, self._custom_name])
        return servers

    @property
    def _custom_name(self) -> str | None:
        """Of ``custom_reward_function``, where there is one."""
        custom = self.custom_reward_function
        return None if custom.path is None else custom.name

    def weights(self) -> dict[str, float]:
        """Name -> weight of every reward that is on, the user's own function last."""
        weights = {name: float(weight) for name, weight in self.functions.items() if weight != 0}
        weights |= {name: entry["weight"] for name, entry in self.reward_functions.items() if entry["weight"] != 0}
        custom = self.custom_reward_function
        if custom.path is not None and custom.weight != 0:
            weights[custom.name] = float(custom.weight)
        if not weights and DEFAULT_REWARD not in self.functions:
            return {DEFAULT_REWARD: 1.0}
        return weights

    def own_functions(self) -> dict[str, OwnFunction]:
        """The user's own functions by the names of their metrics, those with weight 0 too."""
        section = "reward.reward_functions"
        own = {
            name: of_entry(f"{section}.{name}", _without(entry, VERL_OMNIS))
            for name, entry in self.reward_functions.items()
        }
        custom = self.custom_reward_function
        return own if custom.path is None else {**own, custom.name: custom.function}

    def observers(self) -> dict[str, OwnFunction | None]:
        """The scorers that only look, by name: a function of the user's own, or None for a built-in reward."""
        section = "reward.val_functions"
        return {
            name: of_entry(f"{section}.{name}", entry) if isinstance(entry, Mapping) and entry else None
            for name, entry in self.val_functions.items()
            if entry not in (False, None)
        }

    def in_words(self) -> str:
        """The rewards that are on: ``0.5 x ocr + 2 x compute_score (my_reward.py)``."""
        own = self.own_functions()
        more = {name: f" ({function.path})" for name, function in own.items()}
        more |= {name: f" ({server.url})" for name, server in self.remote.items()}
        if self.judge.model is not None:
            more["judge"] = f" ({self.judge.model})"
        total = " + ".join(f"{weight:g} x {name}{more.get(name, '')}" for name, weight in self.weights().items())
        if self.normalization is not None:
            total += f", each normalised within its {self.normalization}"
        looking = ", ".join(self.observers())
        return f"{total}; in validation {looking} only look" if looking else total

    def validate(self) -> None:
        """Repeat the checks of construction, for fields that were changed since.

        Raises:
            ValueError: names the field, its value and what to do.
        """
        self.ocr.__post_init__()
        self.judge.__post_init__()
        self.reward_model.__post_init__()
        self.custom_reward_function.__post_init__()
        self.__post_init__()


def _entries(section: str, entries: Any) -> Mapping[str, Any]:
    """The functions by name that a section holds; null for none."""
    if entries is None:
        return {}
    if not isinstance(entries, Mapping):
        raise ValueError(f"{section}: got {show(entries)}; give functions by name, e.g. {{mine: {{path: mine.py}}}}")
    return {str(name): entry for name, entry in entries.items()}


def _without(entry: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key not in keys}


def _weight(field_name: str, weight: Any) -> float:
    """``weight`` as a float; strings that spell a number are numbers, as in YAML without a decimal point."""
    try:
        return fit(field_name, float, weight)
    except ValueError:
        raise ValueError(
            f"{field_name}: got {plain(weight)!r}; a weight must be a finite number (0 turns the reward off)"
        ) from None
