"""Settings written for verl-omni, verl, flow_grpo or Flow-Factory become settings of this package, or are refused.

``foreign_keys.yaml`` has a row for each of their keys. The code here applies the rows, and translates settings that are
more than a key and a value: the correction's two places, algorithms, reward functions and numbers of processes.
"""

import os
import re
import shlex
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

import yaml

from flowgrpo_rc.checks import show
from flowgrpo_rc.cli.schema import nearest, schema
from flowgrpo_rc.loss.objectives import DEFAULT, OBJECTIVES, averages_old_policy
from flowgrpo_rc.models.registry import FAMILIES
from flowgrpo_rc.rewards.config import REWARD_NAMES
from flowgrpo_rc.rewards.custom import VERL_OMNIS
from flowgrpo_rc.section import INVALID, PositiveInt, convert

CORRECTIONS = ("algorithm.rollout_correction", "actor_rollout_ref.actor.rollout_correction")
"""The place of the correction, and verl-omni's copy of it in the actor."""
LAUNCHER_KEYS = ("trainer.n_gpus_per_node", "trainer.nnodes")
"""Compared with the numbers of processes and machines that the launcher started."""
WRITTEN_THERE = 3
"""So many foreign keys show that settings were written for another trainer, whose other defaults are then reported."""
_ACTOR = "actor_rollout_ref.actor"
_MODEL = "actor_rollout_ref.model"
_ROLLOUT = "actor_rollout_ref.rollout"
_ALGORITHM = f"{_MODEL}.algorithm"
_TIMESTEP_FRACTION = "algorithm.timestep_fraction"
_STEPS = f"{_ROLLOUT}.pipeline.num_inference_steps"
_FUNCTIONS = "reward.functions"
_OWN_FUNCTIONS = "reward.reward_functions"
_OWN_FUNCTION = "reward.custom_reward_function"
_QUESTIONS = "reward.judge.questions"
_SCORER = re.compile(r"(?:.*/)?verl_omni/utils/reward_score/(\w+)\.py|pkg://verl_omni\.utils\.reward_score\.(\w+)")
"""The path of a scorer of verl-omni's, in both forms that it takes."""
_NO_SCORER = (
    "verl-omni's file is not there, and no built-in reward scores as it does; give the path of a copy, a function of "
    "your own, or where text is read reward.functions.ocr=1, which compares in the same way what an OCR engine reads"
)
_PLAIN = re.compile(r"[\w/\-+.$%*@?|]+(:[\w/\-+.$%*@?|]+)*", re.ASCII)
"""Text that Hydra reads without quotes; a colon inside needs none: http://host:8000."""


# ---------------------------------------------------------------- refusals


class ConfigError(ValueError):
    """The configuration cannot be composed; the message names every key that is wrong, and the remedy."""


_KINDS = {
    "delete": ("delete; they mean nothing here", ": {1}", "{0} has no meaning here: {1}; delete it"),
    "instead": ("write instead", "  {1}", "write {0} instead {1}"),
    "cannot": ("cannot work here", ": {1}", "{0} cannot work here: {1}"),
    "unknown": ("unknown", "; nearest: {1}", "unknown configuration key {0}; nearest: {1}"),
    "wrong": ("wrong value", "", "{0}"),
}
"""Heading of a list of refusals, the text behind a subject in it, and the message of a single refusal."""


