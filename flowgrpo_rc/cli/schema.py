"""The configuration classes as dotted keys, and settings as a flat mapping of such keys to values."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import cache
from typing import Any

from flowgrpo_rc.checks import show
from flowgrpo_rc.section import field_types, is_section
from flowgrpo_rc.trainer.config import FlowGRPOConfig


@cache
def schema() -> Mapping[str, Any]:
    """Every dotted key of the configuration classes, with its default; interpolations as they are written."""
    return dict(_keys(FlowGRPOConfig))


@cache
def sections() -> frozenset[str]:
    """Dotted names of everything that has keys below it."""
    parents = (key.split(".")[:-1] for key in schema())
    return frozenset(".".join(parts[: i + 1]) for parts in parents for i in range(len(parts)))


def flatten(
    raw: Mapping[Any, Any], is_one_value: Callable[[str], bool], refuse: Callable[[str], None]
) -> dict[str, Any]:
    """Dotted key -> value of every setting in nested mappings.

    Args:
        raw: the mappings.
        is_one_value: true for the dotted name of a mapping that is no section, besides those of the schema.
        refuse: takes a message for each section that holds something else than keys.
    """
    leaves: dict[str, Any] = {}
    for path, value in _leaves(raw, "", is_one_value):
        owner = _owner(path)
        if path in sections():
            # An empty section sets nothing; verl's files have many.
            if value != {}:
                example = next(key for key in schema() if key.startswith(f"{path}."))
                refuse(f"{path}: got {show(value)}, but it is a section; give its keys, e.g. {example}")
        elif owner is not None and not path.rpartition(".")[2].startswith("_"):
            refuse(f"{path}: {owner} is a value of its own and has no keys below it")
        else:
            leaves[path] = value
    return leaves


def nest(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as nested mappings; values are copied."""
    tree: dict[str, Any] = {}
    for path, value in leaves.items():
        *parents, last = path.split(".")
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = copy.deepcopy(value)
    return tree


def nearest(key: str) -> str:
    """Known keys that may have been meant: by the last part first (a right name in the wrong section), then by all."""
    known = list(schema())
    last = key.rsplit(".", 1)[-1]
    # The right name in the wrong section is the most frequent slip.
    same_name = [k for k in known if k.rsplit(".", 1)[-1] == last]
    names = difflib.get_close_matches(last, [n.rsplit(".", 1)[-1] for n in known])
    close_name = [k for k in known if k.rsplit(".", 1)[-1] in names]
    close = difflib.get_close_matches(key, known, n=3, cutoff=0.5)
    found: Sequence[str] = list(dict.fromkeys([*same_name, *close, *close_name]))[:4]
    return ", ".join(found) or "none; see flowgrpo-rc train --print-config"


def _keys(cls: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    kinds = field_types(cls)
    for field in fields(cls):
        name = f"{prefix}{field.name}"
        if is_section(kinds[field.name]):
            yield from _keys(kinds[field.name], f"{name}.")
        else:
            yield name, field.default if field.default_factory is MISSING else field.default_factory()


def _leaves(node: Mapping[Any, Any], prefix: str, is_one_value: Callable[[str], bool]) -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        path = f"{prefix}{key}"
        if path in schema():
            yield from _own_value(path, value)
        elif isinstance(value, Mapping) and value and (path in sections() or not is_one_value(path)):
            yield from _leaves(value, f"{path}.", is_one_value)
        else:
            yield path, value


def _own_value(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A value of the schema, less the keys of Hydra's own that a mapping may hold."""
    if not isinstance(value, Mapping):
        yield path, value
        return
    # Their own refusal explains more than that of the mapping's reader.
    hydras = [key for key in value if str(key).startswith("_") and str(key).endswith("_")]
    yield path, {key: item for key, item in value.items() if key not in hydras}
    for key in hydras:
        yield f"{path}.{key}", value[key]


def _owner(path: str) -> str | None:
    """The key of the schema that ``path`` lies below."""
    parts = path.split(".")
    above = (".".join(parts[:i]) for i in range(1, len(parts)))
    return next((key for key in above if key in schema()), None)
