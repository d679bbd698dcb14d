"""Settings written for verl-omni, verl, flow_grpo or Flow-Factory become settings of this package, or are refused.

``foreign_keys.yaml`` has a row for each of their keys. The code here applies the rows, and translates settings that are
more than a key and a value: the correction's two places, algorithms, reward functions and numbers of processes.
"""

from __future__ import annotations

import os
import re
import shlex
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

import yaml

from flowgrpo_rc.checks import show
from flowgrpo_rc.cli.schema import nearest, schema
from flowgrpo_rc.loss.objectives import DEFAULT, OBJECTIVES
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
Tree = Mapping[str, Any]
"""All settings that were given: dotted key -> value."""


# ---------------------------------------------------------------- refusals


class ConfigError(ValueError):
    """The configuration cannot be composed; the message names every key that is wrong, and the remedy."""


GROUPS = ("delete; they mean nothing here", "write instead", "cannot work here", "unknown", "wrong value")
"""Remedies of refusals, in the order of the message."""
_DELETE, _INSTEAD, _CANNOT, _UNKNOWN, _WRONG = GROUPS


class Refusal(NamedTuple):
    """One setting that cannot be used."""

    group: str
    subject: str
    """The key, or ``key=value``."""
    reason: str
    """Text behind the subject; subjects of the same reason share a line."""
    alone: str
    """The whole message when nothing else is wrong."""


class Refusals:
    """Collects refusals; ``raise_if_any`` turns them into one ``ConfigError``."""

    def __init__(self) -> None:
        self.found: list[Refusal] = []

    def delete(self, key: str, reason: str) -> None:
        """Refuse a key without a meaning."""
        self._add(_DELETE, key, f": {reason}", f"{key} has no meaning here: {reason}; delete it")

    def instead(self, subject: str, override: str, reason: str) -> None:
        """Refuse a key that has another name here; ``override`` is ready to paste."""
        alone = f"{subject}: write {override} instead ({reason})"
        self._add(_INSTEAD, override, f"  for {subject}: {reason}", alone)

    def cannot(self, subject: str, reason: str) -> None:
        """Refuse a setting that has no counterpart."""
        self._add(_CANNOT, subject, f": {reason}", f"{subject} cannot work here: {reason}")

    def unknown(self, key: str) -> None:
        """Refuse a key that no trainer documents."""
        near = nearest(key)
        self._add(_UNKNOWN, key, f"; nearest: {near}", f"unknown configuration key {key}; nearest: {near}")

    def wrong(self, message: str) -> None:
        """Refuse a value; the message begins with the key."""
        self._add(_WRONG, message, "", message)

    def raise_if_any(self) -> None:
        """Raise ``ConfigError`` if anything was refused: one line for one refusal, else a line for each."""
        if self.found:
            raise ConfigError(self.found[0].alone if len(self.found) == 1 else "\n".join(self._lines()))

    def _add(self, *refusal: str) -> None:
        # A key may be refused twice, by its row and by the settings that it moves to.
        if Refusal(*refusal) not in self.found:
            self.found.append(Refusal(*refusal))

    def _lines(self) -> Iterator[str]:
        yield f"the configuration has {len(self.found)} settings that cannot be used"
        for group in GROUPS:
            subjects: dict[str, list[str]] = {}
            for refusal in self.found:
                if refusal.group == group:
                    subjects.setdefault(refusal.reason, []).append(refusal.subject)
            if subjects:
                yield f"  {group}:"
            for reason, same in subjects.items():
                # A subject without a reason is a message of its own.
                yield from [f"    {', '.join(same)}{reason}"] if reason else [f"    {subject}" for subject in same]


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
    ignore_if: Callable[[Any, Tree], bool] | None = None

    def match(self, key: str) -> re.Match[str] | None:
        """The match of the pattern with a key; its groups are the texts that ``*`` stands for."""
        return _regex(self.key).fullmatch(key.removeprefix("config."))  # flow_grpo's flags begin with it

    def target(self, key: str) -> str:
        """The key here, for one that fits."""
        found = self.match(key)
        return self.to.replace("*", found[1]) if found and "*" in self.to else self.to

    def ignores(self, value: Any, tree: Tree) -> bool:
        """True for a value that cannot change what is learned, or does what happens here anyway."""
        if self.ignore_if is not None:
            return self.ignore_if(value, tree)
        return self.action == "ignore" or value in self.ignore

    def spelled(self, value: Any) -> Any:
        """The value as it is spelled here."""
        return self.values.get(value, value) if _is_scalar(value) else value