class Refusals:
    """Collects refusals; ``raise_if_any`` turns them into one ``ConfigError``."""

    def __init__(self) -> None:
        # A dict keeps the order; a key may be refused twice, by its row and by the settings that it moves to.
        self.found: dict[tuple[str, str, str], None] = {}

    def add(self, kind: str, subject: str, reason: str = "") -> None:
        """Refuse a setting.

        Args:
            kind: one of ``_KINDS``.
            subject: the key or ``key=value``, for ``instead`` the override to write, for ``wrong`` the whole message.
            reason: subjects of the same reason share a line.
        """
        self.found[kind, subject, reason] = None

    def unknown(self, key: str) -> None:
        """Refuse a key that no trainer documents."""
        self.add("unknown", key, nearest(key))

    def wrong(self, message: str) -> None:
        """Refuse a value; the message begins with the key."""
        self.add("wrong", message)

    def raise_if_any(self) -> None:
        """Raise ``ConfigError`` if anything was refused: one line for one refusal, else a line for each."""
        found = list(self.found)
        if len(found) == 1:
            kind, *words = found[0]
            raise ConfigError(_KINDS[kind][2].format(*words))
        lines = [f"the configuration has {len(found)} settings that cannot be used"]
        for kind, (heading, behind, _) in _KINDS.items():
            subjects: dict[str, list[str]] = {}
            for own, subject, reason in found:
                if own == kind:
                    # A message without a reason stands alone.
                    subjects.setdefault(reason or subject, []).append(subject)
            lines += [f"  {heading}:"] if subjects else []
            lines += [f"    {', '.join(same)}{behind.format('', reason)}" for reason, same in subjects.items()]
        if found:
            raise ConfigError("\n".join(lines))


# ---------------------------------------------------------------- the rows of foreign_keys.yaml


@dataclass(frozen=True)
class Row:
    """The keys that fit one pattern; ``foreign_keys.yaml`` describes the fields."""

    key: str
    action: str
    reason: str
    to: str = ""
    values: Mapping[Any, Any] = field(default_factory=dict)
    only: bool = False
    ignore: Collection[Any] = ()
    ignore_if: str | None = None

    def match(self, key: str) -> re.Match[str] | None:
        """The match of the pattern with a key; its groups are the texts that ``*`` stands for."""
        return _regex(self.key).fullmatch(key.removeprefix("config."))  # flow_grpo's flags begin with it

    def target(self, key: str) -> str:
        """The key here, for one that fits."""
        found = self.match(key)
        return self.to.replace("*", found[1]) if found and "*" in self.to else self.to

    def spelled(self, value: Any) -> Any:
        """The value as it is spelled here."""
        return self.values.get(value, value) if _is_scalar(value) else value


@cache
def _regex(pattern: str) -> re.Pattern[str]:
    """``*`` stands for text within one part of a key, a leading ``**.`` for any parts, ``a.**`` for a and all below."""
    text = re.escape(pattern).replace(r"\*\*\.", r"(?:.+\.)").replace(r"\.\*\*", r"(?:\..+)?")
    return re.compile(text.replace(r"\*", r"([^.]*)"))


def _changes_nothing(condition: str | None, value: Any, tree: Mapping[str, Any]) -> bool:
    """The condition that ``ignore_if`` of a row names, for a value and all settings that were given."""
    match condition:
        case None:
            return False
        case "reward_model_is_off":
            return tree.get("reward.reward_model.enable", tree.get("reward_model.enable")) is False
        case "pairs_images":
            return value in (None, False) or _objective(tree) == "dpo"
        case "names_the_objective":
            names = ("direct_preference", "diffusion_nft_model", "diffusion_dpo_model")
            return value in names and _objective(tree) in ("diffusion_nft", "dpo")
        case "draws_with_old":
            if value in ("default", ["default"]):
                names = ("decay_schedule", "decay", "update_interval")
                return not averages_old_policy(*(tree.get(f"algorithm.old_policy_{name}") for name in names))
            return value is None or (value in ("old", ["default", "old"]) and _is_clean(tree, needs_old=True))
        case "pairs_of_files":
            return value == "offline" and bool(tree.get("data.preferences"))
        case "known_family":
            return value in (None, *FAMILIES)
        case "own_reward_manager":
            return value is None or str(value).startswith("pkg://verl_omni.")
        case "plain_chat_template":
            # The template comes to the user's own words. Scripts indent it in their own ways.
            plain = "{%formessageinmessages%}{%ifmessage['role']=='user'%}{{message['content']}}{%endif%}{%endfor%}"
            return value is None or re.sub(r"\s", "", str(value)).strip('"') == plain
        case "in_the_pipeline":
            model = str(tree.get(f"{_MODEL}.path", ""))
            return value is None or (bool(model) and f"{value}/".startswith(f"{model}/"))
        case "pipeline_tokenizers":
            # CLIP at its 77 tokens, T5 at max_sequence_length; other lengths cut prompts as the pipeline does not.
            lengths = (None, 77, tree.get(f"{_ROLLOUT}.pipeline.max_sequence_length", 512))
            return value is None or all(
                isinstance(part, Mapping)
                and str(part.get("path", "")).startswith("tokenizer")
                and part.get("max_length") in lengths
                for part in (value.values() if isinstance(value, Mapping) else [value])
            )
    raise KeyError(condition)


