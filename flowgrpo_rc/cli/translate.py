"""Settings written for verl-omni, verl, flow_grpo or Flow-Factory become settings of this package, or are refused."""

from __future__ import annotations

import os
import re
import shlex
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from flowgrpo_rc.checks import show
from flowgrpo_rc.cli.foreign_keys import LAUNCHER_KEYS, Deleted, Ignored, Moved, Refused, Renamed, find
from flowgrpo_rc.cli.refusals import Refusals
from flowgrpo_rc.cli.schema import nearest, schema
from flowgrpo_rc.cli.spellings import (
    ALGORITHMS,
    DROP,
    JUDGE_QUESTIONS,
    MAY_DIFFER,
    NO_SCORER,
    OTHER_DEFAULTS,
    SPELLINGS,
    VERL_OMNI_SCORERS,
)
from flowgrpo_rc.loss.objectives import DEFAULT
from flowgrpo_rc.rewards.config import REWARD_NAMES, VERL_OMNIS
from flowgrpo_rc.section import INVALID, PositiveInt, convert

_OPTIM = "actor_rollout_ref.actor.optim"
CORRECTIONS = ("algorithm.rollout_correction", "actor_rollout_ref.actor.rollout_correction")
"""Where the correction may stand: its own place, and verl-omni's copy of it in the actor."""
WRITTEN_THERE = 3
"""So many foreign keys show that settings were written for another trainer, whose defaults are then worth a word."""
_ALGORITHM = "actor_rollout_ref.model.algorithm"
_FUNCTIONS = "reward.functions"
_OWN_FUNCTIONS = "reward.reward_functions"
_OWN_FUNCTION = "reward.custom_reward_function"
_QUESTIONS = "reward.judge.questions"
_SCORER = re.compile(r"(?:.*/)?verl_omni/utils/reward_score/(\w+)\.py|pkg://verl_omni\.utils\.reward_score\.(\w+)")
"""The path of a scorer of verl-omni's, in both forms that it takes."""
_PLAIN = re.compile(r"[\w/\-+.$%*@?|]+(:[\w/\-+.$%*@?|]+)*", re.ASCII)
"""Text that Hydra reads without quotes; a colon inside needs none: http://host:8000."""


def override(key: str, value: Any) -> str:
    """``key=value`` as it is typed into a shell: Hydra's grammar, in quotes where the shell needs them."""
    return shlex.quote(f"{key}={_grammar(value)}")