@cache
def _regex(pattern: str) -> re.Pattern[str]:
    """``*`` stands for text within one part of a key, a leading ``**.`` for any parts, ``a.**`` for a and all below."""
    text = re.escape(pattern).replace(r"\*\*\.", r"(?:.+\.)").replace(r"\.\*\*", r"(?:\..+)?")
    return re.compile(text.replace(r"\*", r"([^.]*)"))


def _reward_model_is_off(_value: Any, tree: Tree) -> bool:
    return tree.get("reward.reward_model.enable", tree.get("reward_model.enable")) is False


def _other_objective(_value: Any, tree: Tree) -> bool:
    """The setting belongs to an objective that is not chosen."""
    return tree.get(f"{_ACTOR}.diffusion_loss.loss_mode", DEFAULT) not in ("diffusion_nft", "dpo", "awm")


def _own_reward_manager(value: Any, _tree: Tree) -> bool:
    return value is None or str(value).startswith("pkg://verl_omni.")


def _plain_chat_template(value: Any, _tree: Tree) -> bool:
    """Null, or a template that comes to the user's own words."""
    # Compared without white space, for scripts indent it in their own ways.
    plain = "{%formessageinmessages%}{%ifmessage['role']=='user'%}{{message['content']}}{%endif%}{%endfor%}"
    return value is None or re.sub(r"\s", "", str(value)).strip('"') == plain


def _in_the_pipeline(value: Any, tree: Tree) -> bool:
    """Null, or a path in the model's own folder."""
    model = str(tree.get(f"{_MODEL}.path", ""))
    return value is None or (bool(model) and f"{value}/".startswith(f"{model}/"))


def _pipeline_tokenizers(value: Any, tree: Tree) -> bool:
    """Null, or the pipeline's own tokenizers: CLIP at its 77 tokens, T5 at the length of ``max_sequence_length``."""
    # Other lengths would cut prompts in another way than the pipeline does.
    length = tree.get(f"{_ROLLOUT}.pipeline.max_sequence_length", 512)
    parts = value.values() if isinstance(value, Mapping) else [value]
    return value is None or all(
        isinstance(part, Mapping)
        and str(part.get("path", "")).startswith("tokenizer")
        and part.get("max_length") in (None, 77, length)
        for part in parts
    )


def _known_family(value: Any, _tree: Tree) -> bool:
    return value in (None, *FAMILIES)


_CONDITIONS = {
    condition.__name__.removeprefix("_"): condition
    for condition in (
        _reward_model_is_off,
        _other_objective,
        _own_reward_manager,
        _plain_chat_template,
        _in_the_pipeline,
        _pipeline_tokenizers,
        _known_family,
    )
}
"""The functions that ``ignore_if`` of a row names."""


@cache
def _file() -> Mapping[str, Any]:
    """``foreign_keys.yaml``."""
    text = resources.files("flowgrpo_rc.cli").joinpath("foreign_keys.yaml").read_text(encoding="utf-8")
    # The loader in C takes a twentieth of the time.
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


@cache
def rows() -> Mapping[str, Row]:
    """Pattern -> row; patterns that say more of a key come first."""
    tables = _file()["tables"]
    found: dict[str, Row] = {}
    for given in _file()["rows"]:
        cells = dict(given)
        keys = cells.pop("key")
        # Only a table lists every spelling, so only with one can another value be refused.
        if isinstance(cells.get("values"), str):
            cells |= {"values": tables[cells["values"]], "only": cells["action"] == "move"}
        if isinstance(cells.get("ignore"), str):
            cells["ignore"] = tables[cells["ignore"]]
        if "ignore_if" in cells:
            cells["ignore_if"] = _CONDITIONS[cells["ignore_if"]]
        cells["reason"] = cells["reason"].replace("{families}", ", ".join(FAMILIES))
        found |= {key: Row(key=key, **cells) for key in ([keys] if isinstance(keys, str) else keys)}
    return {key: found[key] for key in sorted(found, key=_width)}


def _width(pattern: str) -> tuple[int, int]:
    """Sorts patterns without ``*`` first and whole sections last, long ones of these before short ones."""
    # A row for one key of a section is an exception to the section's row.
    if pattern.endswith(".**"):
        return 2, -len(pattern)
    return int("*" in pattern), 0


def find(key: str) -> Row | None:
    """The row of a key that is none here: the narrowest pattern that fits."""
    # Most keys have a row of their own, and matching patterns is slow.
    exact = rows().get(key.removeprefix("config."))
    return exact or next((row for pattern, row in rows().items() if "*" in pattern and row.match(key)), None)