def _objective(tree: Mapping[str, Any]) -> Any:
    """The objective that the settings name, by its loss or by verl-omni's algorithm."""
    return tree.get(f"{_ACTOR}.diffusion_loss.loss_mode", tree.get(_ALGORITHM, DEFAULT))


def _is_clean(tree: Mapping[str, Any], *, needs_old: bool = False) -> bool:
    """The settings name an objective on clean images, with ``needs_old`` one that has an old policy."""
    objective = _objective(tree)
    if not isinstance(objective, str) or objective not in OBJECTIVES:
        return False
    return OBJECTIVES[objective].clean and (OBJECTIVES[objective].needs_old or not needs_old)


@cache
def _file() -> Mapping[str, Any]:
    text = resources.files("flowgrpo_rc.cli").joinpath("foreign_keys.yaml").read_text(encoding="utf-8")
    # The loader in C takes a twentieth of the time.
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


@cache
def rows() -> Mapping[str, Row]:
    """Pattern -> row."""
    tables = _file()["tables"]
    found: dict[str, Row] = {}
    for given in _file()["rows"]:
        cells = dict(given)
        keys = cells.pop("key")
        # Only a table lists every spelling, so only with one can another value be refused.
        if isinstance(cells.get("values"), str):
            cells |= {"values": tables[cells["values"]], "only": cells["action"] in ("move", "rename")}
        if isinstance(cells.get("ignore"), str):
            cells["ignore"] = tables[cells["ignore"]]
        cells["reason"] = cells["reason"].replace("{families}", ", ".join(FAMILIES))
        found |= {key: Row(key=key, **cells) for key in ([keys] if isinstance(keys, str) else keys)}
    return found


def find(key: str) -> Row | None:
    """The row of a key that is none here: the narrowest pattern that fits."""
    # Most keys have a row of their own, and matching patterns is slow.
    if exact := rows().get(key.removeprefix("config.")):
        return exact
    fitting = [row for pattern, row in rows().items() if "*" in pattern and row.match(key)]
    # A row for one key of a section is an exception to the section's row.
    return max(fitting, key=lambda row: (not row.key.endswith(".**"), len(row.key)), default=None)


def is_one_value(key: str) -> bool:
    """True for a foreign key whose mapping is a value, not a section: a row has this very key."""
    return (row := find(key)) is not None and "**" not in row.key


@cache
def algorithms() -> Mapping[str, Mapping[str, Any]]:
    """``actor_rollout_ref.model.algorithm`` of verl-omni -> the settings that make it up here."""
    found: dict[str, dict[str, Any]] = {"mix_grpo": {f"{_ROLLOUT}.algo.sample_strategy": "progressive"}}
    for name, objective in OBJECTIVES.items():
        loss = {} if name == DEFAULT else {f"{_ACTOR}.diffusion_loss.loss_mode": name}
        sde = {} if objective.sde_type is None else {f"{_ROLLOUT}.algo.sde_type": objective.sde_type}
        found[name] = {**loss, **sde}
    return {DEFAULT: found.pop(DEFAULT), **found}


def other_defaults() -> Mapping[str, Any]:
    """Settings that change what is learned -> their default in verl-omni, where it is another one."""
    return _file()["other_defaults"]


# ---------------------------------------------------------------- translation


