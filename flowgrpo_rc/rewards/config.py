"""The section ``reward`` of a configuration: weights and options of rewards. Importing this loads no reward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from flowgrpo_rc.checks import show
from flowgrpo_rc.field_docs import documented_fields
from flowgrpo_rc.rewards.clip.config import AestheticConfig, HPSv2Config, ScorerConfig
from flowgrpo_rc.rewards.custom import DEFAULT_NAME, OwnFunction, of_entry
from flowgrpo_rc.rewards.judge.config import JudgeConfig
from flowgrpo_rc.rewards.ocr import OCRConfig
from flowgrpo_rc.rewards.registry import DEFAULT_REWARD, REWARDS, check_name
from flowgrpo_rc.rewards.remote.config import remote_scorers
from flowgrpo_rc.rewards.reward_model.config import RewardModelConfig
from flowgrpo_rc.section import (
    NonNegativeInt,
    PositiveFloat,
    Read,
    Section,
    complaints,
    convert,
    one_of,
    plain,
    read_mapping,
)

REWARD_NAMES = REWARDS.keys()
"""The names of the built-in rewards, as ``reward.functions`` takes them."""
NORMALIZATIONS = ("group",)
"""How several rewards may be normalised before they are weighted."""
Weights = Annotated[Any, Read(read_mapping("weights by name, e.g. reward.functions.ocr=1"))]
Functions = Annotated[Any, Read(read_mapping("functions by name, e.g. {mine: {path: mine.py}}"))]


def read_weight(field_name: str, weight: Any) -> float:
    """``weight`` as a float; text that spells a number is one, as in YAML without a decimal point."""
    try:
        return convert(float, weight)
    except ValueError:
        raise ValueError(
            f"{field_name}: got {plain(weight)!r}; a weight must be a finite number (0 turns the reward off)"
        ) from None


@documented_fields
@dataclass(kw_only=True, slots=True)
class CustomRewardConfig(Section):
    """A reward function of the user's own, loaded from a Python file."""

    section = "reward.custom_reward_function"

    path: str | None = None
    """Path of the Python file that defines the function; null where there is no such function."""
    name: str = DEFAULT_NAME
    """Name of the function in that file, and of its metric ``reward/<name>``. It is called as
    ``fn(images, prompts, metadata)`` for a batch, or where it has a parameter ``solution_image`` as verl-omni's
    ``fn(data_source, solution_image, ground_truth, extra_info)`` for one image; it may be ``async``, an object with
    ``__call__``, or a class of such objects that is made without arguments."""
    weight: float = 1.0
    """Weight of the function in the sum of rewards. 0 turns the function off."""
    reward_kwargs: Annotated[Any, Read(read_mapping("a mapping from parameter names to values, e.g. {scale: 2.0}"))] = (
        field(default_factory=dict)
    )
    """Further keyword arguments of every call of the function, by name."""

    def problems(self) -> Iterator[str]:
        """A function that is not there, or whose metric would have a name that is taken."""
        if self.path is None:
            return
        yield from complaints(self.function.check, within=self.section)
        yield from complaints(check_name, "name", self.name)
        if self.name in REWARD_NAMES:
            yield (
                f"name: {self.name!r} is the name of a built-in reward; rename your function, so that their metrics "
                "can be told apart"
            )

    @property
    def function(self) -> OwnFunction:
        """The function that the section names; only where ``path`` is given."""
        return OwnFunction(
            section=self.section,
            path=str(self.path),
            name=self.name,
            kwargs=self.reward_kwargs,
            kwargs_field=f"{self.section}.reward_kwargs",
        )


