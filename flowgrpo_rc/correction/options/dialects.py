"""Other projects' keys for rollout correction, translated into the canonical ones.

Three dialects: verl's first release and its transitional keys (``legacy``), and slime's MIS options (``slime``). A key
that is absent, or null where a dialect's null means "not set", leaves the setting alone that it stands beside: a
preset's, or the default. A key that nothing in a preset can take up is an error.
"""

import difflib
from collections.abc import Iterable
from typing import Any

from flowgrpo_rc.checks import show
from flowgrpo_rc.correction.options import legacy, slime
from flowgrpo_rc.correction.options.legacy import is_legacy_level
from flowgrpo_rc.correction.options.values import Values, given

_THRESHOLD = "rollout_rs_threshold"


def translate(values: Values, base: Values, preset: str | None, defaults: Values) -> tuple[dict[str, Any], str]:
    """Every canonical key's value, and what to warn of: the keys that were translated, or else an empty text.

    Args:
        values: keys of which ``named_keys`` has approved, without ``preset``.
        base: every canonical key of the preset, or of the defaults.
        preset: its name, or ``None``.
        defaults: every canonical key; the warning prints those that differ.

    Raises:
        TypeError: a switch or a bound of the wrong type.
        ValueError: contradicting values, keys of two dialects, a bad value, or a key that cannot act beside the preset.
    """
    slimes = tuple(key for key in values if key in slime.KEYS)
    keys = tuple(k for k in values if k in legacy.KEYS or (k == "rollout_rs" and is_legacy_level(values[k])))
    if slimes and keys:
        raise ValueError(f"Keys of two dialects: {', '.join(slimes)} (slime) and {', '.join(keys)} (legacy verl).")
    canonical = {key: value for key, value in values.items() if key not in slime.KEYS and key not in legacy.KEYS}
    dialect = "legacy verl"
    unused: Values = {}
    if slimes:
        keys = slimes
        dialect = "slime"
        beside = base if preset is None else {**base, **canonical}
        canonical |= slime.changes(values, beside, preset)
        _refuse_contradiction(values, canonical, dialect, keys)
        unused = slime.unused_veto(values)
    elif keys or preset is not None:
        canonical |= legacy.mode_changes(values, base)
        _refuse_contradiction(given(values, legacy.SETS), canonical, dialect, keys)
        rejection = legacy.rejection_changes(values, base, preset)
        canonical |= rejection
        if preset is None and values.get("rollout_rs") is None:
            canonical.pop(_THRESHOLD, None)
            unused = given(values, (_THRESHOLD, f"{_THRESHOLD}_lower"))
        elif not keys and rejection.get(_THRESHOLD, values.get(_THRESHOLD)) != values.get(_THRESHOLD):
            keys = (_THRESHOLD,)  # it is one half of a band, as legacy verl wrote it
    whole = {**base, **canonical}
    if not keys:
        return whole, ""
    form = ", ".join(f"{k}={_as_yaml(v)}" for k, v in whole.items() if v != defaults[k] or k in canonical)
    idle = f"{', '.join(unused)} without effect there; " if unused else ""
    return whole, f"{dialect} keys ({', '.join(keys)}) were translated; {idle}the canonical form is: {form}"


def named_keys(values: Values, canonical: Iterable[str]) -> dict[str, Any]:
    """``values`` with slime's keys in one spelling: of ``tis-mode`` and ``mis_tis_mode`` both become ``tis_mode``.

    Raises:
        ValueError: a key of no dialect (the message lists the nearest known ones), or one key in two spellings.
    """
    known = known_keys(canonical)
    named: dict[str, Any] = {}
    for key, value in values.items():
        name = key if key in known else slime.slime_name(key)
        if name is None:
            raise ValueError(f"Unknown rollout-correction key {key!r}; nearest known: {nearest(key, known)}.")
        if name in named:
            raise ValueError(f"{name} is there twice, in two spellings: {show(named[name])} and {show(value)}.")
        named[name] = value
    return named


def is_known(key: str, canonical: Iterable[str]) -> bool:
    """Whether ``from_dict`` understands a key, in some spelling."""
    return key in known_keys(canonical) or slime.slime_name(key) is not None


def known_keys(canonical: Iterable[str]) -> tuple[str, ...]:
    """Every key that ``from_dict`` understands: the canonical ones, those of the dialects, and ``preset``."""
    return (*canonical, *legacy.KEYS, *slime.KEYS, "preset")


def nearest(key: str, known: Iterable[str]) -> str:
    """The known names most like ``key``, comma-separated (all of them when none is close)."""
    known = tuple(known)
    return ", ".join(difflib.get_close_matches(key, known, n=3, cutoff=0.5) or known)


def _refuse_contradiction(values: Values, canonical: Values, dialect: str, keys: tuple[str, ...]) -> None:
    """Refuses a canonical key beside keys of a dialect that give it another value."""
    for key, value in values.items():
        if key in canonical and canonical[key] != value:
            raise ValueError(
                f"{key}={value!r} contradicts {', '.join(keys)} ({dialect}), which give {key}={canonical[key]!r}."
            )


def _as_yaml(value: Any) -> str:
    """A value as YAML reads it back: bands in quotes, without which ``0.5_5`` would be a number."""
    if isinstance(value, str) and "_" in value and value[0] in "0123456789.+-":
        return f'"{value}"'
    if isinstance(value, float) and "e" in repr(value) and "." not in repr(value):
        return repr(value).replace("e", ".0e")  # to YAML 1e-05 is text
    return "null" if value is None else str(value)