@dataclass
class Translation:
    """``run`` brings ``leaves`` to the schema's keys; ``warn`` reports what changed."""

    leaves: dict[str, Any]  # Dotted key -> value of every setting; changed in place
    refusals: Refusals
    overridden: Collection[str]
    """Keys of the command line. It wins over a file; contradictions within one of the two are refused."""
    ignored: dict[str, list[str]] = field(default_factory=dict)
    """Reason -> settings that change nothing that is learned."""
    moved: list[str] = field(default_factory=list)  # ``there -> here``, and why where it is not plain
    other_defaults: list[str] = field(default_factory=list)  # Settings at their defaults, which are others in verl-omni
    builtins: dict[str, str] = field(default_factory=dict)  # Built-in reward -> the entry of verl-omni's that became it

    def warn(self, stacklevel: int) -> None:
        """One warning for what is ignored, one for what is written in another form, one for other defaults."""
        ignored = [f"{', '.join(keys)} ({reason})" for reason, keys in self.ignored.items()]
        for text, settings in (
            ("ignored, since they cannot change what is learned", ignored),
            ("settings in another trainer's form, and what they are here", self.moved),
            ("not given, and with another default in verl-omni", self.other_defaults),
        ):
            if settings:
                warnings.warn(f"{text}: {'; '.join(settings)}", stacklevel=stacklevel + 1)

    def run(self) -> None:
        """Translate everything."""
        given = dict(self.leaves)
        foreign = [key for key in given if key not in schema()]
        for key in foreign:
            # A foreign key never reaches the configuration classes, whatever becomes of it.
            self._foreign_key(key, self.leaves.pop(key), given)
        # Moved keys may name any setting, so what belongs to keys of this package comes after them.
        self._correction()
        self._algorithm()
        self._reward_functions()
        for row in _respellings().values():
            if row.key in self.leaves:
                self._spelling(row)
        self._warm_up()
        # After a refusal the user edits the command anyway, and a longer message hides what is wrong.
        if len(foreign) >= WRITTEN_THERE and not self.refusals.found:
            self.other_defaults = [
                f"{key}={_grammar(schema()[key])} (there {value})"
                for key, value in other_defaults().items()
                if key not in self.leaves
            ]

    def _ignore(self, setting: str, reason: str) -> None:
        self.ignored.setdefault(reason, []).append(setting)

    def _first_wins(self, first: str, second: str) -> bool:
        """True where of two forms of one setting only ``first`` is on the command line."""
        return first in self.overridden and second not in self.overridden

    def _contradiction(self, subject: str, found: str, other: str, value: Any, leave_out: str = "one") -> None:
        self.refusals.wrong(
            f"{subject}: got {found}, but {other} is {show(value)}, and the two are one setting here; leave "
            f"{leave_out} out"
        )

    def _foreign_key(self, key: str, value: Any, given: Mapping[str, Any]) -> None:
        row = find(key)
        if key in LAUNCHER_KEYS:
            self._launcher(key, value)
        elif row is None:
            self.refusals.unknown(key)
        elif key == _TIMESTEP_FRACTION and value is not None and _is_clean(given):
            self._timestep_fraction(value, given)
        elif row.action == "move":
            self._move(key, value, row)
        elif row.action == "delete":
            self.refusals.add("delete", key, row.reason)
        elif row.action == "rename" and row.only and value not in row.values:
            names = ", ".join(map(str, row.values))
            self.refusals.wrong(f"{key}: got {show(value)}; {row.to} has one of {names}")
        elif row.action == "rename":
            here = override(row.target(key), row.spelled(value))
            self.refusals.add("instead", here, f"for {override(key, value)}: {row.reason}")
        # The value cannot change what is learned, or asks for what happens here anyway.
        elif row.action == "ignore" or value in row.ignore or _changes_nothing(row.ignore_if, value, given):
            self._ignore(key, row.reason)
        else:
            self.refusals.add("cannot", override(key, value), row.reason)

    def _move(self, key: str, value: Any, row: Row) -> None:
        target = row.target(key)
        here = row.spelled(value)
        if target not in schema():
            return self.refusals.unknown(key)
        if value in row.ignore:
            return self._ignore(key, f"nothing is asked for; see {target}")
        if row.only and not (_is_scalar(value) and value in row.values):
            names = ", ".join(name for name in row.values if isinstance(name, str))
            return self.refusals.wrong(f"{key}: got {show(value)}; choose one of {names} (it is {target} here)")
        # Both forms may be given, as a script's file and a user's override do; equal values are no conflict.
        present = self.leaves.get(target)
        respelled = _respellings()[target].spelled(present) if target in _respellings() else present
        if target in self.leaves and respelled != here and not self._first_wins(key, target):
            if self._first_wins(target, key):
                return self._ignore(key, f"{target} on the command line wins over the file")
            # Neither value is right, so that no rule about the key is checked.
            self.leaves[target] = INVALID
            return self._contradiction(key, show(value), target, present, leave_out=key)
        self.leaves[target] = here
        return self.moved.append(f"{key}={_grammar(value)} -> {override(target, here)}")

    def _launcher(self, key: str, value: Any) -> None:
        """Numbers of processes come from the launcher; a setting must agree with it."""
        try:
            value = convert(PositiveInt, value)
        except ValueError:
            return self.refusals.wrong(f"{key}: got {show(value)}; give a whole number above 0")
        per_node = key == LAUNCHER_KEYS[0]
        flag = f"`torchrun --{'nproc_per_node' if per_node else 'nnodes'} {value}` (or accelerate launch)"
        # Batch sizes count over all processes, so nothing learned changes; but the user relies on the number.
        started = _started()
        if started is None:
            agrees = "it agrees" if value == 1 else f"start with {flag} for {value}"
            return self._ignore(f"{key}={value}", f"no launcher was used, so there is one process; {agrees}")
        actual = started[0 if per_node else 1]
        what = f"the launcher started {actual} {'processes on this machine' if per_node else 'machines'}"
        if value == actual:
            return self._ignore(f"{key}={value}", f"{what}, so it agrees")
        return self.refusals.add("cannot", f"{key}={value}", f"{what}; start with {flag}, or set {key}={actual}")

    def _timestep_fraction(self, value: Any, given: Mapping[str, Any]) -> None:
        """verl-omni noises a clean image at this share of the rollout's steps; here the places are a number."""
        steps = given.get(_STEPS, schema()[_STEPS])
        share = value if isinstance(value, int | float) else 0
        if not 0 < share <= 1 or not isinstance(steps, int):
            return self.refusals.wrong(f"{_TIMESTEP_FRACTION}: got {show(value)}; give a number above 0, at most 1")
        places = {f"{_ACTOR}.clean.places": max(1, int(steps * share)), f"{_ACTOR}.clean.distribution": "steps"}
        for key, number in places.items():
            self.leaves.setdefault(key, number)
        here = " ".join(override(key, self.leaves[key]) for key in places)
        return self.moved.append(f"{_TIMESTEP_FRACTION}={_grammar(value)} -> {here}")

    def _algorithm(self) -> None:
        """verl-omni names an algorithm; here an objective and the placing of windows make it up."""
        name = self.leaves.get(_ALGORITHM, DEFAULT)
        if name == DEFAULT:
            return
        self.leaves[_ALGORITHM] = DEFAULT
        if not _is_scalar(name) or name not in algorithms():
            reason = f"this algorithm is not implemented; there are {', '.join(algorithms())}"
            return self.refusals.add("cannot", override(_ALGORITHM, name), reason)
        # A script may name the algorithm and its parts; equal values are no conflict.
        for key, value in algorithms()[name].items():
            present = self.leaves.setdefault(key, value)
            # verl-omni lets a strategy of its own stand beside any algorithm.
            keeps = present == value or key.endswith(".sample_strategy") or self._first_wins(key, _ALGORITHM)
            if self._first_wins(_ALGORITHM, key):
                self.leaves[key] = value
            elif not keeps:
                self._contradiction(_ALGORITHM, f"{name}, which is {key}={value} here", key, present)
                self.leaves[key] = INVALID
        made_of = " ".join(f"{key}={_grammar(self.leaves[key])}" for key in algorithms()[name])
        return self.moved.append(f"{_ALGORITHM}={name} -> {made_of}")

    def _reward_functions(self) -> None:
        """verl-omni's entries that stand for a built-in reward: those without a path, and those of its own scorers
        whose files are not there."""
        builtin = _builtin_of_file(self.leaves.get(f"{_OWN_FUNCTION}.path"))
        if builtin is not None:
            names = {name: f"{_OWN_FUNCTION}.{name}" for name in ("path", "name", "weight", "reward_kwargs")}
            entry = {name: self.leaves.pop(key) for name, key in names.items() if key in self.leaves}
            # A built-in reward takes no arguments, so they are refused with the others.
            entry |= entry.pop("reward_kwargs", None) or {}
            self._to_builtin(_OWN_FUNCTION, builtin, entry)
        given = self.leaves.get(_OWN_FUNCTIONS)
        for name, entry in given.items() if isinstance(given, Mapping) else ():
            if not isinstance(entry, Mapping):
                continue
            is_named = entry.get("path") is None and name in REWARD_NAMES
            builtin = name if is_named else _builtin_of_file(entry.get("path"))
            if builtin is not None:
                self.leaves[_OWN_FUNCTIONS] = {k: v for k, v in self.leaves[_OWN_FUNCTIONS].items() if k != name}
                self._to_builtin(f"{_OWN_FUNCTIONS}.{name}", builtin, entry)

    def _to_builtin(self, key: str, builtin: str, entry: Mapping[str, Any]) -> None:
        """Replace an entry by the built-in reward, empty where there is none, and its weight."""
        arguments = entry.keys() - {"path", "name", *VERL_OMNIS}
        if builtin not in REWARD_NAMES:
            # To train on another reward in silence would be worse than to stop.
            return self.refusals.add("cannot", override(key, entry), _NO_SCORER)
        if arguments:
            reason = f"the built-in reward {builtin} takes none of {', '.join(arguments)}"
            return self.refusals.add("cannot", override(key, entry), reason)
        question = _file()["scorers"].get(_scorer_name(entry.get("path")), {}).get("question")
        questions = self.leaves.get(_QUESTIONS, [question])
        weights = self.leaves.get(_FUNCTIONS) or {}
        weight = entry.get("weight", 1.0)
        earlier = self.builtins.setdefault(builtin, key)
        if question is not None and questions != [question]:
            return self.refusals.wrong(
                f"{key}: it is the judge's question {question} here, but {_QUESTIONS} is {show(questions)}; write all "
                f"questions there, with their weights, and leave {key} out"
            )
        # verl-omni adds both scores; one weight cannot stand for two entries without a word to the user.
        if earlier != key:
            return self.refusals.wrong(
                f"{key}: it is the built-in reward {builtin} here, and so is {earlier}, and verl-omni counts "
                "both; leave one out, and give the other the sum of their weights"
            )
        if not isinstance(weights, Mapping) or weights.get(builtin, weight) != weight:
            return self._contradiction(key, f"the weight {show(weight)}", _FUNCTIONS, weights)
        self.leaves[_FUNCTIONS] = {**weights, builtin: weight}
        here = override(f"{_FUNCTIONS}.{builtin}", weight)
        if question is not None:
            self.leaves[_QUESTIONS] = questions
            here += f" {override(_QUESTIONS, questions)}"
        return self.moved.append(f"{key} -> {here}")

    def _correction(self) -> None:
        """verl-omni's actor has a copy of the correction; here there is one, merged key by key."""
        place, copy = CORRECTIONS
        own = self.leaves.get(place, {})
        copied = self.leaves.get(copy, {})
        if not isinstance(copied, Mapping | None):
            return self.refusals.wrong(
                f"{copy}: got {show(copied)}; give its keys, e.g. {{rollout_is: sequence}}, or null"
            )
        if copy not in self.leaves or not isinstance(own, Mapping | None):
            return
        del self.leaves[copy]
        if own is None or copied is None:
            # Null switches the correction off. A script may do that for the one that its file configures.
            off, on = CORRECTIONS if own is None else reversed(CORRECTIONS)
            keys = own or copied
            typed = [any(f"{key}.".startswith(f"{one}.") for key in self.overridden) for one in (off, on)]
            if keys and typed[0] == typed[1]:
                self._contradiction(off, "null, which is no correction", on, keys)
            self.leaves[place] = None if not keys or typed == [True, False] else keys
            return
        # verl-omni's default file interpolates the copy, so equal keys in both places are the rule.
        merged = {**copied, **own}
        for key, value in copied.items():
            here, there = f"{place}.{key}", f"{copy}.{key}"
            if merged[key] == value:
                continue
            if self._first_wins(there, here):
                merged[key] = value
            elif not self._first_wins(here, there):
                self._contradiction(there, show(value), here, own[key], leave_out="the first")
        self.leaves[place] = merged

    def _spelling(self, row: Row) -> None:
        """A value of a key that exists here too, as other trainers spell it."""
        value = self.leaves[row.key]
        # True equals 1 and False 0, so a table of numbers would take them.
        if isinstance(value, bool) and not any(isinstance(name, bool) for name in row.values):
            return
        if value in row.ignore:
            del self.leaves[row.key]
            becomes = "its default"
        elif _is_scalar(value) and value in row.values:
            self.leaves[row.key] = row.values[value]
            becomes = _grammar(row.values[value])
        else:
            return
        if row.reason:
            self.moved.append(f"{row.key}={_grammar(value)} -> {becomes} ({row.reason})")

    def _warm_up(self) -> None:
        """verl's ``constant`` schedule warms up on request; here that is ``constant_with_warmup``."""
        optim = f"{_ACTOR}.optim"
        kind = f"{optim}.lr_scheduler_type"
        # verl's default schedule is constant, so that its scripts give the warm-up alone.
        steps = [self.leaves.get(f"{optim}.{name}", 0) for name in ("lr_warmup_steps", "lr_warmup_steps_ratio")]
        warms_up = any(isinstance(value, int | float) and not isinstance(value, bool) and value > 0 for value in steps)
        if warms_up and self.leaves.get(kind, schema()[kind]) == "constant":
            self.leaves[kind] = "constant_with_warmup"
            self.moved.append(f"{kind}=constant with a warm-up -> {kind}=constant_with_warmup")