@documented_fields
@dataclass(kw_only=True, slots=True)
class RewardConfig(Section):
    """The rewards of a run: a weighted sum of built-in functions and of the user's own."""

    section = "reward"

    functions: Weights = field(default_factory=dict)
    """Weights of the built-in rewards and of the servers in ``remote``, by name. Weight 0 turns a reward off: it is
    neither loaded nor computed. Without a reward here or a function of the user's own, ``ocr`` counts alone, with
    weight 1."""
    custom_reward_function: CustomRewardConfig = field(default_factory=CustomRewardConfig)
    """The user's own function. It counts alone, unless ``functions`` or ``reward_functions`` name others beside it."""
    reward_functions: Functions = field(default_factory=dict)
    """Several functions of the user's own, as verl-omni names them: name -> ``{path, name, weight, ...}``. The metrics
    have the name on the left; ``path`` is the Python file, ``name`` the function in it (``compute_score`` where it is
    not given), ``weight`` its weight in the sum (1), and every further key an argument of each call. ``required`` is
    taken and changes nothing: a function that fails ends the run."""
    val_functions: Functions = field(default_factory=dict)
    """Scorers that only look: they score the images of every validation, as ``val/reward/<name>``, and count nowhere.
    Name -> true for a built-in reward, or ``{path, name, ...}`` for a function of the user's own; false turns one off.
    A reward that climbs while a scorer that it is not trained on falls is being gamed."""
    normalization: Annotated[str, one_of(NORMALIZATIONS)] | None = None
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
    num_workers: NonNegativeInt = 0
    """Worker processes of each training process for the built-in rewards that read images on the processor (``ocr``),
    which share a batch. 0 stands for none: then they are called in the training process itself."""
    overlap: bool = True
    """Score a rollout's micro-batch in a background thread while the next ones are drawn, with functions that have
    ``streams = True`` (``judge``, ``ocr``, ...); with ``rollout.ahead``, those that other processes compute score while
    the actor learns. The scores are the same either way, since such functions are always called for one micro-batch of
    ``rollout.micro_batch_size``. All others are called in the main thread when all images are drawn."""
    remote: Annotated[Any, Read(remote_scorers)] = field(default_factory=dict)
    """Reward servers, by names of your choice that ``functions`` gives weights: name -> the keys of ``RemoteConfig``;
    ``url`` must be given. Example: ``reward.remote.deqa.url=http://127.0.0.1:18080 reward.functions.deqa=1``.
    A server without a weight is not called."""
    timeout_s: PositiveFloat | None = 3600.0
    """Longest time in seconds that one call of a reward function, or its import, may take; null for no limit.
    A function that takes longer ends the run with file and line of what it was doing."""

    def problems(self) -> Iterator[str]:
        """Rewards that are not known, have one name, or do not count."""
        known = [*REWARD_NAMES, *self.remote]
        unknown = f"is not a known reward; known are {', '.join(known)}, and a function of your own"
        custom = None if self.custom_reward_function.path is None else self.custom_reward_function.name
        found: list[str] = []
        # Every reward has a metric of its name, so that no two may share one.
        for name in self.remote:
            found += complaints(check_name, f"remote.{name}", name, [*REWARD_NAMES, custom])
        for name, weight in self.functions.items():
            if name in known:
                found += complaints(read_weight, f"functions.{name}", weight)
            else:
                place = f"goes into reward.custom_reward_function, a server into reward.remote.{name}"
                found.append(f"functions: {name!r} {unknown} {place}")
        # A built-in reward with weight 0 has no metric, so its name is free.
        taken = [*self.remote, *(name for name, weight in self.functions.items() if weight), custom]
        for name, entry in self.reward_functions.items():
            where = f"reward_functions.{name}"
            found += complaints(check_name, where, name, taken)
            if isinstance(entry, Mapping):
                found += complaints(read_weight, f"{where}.weight", entry.get("weight", 1.0))
                found += complaints(of_entry, f"reward.{where}", entry, within=self.section)
            else:
                found.append(f"{where}: got {show(entry)}; give its keys, {{path, name, weight}}")
        yield from found
        # The rules below add up weights.
        if found:
            return
        self.functions = {name: read_weight(name, weight) for name, weight in self.functions.items()}
        self.reward_functions = {
            name: {**entry, "weight": read_weight(name, entry.get("weight", 1.0))}
            for name, entry in self.reward_functions.items()
        }
        weights = self.weights()
        if not weights:
            yield (
                f"functions: got {self.functions} and no custom function, so every weight is 0 and there is nothing to "
                "train on; give one reward a weight, e.g. reward.functions.ocr=1"
            )
        for name, entry in self.val_functions.items():
            where = f"val_functions.{name}"
            yield from complaints(check_name, where, name)
            # Its validation scores are logged under the same name.
            if name in weights:
                yield (
                    f"{where}: {name!r} is a reward of the training, whose validation is val/reward/{name} already; "
                    "leave it out here"
                )
            if isinstance(entry, Mapping) and "path" in entry:
                yield from complaints(of_entry, f"reward.{where}", entry, within=self.section)
            # An empty mapping, as true, is a built-in reward without options.
            elif entry not in (True, False, None, {}):
                yield f"{where}: got {show(entry)}; give true, or {{path, name}} of a function of your own"
            elif name not in known:
                place = f"is reward.{where}={{path: my_reward.py, name: {DEFAULT_NAME}}}"
                yield f"val_functions: {name!r} {unknown} {place}"

    def weights(self) -> dict[str, float]:
        """Name -> weight of every reward that is on, the user's own function last."""
        weights = {name: float(weight) for name, weight in self.functions.items() if weight != 0}
        weights |= {name: entry["weight"] for name, entry in self.reward_functions.items() if entry["weight"] != 0}
        custom = self.custom_reward_function
        if custom.path is not None and custom.weight != 0:
            weights[custom.name] = float(custom.weight)
        # ``functions.ocr=0`` alone is a mistake and no wish for the default.
        if not weights and DEFAULT_REWARD not in self.functions:
            return {DEFAULT_REWARD: 1.0}
        return weights

    def own_functions(self) -> dict[str, OwnFunction]:
        """The user's own functions by the names of their metrics, those with weight 0 too."""
        section = "reward.reward_functions"
        own = {name: of_entry(f"{section}.{name}", entry) for name, entry in self.reward_functions.items()}
        custom = self.custom_reward_function
        return own if custom.path is None else {**own, custom.name: custom.function}

    def observers(self) -> dict[str, OwnFunction | None]:
        """The scorers that only look, by name: a function of the user's own, or None for a built-in reward."""
        on = {name: entry for name, entry in self.val_functions.items() if entry not in (False, None)}
        section = "reward.val_functions"
        return {
            name: of_entry(f"{section}.{name}", entry) if isinstance(entry, Mapping) and entry else None
            for name, entry in on.items()
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
        self.check(self.section)
