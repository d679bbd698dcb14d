"""The table of ``foreign_keys.yaml``: every key of another trainer that is not a key here, and what becomes of it.

The file says how it is read; the conditions and spellings that it names stand here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import yaml

from flowgrpo_rc.cli.spellings import AUTOCAST, DROP, DTYPES, A, M, R
from flowgrpo_rc.models.registry import FAMILIES

LAUNCHER_KEYS = ("trainer.n_gpus_per_node", "trainer.nnodes")
"""Held against the numbers of processes and machines that the launcher started."""
Tree = Mapping[str, Any]
"""All settings that were given, dotted key to value."""


@dataclass(frozen=True)
class Verdict:
    """What becomes of the keys that fit a pattern, and why; a key goes by the narrowest that fits."""

    pattern: str
    """See ``foreign_keys.yaml``."""
    reason: str

    def match(self, key: str) -> re.Match[str] | None:
        """The match where the pattern fits a key, whose groups are the texts of the pattern's ``*``."""
        return _regex(self.pattern).fullmatch(key.removeprefix("config."))  # flow_grpo's flags begin with it


class Ignored(Verdict):
    """Cannot change what is learned."""


class Deleted(Verdict):
    """Means nothing here: the key is refused, and the remedy is to delete it."""


@dataclass(frozen=True)
class Refused(Verdict):
    """Would change what is learned, and nothing here does the same."""

    harmless: tuple[Any, ...] | Callable[[Any, Tree], bool]
    """Values that ask for what happens here anyway."""

    def is_harmless(self, value: Any, tree: Tree) -> bool:
        """Whether this value asks for what happens here anyway."""
        return self.harmless(value, tree) if callable(self.harmless) else value in self.harmless


@dataclass(frozen=True)
class Moved(Verdict):
    """Acts through another key."""

    target: str
    """The key here; a ``*`` in it is what the one in the pattern matched."""
    values: Mapping[Any, Any]
    """Spellings of a value that differ; ``DROP`` leaves the key out."""
    only: bool
    """Whether values that are not listed are refused."""

    def target_for(self, key: str) -> str:
        """The key here, for one that fits."""
        found = self.match(key)
        return self.target.replace("*", found[1]) if found and "*" in self.target else self.target


class Renamed(Moved):
    """Belongs to a program whose configuration has another form; shown as it is written here, never applied."""


@cache
def _regex(pattern: str) -> re.Pattern[str]:
    parts = []
    for i, part in enumerate(pattern.split(".")):
        if part == "**":
            parts.append(r"(?:\.[^.]+)*" if i else r"(?:[^.]+\.)*[^.]+")
        else:
            parts.append((r"\." if i else "") + re.escape(part).replace(r"\*", r"([^.]*)"))
    return re.compile("".join(parts))


def rank(pattern: str) -> tuple[int, int]:
    """Sorts patterns so that the one that says most of a key comes first.

    Those without ``*`` come before those with it, and whole sections last, of which the longer are the narrower.
    """
    if pattern.endswith(".**"):
        return 2, -len(pattern)
    return int("*" in pattern), 0


def off(value: Any, tree: Tree) -> bool:
    """Nothing is asked for."""
    return value in (None, False, 0, "", "null", "disabled") or value == [] or value == {}


def reward_model_is_off(value: Any, tree: Tree) -> bool:
    return tree.get("reward.reward_model.enable", tree.get("reward_model.enable")) is False


def other_objective(value: Any, tree: Tree) -> bool:
    """The setting belongs to an objective that is not asked for."""
    return tree.get(f"{A}.diffusion_loss.loss_mode", "flow_grpo") not in ("diffusion_nft", "dpo", "awm")


def own_reward_manager(value: Any, tree: Tree) -> bool:
    return value is None or str(value).startswith("pkg://verl_omni.")


def plain_chat_template(value: Any, tree: Tree) -> bool:
    """Null, or a template that comes to the user's own words."""
    plain = "{%formessageinmessages%}{%ifmessage['role']=='user'%}{{message['content']}}{%endif%}{%endfor%}"
    return value is None or re.sub(r"\s", "", str(value)).strip('"') == plain