@dataclass
class Translation:
    """``run`` brings ``leaves`` to the schema's keys and notes what it did; ``warn`` says it."""

    leaves: dict[str, Any]
    """Dotted key -> value of everything that was given; changed in place."""
    refusals: Refusals
    """Takes what cannot be."""
    defaults: Mapping[str, Any]
    """Of every key of the schema, for the settings that are not given."""
    overridden: Collection[str]
    """Keys that the command line set. It wins over a file that says the same in another form; two settings of the
    command line, or of a file, that contradict each other are refused."""
    ignored: dict[str, list[str]] = field(default_factory=dict)
    """Reason -> settings that change nothing that is learned."""
    moved: list[str] = field(default_factory=list)
    """``there -> here``, and why where it is not plain."""
    other_defaults: list[str] = field(default_factory=list)
    """Settings that were left to their defaults, which are others in verl-omni."""
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
        self._shared_correction()
        self._algorithm()
        self._reward_functions()
        for key, (spellings, meaning) in SPELLINGS.items():
            if key in self.leaves:
                self._spelling(key, spellings, meaning)
        self._warm_up()
        if len(foreign) >= WRITTEN_THERE and not self.refusals:
            self.other_defaults = [
                f"{key}={_grammar(self.defaults[key])} (there {value})"
                for key, value in OTHER_DEFAULTS.items()
                if key not in self.leaves
            ]

    def _ignore(self, setting: str, reason: str) -> None:
        self.ignored.setdefault(reason, []).append(setting)

    def _first_wins(self, first: str, second: str) -> bool:
        """Whether of two settings of the same thing ``first`` alone stands on the command line."""
        return first in self.overridden and second not in self.overridden

    def _foreign_key(self, key: str, given: Mapping[str, Any]) -> None:
        value = self.leaves.pop(key)
        setting = override(key, value)
        verdict = find(key)
        if key in LAUNCHER_KEYS:
            self._launcher(key, value)
        elif isinstance(verdict, Renamed):
            value = verdict.values.get(value, value) if _hashable(value) else value
            self.refusals.instead(setting, override(verdict.target_for(key), value), verdict.reason)
        elif isinstance(verdict, Moved):
            self._move(key, value, verdict)
        elif isinstance(verdict, Ignored) or (isinstance(verdict, Refused) and verdict.is_harmless(value, given)):
            self._ignore(key, verdict.reason)
        elif isinstance(verdict, Refused):
            self.refusals.cannot(setting, verdict.reason)
        elif isinstance(verdict, Deleted):
            self.refusals.delete(key, verdict.reason)
        else:
            self.refusals.unknown(key, nearest(key))

    def _move(self, key: str, value: Any, verdict: Moved) -> None:
        target = verdict.target_for(key)
        here = value
        if target not in schema():
            return self.refusals.unknown(key, nearest(key))
        if _hashable(value) and value in verdict.values:
            here = verdict.values[value]
        elif verdict.only:
            names = ", ".join(name for name in verdict.values if isinstance(name, str))
            return self.refusals.wrong(f"{key}: got {show(value)}; choose one of {names} (it is {target} here)")
        if here is DROP:
            return self._ignore(key, f"nothing is asked for; see {target}")
        present = _respelled(target, self.leaves[target]) if target in self.leaves else here
        if present != here and self._first_wins(target, key):
            return self._ignore(key, f"{target} on the command line wins over the file")
        if present != here and not self._first_wins(key, target):
            there = show(self.leaves[target])
            self.leaves[target] = INVALID
            return self.refusals.wrong(
                f"{key}: got {show(value)}, but {target} is {there}, and the two are one setting here; leave {key} out"
            )
        self.leaves[target] = here
        return self.moved.append(f"{key}={_grammar(value)} -> {override(target, here)}")

    def _launcher(self, key: str, value: Any) -> None:
        """Numbers of processes come from the launcher; what a setting says must agree with it."""
        try:
            value = convert(PositiveInt, value)
        except ValueError:
            return self.refusals.wrong(f"{key}: got {show(value)}; give a whole number above 0")
        per_node = key == LAUNCHER_KEYS[0]
        flag = f"torchrun --{'nproc_per_node' if per_node else 'nnodes'} {value}"
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
        """verl-omni names an algorithm; here it is made up of an objective and of how windows are placed."""
        name = self.leaves.get(_ALGORITHM, DEFAULT)
        if not _hashable(name) or name not in ALGORITHMS:
            names = ", ".join(ALGORITHMS)
            self.leaves.pop(_ALGORITHM)
            self.refusals.cannot(override(_ALGORITHM, name), f"this algorithm is not implemented; there are {names}")
            return
        if name == DEFAULT:
            return
        self.leaves[_ALGORITHM] = DEFAULT
        for key, value in ALGORITHMS[name].items():
            present = self.leaves.get(key, value)
            if present != value and self._first_wins(_ALGORITHM, key):
                present = value
            elif present != value and key not in MAY_DIFFER and not self._first_wins(key, _ALGORITHM):
                self.refusals.wrong(
                    f"{_ALGORITHM}: got {name}, which means {key}={value} here, but {key} is {show(present)}; leave "
                    "one out"
                )
                present = INVALID
            self.leaves[key] = present
        made_of = " ".join(f"{key}={show(self.leaves[key]).strip(chr(39))}" for key in ALGORITHMS[name])
        self.moved.append(f"{_ALGORITHM}={name} -> {made_of}")

    def _reward_functions(self) -> None:
        """verl-omni's entries that stand for a built-in reward: those without a path, and those of its own scorers,
        where their files are not there."""
        self._custom_reward_function()
        given = self.leaves.get(_OWN_FUNCTIONS)
        if not isinstance(given, Mapping):
            return
        kept = dict(given)
        for name, entry in given.items():
            if not isinstance(entry, Mapping):
                continue
            builtin = _builtin_reward(name, entry)
            if builtin is not None:
                del kept[name]
                self._to_builtin(f"{_OWN_FUNCTIONS}.{name}", builtin, entry)
        self.leaves[_OWN_FUNCTIONS] = kept

    def _custom_reward_function(self) -> None:
        """The same for the one function of ``custom_reward_function``."""
        builtin = _builtin_of_file(self.leaves.get(f"{_OWN_FUNCTION}.path"))
        if builtin is None:
            return
        names = {name: f"{_OWN_FUNCTION}.{name}" for name in ("path", "name", "weight", "reward_kwargs")}
        entry = {name: self.leaves.pop(key) for name, key in names.items() if key in self.leaves}
        entry |= entry.pop("reward_kwargs", None) or {}
        self._to_builtin(_OWN_FUNCTION, builtin, entry)

    def _to_builtin(self, key: str, builtin: str, entry: Mapping[str, Any]) -> None:
        setting = override(key, entry)
        weights = self.leaves.get(_FUNCTIONS) or {}
        arguments = entry.keys() - {"path", "name", *VERL_OMNIS}
        if builtin not in REWARD_NAMES:
            return self.refusals.cannot(setting, NO_SCORER)
        if arguments:
            return self.refusals.cannot(setting, f"the built-in reward {builtin} takes none of {', '.join(arguments)}")
        question = JUDGE_QUESTIONS.get(_scorer_name(entry.get("path")) or "")
        asked = self.leaves.get(_QUESTIONS, [question])
        if question is not None and asked != [question]:
            return self.refusals.wrong(
                f"{key}: it is the judge's question {question} here, but {_QUESTIONS} is {show(asked)}; write all "
                f"questions there, with their weights, and leave {key} out"
            )
        earlier = self.builtins.setdefault(builtin, key)
        if earlier != key:
            return self.refusals.wrong(
                f"{key}: it is the built-in reward {builtin} here, and so is {earlier}, and verl-omni counts "
                "both; leave one out, and give the other the sum of their weights"
            )
        weight = entry.get("weight", 1.0)
        if not isinstance(weights, Mapping) or weights.get(builtin, weight) != weight:
            return self.refusals.wrong(
                f"{key}: got the weight {show(weight)}, but {_FUNCTIONS} is {show(weights)}, and the two are one "
                "setting here; leave one out"
            )
        self.leaves[_FUNCTIONS] = {**weights, builtin: weight}
        here = override(f"{_FUNCTIONS}.{builtin}", weight)
        if question is not None:
            self.leaves[_QUESTIONS] = asked
            here += f" {override(_QUESTIONS, asked)}"
        return self.moved.append(f"{key} -> {here}")

    def _shared_correction(self) -> None:
        """verl-omni's actor has a copy of the correction, key by key the algorithm's; here there is one."""
        place, copy = CORRECTIONS
        own = self.leaves.get(place, {})
        copied = self.leaves.get(copy, {})
        if copy not in self.leaves or not isinstance(own, Mapping | None) or not isinstance(copied, Mapping | None):
            return
        del self.leaves[copy]
        if own is None or copied is None:
            self.leaves[place] = self._off_or_on(own, copied)
            return
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

    def _off_or_on(self, own: Any, copied: Any) -> Any:
        """The correction where one of its two places is null, which is none at all."""
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

    def _spelling(self, key: str, spellings: Mapping[Any, Any], meaning: str) -> None:
        value = self.leaves[key]
        # True equals 1 and False 0, so a table of numbers would take them.
        takes = not isinstance(value, bool) or any(isinstance(name, bool) for name in spellings)
        if not takes or not _hashable(value) or value not in spellings:
            return
        here = spellings[value]
        if here is DROP:
            self.leaves.pop(key)
        else:
            self.leaves[key] = here
        if meaning:
            becomes = "its default" if here is DROP else _grammar(here)
            self.moved.append(f"{key}={_grammar(value)} -> {becomes} ({meaning})")

    def _warm_up(self) -> None:
        """verl's ``constant`` schedule warms up where it is asked to; here that is ``constant_with_warmup``."""
        kind = f"{_OPTIM}.lr_scheduler_type"
        asked = [self.leaves.get(f"{_OPTIM}.{name}", 0) for name in ("lr_warmup_steps", "lr_warmup_steps_ratio")]
        warms_up = any(isinstance(value, int | float) and not isinstance(value, bool) and value > 0 for value in asked)
        if warms_up and self.leaves.get(kind, self.defaults[kind]) == "constant":
            self.leaves[kind] = "constant_with_warmup"
            self.moved.append(f"{kind}=constant with a warm-up -> {kind}=constant_with_warmup")