@cache
def _respellings() -> Mapping[str, Row]:
    """Key of this package -> the row with other trainers' spellings of its values."""
    return {key: row for key, row in rows().items() if row.action == "respell"}


def _builtin_of_file(path: Any) -> str | None:
    """The built-in reward for a scorer of verl-omni's that is not there, empty where there is none; None for any other
    file."""
    name = _scorer_name(path)
    # A user with verl-omni's source has the file itself, which is used as it is.
    if name is None or os.path.isfile(os.path.expanduser(str(path))):
        return None
    return _file()["scorers"].get(name, {}).get("reward", "")


def _scorer_name(path: Any) -> str | None:
    """``genrm_ocr`` of ``verl_omni/utils/reward_score/genrm_ocr.py``; None for any other path."""
    scorer = _SCORER.fullmatch(str(path))
    return None if scorer is None else scorer[1] or scorer[2]


def _started() -> tuple[int, int] | None:
    """Processes on this machine and machines, as torchrun and accelerate launch report them; None without them."""
    # Read from the environment: asking torch would import it, and accelerate sets the same variables.
    world = os.environ.get("WORLD_SIZE")
    if world is None:
        return None
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    return per_node, int(world) // per_node


def _is_scalar(value: Any) -> bool:
    return isinstance(value, str | int | float | bool | None)


# ---------------------------------------------------------------- overrides as text


def override(key: str, value: Any) -> str:
    """``key=value`` as it is typed into a shell: Hydra's grammar, in quotes where the shell needs them."""
    return shlex.quote(f"{key}={_grammar(value)}")


def _grammar(value: Any) -> str:
    """A value as Hydra reads it back."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    # Without blanks after commas, which would end the word in a shell.
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_grammar(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(_grammar(item) for item in value) + "]"
    text = str(value)
    if not isinstance(value, str) or (_PLAIN.fullmatch(text) and text.lower() not in ("null", "true", "false")):
        return text
    # Double quotes, since shlex.quote puts single ones around the whole word.
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