def in_the_pipeline(value: Any, tree: Tree) -> bool:
    """Null, or a path that is or lies in the model's own folder."""
    model = str(tree.get(f"{M}.path", ""))
    return value is None or (bool(model) and (str(value) == model or str(value).startswith(f"{model}/")))


def pipeline_tokenizers(value: Any, tree: Tree) -> bool:
    """Those that lie in the pipeline, CLIP at its 77 tokens and T5 at the length that is asked for."""
    if value is None:
        return True
    length = tree.get(f"{R}.pipeline.max_sequence_length", 512)
    parts = value.values() if isinstance(value, Mapping) else [None]
    return all(
        isinstance(part, Mapping)
        and str(part.get("path", "")).startswith("tokenizer")
        and part.get("max_length") in (None, 77, length)
        for part in parts
    )


_CONDITIONS = {
    f"@{condition.__name__}": condition
    for condition in (
        off,
        reward_model_is_off,
        other_objective,
        own_reward_manager,
        plain_chat_template,
        in_the_pipeline,
        pipeline_tokenizers,
    )
}
"""Whether a value asks for what happens here anyway; the file names them with an ``@``."""
_SPELLINGS: Mapping[str, tuple[Mapping[Any, Any], bool]] = {
    "@dtype": (DTYPES, True),
    "@dtype_or_null": ({**DTYPES, None: "float32"}, True),
    "@autocast": (AUTOCAST, True),
    "@unless_null": ({None: DROP}, False),
}
"""Spellings of values that the file has by name, and whether other values are refused."""
_SECTIONS = {"A": "actor", "R": "rollout", "M": "model", "P": "rollout.pipeline", "V": "rollout.val_kwargs"}
"""What the file shortens, all of it in ``actor_rollout_ref``."""


def _table() -> Iterator[Verdict]:
    """The file's verdicts, one for every pattern."""
    text = resources.files("flowgrpo_rc.cli").joinpath("foreign_keys.yaml").read_text(encoding="utf-8")
    text = re.sub(r"(?<![\w.])([ARMPV])(?=[.:])", lambda found: f"actor_rollout_ref.{_SECTIONS[found[1]]}", text)
    for kind, reasons in yaml.safe_load(text).items():
        for reason, lines in reasons.items():
            for line in lines.splitlines():
                keys, _, values = line.partition(" = ")
                there, _, here = keys.partition(" -> ")
                section, colon, names = there.rpartition(": ")
                for name in names.split():
                    yield _verdict(kind, f"{section}.{name}" if colon else name, reason, here, values)
    for name in ("architecture", "config_path"):
        reason = f"a model's own index says what it is; families: {', '.join(FAMILIES)}"
        yield Refused(f"{M}.{name}", reason, (None, *FAMILIES))


def _verdict(kind: str, pattern: str, reason: str, target: str, values: str) -> Verdict:
    if kind == "refused":
        return Refused(pattern, reason, _CONDITIONS.get(values) or tuple(map(yaml.safe_load, values.split())))
    if kind in ("moved", "renamed"):
        spellings, only = _SPELLINGS.get(values) or (yaml.safe_load(values) or {}, False)
        return {"moved": Moved, "renamed": Renamed}[kind](pattern, reason, target, spellings, only)
    return {"deleted": Deleted, "ignored": Ignored}[kind](pattern, reason)


TABLE = tuple(sorted(_table(), key=lambda verdict: rank(verdict.pattern)))
"""Every verdict, the one of the narrowest pattern first."""


def find(key: str) -> Verdict | None:
    """What the table says of a key that is none here: the verdict of the narrowest pattern that fits."""
    return next((verdict for verdict in TABLE if verdict.match(key)), None)


def has_pattern_of_its_own(key: str) -> bool:
    """Whether the table has this very key, not only a section that it lies in."""
    verdict = find(key)
    return verdict is not None and "**" not in verdict.pattern