def _builtin_reward(name: str, entry: Mapping[str, Any]) -> str | None:
    """The built-in reward that an entry of ``reward.reward_functions`` stands for, empty where there is none; None for
    a function of the user's own."""
    path = entry.get("path")
    if path is None:
        return name if name in REWARD_NAMES else None
    return _builtin_of_file(path)


def _builtin_of_file(path: Any) -> str | None:
    """The built-in reward for a scorer of verl-omni's that is not there, empty where there is none; None for any other
    file."""
    name = _scorer_name(path)
    if name is None or os.path.isfile(os.path.expanduser(str(path))):
        return None
    return VERL_OMNI_SCORERS.get(name, "")


def _scorer_name(path: Any) -> str | None:
    """``genrm_ocr`` of ``verl_omni/utils/reward_score/genrm_ocr.py``; None for a path that is no scorer of
    verl-omni's."""
    scorer = _SCORER.fullmatch(str(path))
    return None if scorer is None else scorer[1] or scorer[2]


def _started() -> tuple[int, int] | None:
    """Processes on this machine and machines, as torchrun and accelerate launch tell; None without them."""
    world = os.environ.get("WORLD_SIZE", "")
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not world.isdigit() or int(world) < 1:
        return None
    per_node = int(local) if local.isdigit() and int(local) > 0 else int(world)
    return per_node, max(1, int(world) // per_node)


def _respelled(key: str, value: Any) -> Any:
    spellings = SPELLINGS.get(key, ({}, ""))[0]
    return spellings.get(value, value) if _hashable(value) else value


def _hashable(value: Any) -> bool:
    return isinstance(value, str | int | float | bool | None)


def _grammar(value: Any) -> str:
    """A value as Hydra reads it back."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_grammar(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(_grammar(item) for item in value) + "]"
    if isinstance(value, int) and value.bit_length() > 256:
        return "..."
    text = str(value)
    if not isinstance(value, str) or (_PLAIN.fullmatch(text) and text.lower() not in ("null", "true", "false")):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
