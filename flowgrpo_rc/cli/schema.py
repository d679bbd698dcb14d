"""The configuration classes as dotted keys, and settings as a flat mapping of such keys to values."""

import copy
import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import cache
from typing import Any

from flowgrpo_rc.checks import show
from flowgrpo_rc.section import field_types, is_section
from flowgrpo_rc.trainer.config import FlowGRPOConfig

LEARNING_RATE = "actor_rollout_ref.actor.optim.lr"


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
        if path not in sections():
            leaves[path] = value
        # An empty section sets nothing; verl's files have many.
        elif value != {}:
            example = next(key for key in schema() if key.startswith(f"{path}."))
            refuse(f"{path}: got {show(value)}, but it is a section; give its keys, e.g. {example}")
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
    same_name = [LEARNING_RATE] if last in ("lr", "learning_rate") else []
    same_name += [k for k in known if k.rsplit(".", 1)[-1] == last]
    names = difflib.get_close_matches(last, [k.rsplit(".", 1)[-1] for k in known])
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
        if path in schema() and isinstance(value, Mapping):
            # Hydra's own keys, such as _target_, have a refusal that explains more than that of the mapping's reader.
            hydras = [part for part in value if re.fullmatch("_.*_", str(part))]
            yield path, {part: item for part, item in value.items() if part not in hydras}
            yield from ((f"{path}.{part}", value[part]) for part in hydras)
        elif isinstance(value, Mapping) and value and (path in sections() or not is_one_value(path)):
            yield from _leaves(value, f"{path}.", is_one_value)
        else:
            yield path, value
