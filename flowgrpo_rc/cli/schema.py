"""The configuration classes as dotted keys, and settings as a flat mapping of such keys to values."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, get_type_hints

from flowgrpo_rc.checks import show
from flowgrpo_rc.cli.foreign_keys import has_pattern_of_its_own
from flowgrpo_rc.cli.refusals import ConfigError, Refusals
from flowgrpo_rc.cli.yaml_files import child_values
from flowgrpo_rc.trainer.config import FlowGRPOConfig

_CORRECTION_KEYS = "its keys, e.g. {rollout_is: sequence}, or null"
OPEN_SECTIONS = {
    "algorithm.rollout_correction": _CORRECTION_KEYS,
    "actor_rollout_ref.actor.rollout_correction": _CORRECTION_KEYS,
    "reward.functions": "weights by name, e.g. reward.functions.ocr=1",
    "reward.remote": "servers by name, e.g. reward.remote.geneval.url=http://127.0.0.1:18085",
    "reward.judge.extra_body": "a mapping of keys to values, e.g. {top_p: 0.8}",
    "reward.reward_functions": "functions by name, e.g. {mine: {path: my_reward.py, weight: 0.5}}",
    "reward.val_functions": "scorers by name, e.g. reward.val_functions.jpeg_compressibility=true",
    "reward.custom_reward_function.reward_kwargs": "a mapping from parameter names to values, e.g. {scale: 2.0}",
}
"""Keys whose value is a mapping of its reader's own, and what to give them; what reads them checks their content."""
DEEPEST = 32
"""Levels of a configuration file; the schema has five."""


@cache
def schema() -> Mapping[str, Any]:
    """Every key of the configuration classes, dotted, with its type annotation."""
    return dict(_keys(FlowGRPOConfig))


@cache
def sections() -> frozenset[str]:
    """Everything that keys lie below."""
    parents = (key.split(".")[:-1] for key in schema())
    return frozenset(".".join(parts[: i + 1]) for parts in parents for i in range(len(parts)))


def flatten(raw: Mapping[Any, Any], refusals: Refusals) -> dict[str, Any]:
    """Dotted key -> value of everything that ``raw``, nested mappings, sets.

    A mapping is a value of its own where the schema, or the table of foreign keys, has it as one. A section that holds
    something else than keys is refused.

    Raises:
        ConfigError: it is nested too deeply.
    """
    for key, value in raw.items():
        _check_depth(key, value, 1)
    leaves: dict[str, Any] = {}
    for path, value in _leaves(raw, ""):
        owner = _owner(path)
        if path in sections():
            if value != {}:
                example = next(key for key in schema() if key.startswith(f"{path}."))
                refusals.wrong(f"{path}: got {show(value)}, but it is a section; give its keys, e.g. {example}")
        elif owner is not None and not path.rpartition(".")[2].startswith("_"):
            refusals.wrong(f"{path}: {owner} is a value of its own and has no keys below it")
        else:
            leaves[path] = value
    return leaves


def nest(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as nested mappings."""
    tree: dict[str, Any] = {}
    for path, value in leaves.items():
        *parents, last = path.split(".")
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = value
    return tree


def nearest(key: str) -> str:
    """Known keys that may have been meant: by the last part first (a right name in the wrong section), then by all."""
    known = list(schema())
    last = key.rsplit(".", 1)[-1]
    same_name = [k for k in known if k.rsplit(".", 1)[-1] == last]
    names = difflib.get_close_matches(last, [n.rsplit(".", 1)[-1] for n in known])
    close_name = [k for k in known if k.rsplit(".", 1)[-1] in names]
    close = difflib.get_close_matches(key, known, n=3, cutoff=0.5)
    found: Sequence[str] = list(dict.fromkeys([*same_name, *close, *close_name]))[:4]
    return ", ".join(found) or "none; see flowgrpo-rc train --print-config"


def _keys(cls: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    hints = get_type_hints(cls)
    for field in fields(cls):
        name = f"{prefix}{field.name}"
        kind = hints[field.name]
        if is_dataclass(kind):
            yield from _keys(kind, f"{name}.")  # type: ignore[arg-type]
        else:
            yield name, kind


def _leaves(node: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        path = f"{prefix}{key}"
        if path in schema():
            yield from _own_value(path, value)
        elif isinstance(value, Mapping) and value and (path in sections() or not has_pattern_of_its_own(path)):
            yield from _leaves(value, f"{path}.")
        else:
            yield path, value


def _own_value(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A value of the schema, less the keys of Hydra's own that a mapping may hold."""
    if not isinstance(value, Mapping):
        yield path, value
        return
    hydras = [key for key in value if str(key).startswith("_") and str(key).endswith("_")]
    yield path, {key: item for key, item in value.items() if key not in hydras}
    for key in hydras:
        yield f"{path}.{key}", value[key]


def _check_depth(path: str, value: Any, depth: int) -> None:
    if depth > DEEPEST:
        raise ConfigError(f"{path}: nested more than {DEEPEST} levels deep; give keys of the schema")
    for child in child_values(value):
        _check_depth(path, child, depth + 1)


def _owner(path: str) -> str | None:
    """The key of the schema that ``path`` lies below."""
    parts = path.split(".")
    above = (".".join(parts[:i]) for i in range(1, len(parts)))
    return next((key for key in above if key in schema()), None)