def is_one_value(key: str) -> bool:
    """True for a foreign key whose mapping is a value, not a section: a row has this very key."""
    row = find(key)
    return row is not None and "**" not in row.key


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

    leaves: dict[str, Any]
    """Dotted key -> value of every setting; changed in place."""
    refusals: Refusals
    overridden: Collection[str]
    """Keys of the command line. It wins over a file; contradictions within one of the two are refused."""
    ignored: dict[str, list[str]] = field(default_factory=dict)
    """Reason -> settings that change nothing that is learned."""
    moved: list[str] = field(default_factory=list)
    """``there -> here``, and why where it is not plain."""
    other_defaults: list[str] = field(default_factory=list)
    """Settings at their defaults, which are others in verl-omni."""
    builtins: dict[str, str] = field(default_factory=dict)
    """Built-in reward -> the entry of verl-omni's that became it."""

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
        foreign = [key for key in self.leaves if key not in schema()]
        given = dict(self.leaves)
        for key in foreign:
            self._foreign_key(key, given)
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

    def _foreign_key(self, key: str, given: Tree) -> None:
        # A foreign key never reaches the configuration classes, whatever becomes of it.
        value = self.leaves.pop(key)
        row = find(key)
        if key in LAUNCHER_KEYS:
            self._launcher(key, value)
        elif row is None:
            self.refusals.unknown(key)
        elif row.action == "move":
            self._move(key, value, row)
        elif row.action == "delete":
            self.refusals.delete(key, row.reason)
        elif row.action == "rename":
            self.refusals.instead(override(key, value), override(row.target(key), row.spelled(value)), row.reason)
        elif row.ignores(value, given):
            self._ignore(key, row.reason)
        else:
            self.refusals.cannot(override(key, value), row.reason)

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
        differs = target in self.leaves and respelled != here
        if differs and self._first_wins(target, key):
            return self._ignore(key, f"{target} on the command line wins over the file")
        if differs and not self._first_wins(key, target):
            # Neither value is right, so that no rule about the key is checked.
            self.leaves[target] = INVALID
            return self.refusals.wrong(
                f"{key}: got {show(value)}, but {target} is {show(present)}, and the two are one setting here; leave "
                f"{key} out"
            )
        self.leaves[target] = here
        return self.moved.append(f"{key}={_grammar(value)} -> {override(target, here)}")

    def _launcher(self, key: str, value: Any) -> None:
        """Numbers of processes come from the launcher; a setting must agree with it."""
        try:
            value = convert(PositiveInt, value)
        except ValueError:
            return self.refusals.wrong(f"{key}: got {show(value)}; give a whole number above 0")
        per_node = key == LAUNCHER_KEYS[0]
        flag = f"torchrun --{'nproc_per_node' if per_node else 'nnodes'} {value}"
        # Batch sizes count over all processes, so nothing learned changes; but the user relies on the number.
        started = _started()
        if started is None:
            agrees = "it agrees" if value == 1 else f"start with `{flag}` (or accelerate launch) for {value}"
            return self._ignore(f"{key}={value}", f"no launcher was used, so there is one process; {agrees}")
        actual = started[0] if per_node else started[1]
        what = "processes on this machine" if per_node else "machines"
        if value == actual:
            return self._ignore(f"{key}={value}", f"the launcher started {actual} {what}, so it agrees")
        return self.refusals.cannot(
            f"{key}={value}",
            f"the launcher started {actual} {what}; start with `{flag}` (or accelerate launch), or set {key}={actual}",
        )

    def _algorithm(self) -> None:
        """verl-omni names an algorithm; here an objective and the placing of windows make it up."""
        name = self.leaves.get(_ALGORITHM, DEFAULT)
        if not _is_scalar(name) or name not in algorithms():
            del self.leaves[_ALGORITHM]
            names = ", ".join(algorithms())
            return self.refusals.cannot(
                override(_ALGORITHM, name), f"this algorithm is not implemented; there are {names}"
            )
        if name == DEFAULT:
            return None
        self.leaves[_ALGORITHM] = DEFAULT
        made_of = []
        # A script may name the algorithm and its parts; equal values are no conflict.
        for key, value in algorithms()[name].items():
            present = self.leaves.get(key, value)
            # verl-omni lets a strategy of its own stand beside any algorithm.
            keeps = present == value or key.endswith(".sample_strategy") or self._first_wins(key, _ALGORITHM)
            if self._first_wins(_ALGORITHM, key):
                present = value
            elif not keeps:
                self.refusals.wrong(
                    f"{_ALGORITHM}: got {name}, which means {key}={value} here, but {key} is {show(present)}; leave "
                    "one out"
                )
                present = INVALID
            self.leaves[key] = present
            made_of.append(f"{key}={show(present).strip(chr(39))}")
        return self.moved.append(f"{_ALGORITHM}={name} -> {' '.join(made_of)}")

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
        if not isinstance(given, Mapping):
            return
        self.leaves[_OWN_FUNCTIONS] = kept = dict(given)
        for name, entry in given.items():
            if not isinstance(entry, Mapping):
                continue
            nameless = name if name in REWARD_NAMES else None
            builtin = nameless if entry.get("path") is None else _builtin_of_file(entry["path"])
            if builtin is not None:
                del kept[name]
                self._to_builtin(f"{_OWN_FUNCTIONS}.{name}", builtin, entry)

    def _to_builtin(self, key: str, builtin: str, entry: Mapping[str, Any]) -> None:
        """Replace an entry by the built-in reward, empty where there is none, and its weight."""
        setting = override(key, entry)
        arguments = entry.keys() - {"path", "name", *VERL_OMNIS}
        if builtin not in REWARD_NAMES:
            # To train on another reward in silence would be worse than to stop.
            return self.refusals.cannot(setting, _NO_SCORER)
        if arguments:
            return self.refusals.cannot(setting, f"the built-in reward {builtin} takes none of {', '.join(arguments)}")
        question = _file()["scorers"].get(_scorer_name(entry.get("path")), {}).get("question")
        questions = self.leaves.get(_QUESTIONS, [question])
        if question is not None and questions != [question]:
            return self.refusals.wrong(
                f"{key}: it is the judge's question {question} here, but {_QUESTIONS} is {show(questions)}; write all "
                f"questions there, with their weights, and leave {key} out"
            )
        # verl-omni adds both scores; one weight cannot stand for two entries without a word to the user.
        earlier = self.builtins.setdefault(builtin, key)
        if earlier != key:
            return self.refusals.wrong(
                f"{key}: it is the built-in reward {builtin} here, and so is {earlier}, and verl-omni counts "
                "both; leave one out, and give the other the sum of their weights"
            )
        weights = self.leaves.get(_FUNCTIONS) or {}
        weight = entry.get("weight", 1.0)
        if not isinstance(weights, Mapping) or weights.get(builtin, weight) != weight:
            return self.refusals.wrong(
                f"{key}: got the weight {show(weight)}, but {_FUNCTIONS} is {show(weights)}, and the two are one "
                "setting here; leave one out"
            )
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
        if copy not in self.leaves or not isinstance(own, Mapping | None) or not isinstance(copied, Mapping | None):
            return
        del self.leaves[copy]
        if own is None or copied is None:
            self.leaves[place] = self._correction_or_none(own, copied)
            return
        # verl-omni's default file interpolates the copy, so equal keys in both places are the rule.
        merged = {**copied, **own}
        for key, value in copied.items():
            if merged[key] == value:
                continue
            if self._first_wins(f"{copy}.{key}", f"{place}.{key}"):
                merged[key] = value
            elif not self._first_wins(f"{place}.{key}", f"{copy}.{key}"):
                self.refusals.wrong(
                    f"{copy}.{key}: got {show(value)}, but {place}.{key} is {show(own[key])}, and the two are one "
                    "setting here; leave the first out"
                )
        self.leaves[place] = merged

    def _correction_or_none(self, own: Any, copied: Any) -> Any:
        """The correction where one of its two places is null, which switches it off."""
        # A script may switch the correction off that its file configures; of equal standing the two contradict.
        off, on = CORRECTIONS if own is None else reversed(CORRECTIONS)
        keys = copied if own is None else own
        off_is_typed, on_is_typed = (
            any(f"{key}.".startswith(f"{section}.") for key in self.overridden) for section in (off, on)
        )
        if not keys or (off_is_typed and not on_is_typed):
            return None
        if off_is_typed or not on_is_typed:
            self.refusals.wrong(
                f"{off}: got null, which is no correction, but {on} is {show(keys)}, and the two are one setting here; "
                "leave one out"
            )
        return keys

    def _spelling(self, row: Row) -> None:
        """A value of a key that exists here too, as other trainers spell it."""
        value = self.leaves[row.key]
        # True equals 1 and False 0, so a table of numbers would take them.
        takes = not isinstance(value, bool) or any(isinstance(name, bool) for name in row.values)
        if takes and value in row.ignore:
            del self.leaves[row.key]
            becomes = "its default"
        elif takes and _is_scalar(value) and value in row.values:
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
    world = os.environ.get("WORLD_SIZE", "")
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not world.isdigit() or int(world) < 1:
        return None
    per_node = int(local) if local.isdigit() and int(local) > 0 else int(world)
    return per_node, max(1, int(world) // per_node)


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
