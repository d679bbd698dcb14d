"""Other projects' keys for rollout correction, translated into the canonical ones.

Three dialects: verl's first release ("legacy verl"), its transitional keys, and slime's MIS options. Each
translation gives one warning that prints the canonical form. `to_canonical` is the only entry.
"""

import difflib
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from flowgrpo_rc.correction.thresholds import parse_number

_LEGACY_RS = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
_LEGACY_KEYS = (
    "bypass_old_logprob_for_rollout",
    "use_pure_rollout_correction",
    "use_policy_gradient",
    "rollout_rs_threshold_lower",
)
# Canonical keys that those set; `rollout_rs` and its threshold keep their names and change their form.
_LEGACY_SETS = ("bypass_mode", "loss_type")
_SLIME_KEYS = (
    *("use_tis", "tis_mode", "tis_level", "tis_lower_bound", "tis_upper_bound", "tis_batch_normalize"),
    *("use_rs", "rs_level", "rs_lower_bound", "rs_upper_bound", "rs_veto_threshold"),
    *("use_rollout_logprobs", "get_mismatch_metrics"),
)
_SLIME_MODES = {"truncate": "truncate", "clip": "clip", "mask": "mask"}


def to_canonical(values: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """`values` in canonical keys.

    Args:
        values: keys of one dialect, possibly beside canonical ones that it does not determine.
        known: the canonical keys.

    Raises:
        ValueError: an unknown key, keys of slime and of legacy verl together, or contradicting values.
    """
    known = tuple(known)
    _refuse_unknown(values, known)
    slime = [k for k in values if k in _SLIME_KEYS]
    legacy = [k for k in values if k in _LEGACY_KEYS]
    if values.get("rollout_rs") in _LEGACY_RS:
        legacy.append("rollout_rs")
    if slime and legacy:
        raise ValueError(f"Keys of two dialects: {', '.join(slime)} (slime) and {', '.join(legacy)} (legacy verl).")
    if slime:
        canonical = _from_slime(values)
        _refuse_contradiction(values, canonical, "slime", slime)
        _warn("slime", slime, canonical)
    elif legacy:
        canonical = _from_legacy(values)
        _refuse_contradiction({k: v for k, v in values.items() if k in _LEGACY_SETS}, canonical, "legacy verl", legacy)
        _warn("legacy verl", legacy, canonical)
    else:
        canonical = dict(values)
    return canonical


def known_keys(canonical: Iterable[str]) -> tuple[str, ...]:
    """Every key that `from_dict` understands: the canonical ones, those of the dialects, and `preset`."""
    return (*canonical, *_LEGACY_KEYS, *_SLIME_KEYS, "preset")


def decides_weights(values: Mapping[str, Any]) -> bool:
    """Whether `values` say by other keys than `rollout_is` which weights there are: a preset's name, or slime's."""
    return any(key == "preset" or key in _SLIME_KEYS for key in values)


def nearest(key: str, known: Iterable[str]) -> str:
    """The known names most like `key`, comma-separated (all of them when none is close)."""
    known = tuple(known)
    return ", ".join(difflib.get_close_matches(key, known, n=3, cutoff=0.5) or known)


def slime_file_keys(content: Mapping[str, Any]) -> dict[str, Any]:
    """The rollout-correction keys of a slime YAML file: dashes become underscores, a `mis_` prefix goes."""
    keys = {str(k).replace("-", "_"): v for k, v in content.items()}
    return {(k.removeprefix("mis_") if k.removeprefix("mis_") in _SLIME_KEYS else k): v for k, v in keys.items()}


def _refuse_unknown(values: Mapping[str, Any], known: tuple[str, ...]) -> None:
    every = known_keys(known)
    for key in values:
        if key not in every:
            raise ValueError(f"Unknown rollout-correction key {key!r}; nearest known: {nearest(key, every)}.")


def _refuse_contradiction(
    values: Mapping[str, Any], canonical: Mapping[str, Any], dialect: str, keys: list[str]
) -> None:
    """Refuses a canonical key beside keys of a dialect that give it another value."""
    for key, value in values.items():
        if key in canonical and canonical[key] != value:
            raise ValueError(
                f"{key}={value!r} contradicts {', '.join(keys)} ({dialect}), which give {key}={canonical[key]!r}."
            )


def _warn(dialect: str, keys: list[str], canonical: Mapping[str, Any]) -> None:
    form = ", ".join(f"{k}={_pasteable(v)}" for k, v in canonical.items())
    warnings.warn(f"{dialect} keys ({', '.join(keys)}) were translated; the canonical form is: {form}", stacklevel=4)


def _pasteable(value: Any) -> str:
    """A value as YAML reads it back: bands in quotes, without which `0.5_5` would be a number."""
    if isinstance(value, str) and "_" in value and value[0] in "0123456789.+-":
        return f'"{value}"'
    return "null" if value is None else str(value)


def _from_legacy(values: Mapping[str, Any]) -> dict[str, Any]:
    out = {k: v for k, v in values.items() if k not in _LEGACY_KEYS}
    _legacy_mode(values, out)
    level = values.get("rollout_rs")
    if level in _LEGACY_RS:
        upper = values.get("rollout_rs_threshold")
        upper = values.get("rollout_is_threshold", 2.0) if upper is None else upper
        if upper is None:
            raise ValueError(
                f"rollout_rs_threshold is null with rollout_rs={level!r}, and so is rollout_is_threshold, which would "
                "stand in for it; give rollout_rs_threshold a number or 'lower_upper'."
            )
        out["rollout_rs"] = _LEGACY_RS[level]
        lower = values.get("rollout_rs_threshold_lower")
        out["rollout_rs_threshold"] = _band(lower, upper, "rollout_rs_threshold")
    elif values.get("rollout_rs_threshold_lower") is not None:
        if level is not None:
            raise ValueError(
                "rollout_rs_threshold_lower belongs to legacy rollout_rs (token, sequence, geometric); "
                f"with rollout_rs={level!r} write the band as rollout_rs_threshold='lower_upper'."
            )
        out.pop("rollout_rs_threshold", None)
    elif level is None:
        out.pop("rollout_rs_threshold", None)
    return out


def _legacy_mode(values: Mapping[str, Any], out: dict[str, Any]) -> None:
    """`bypass_old_logprob_for_rollout`, `use_pure_rollout_correction`, `use_policy_gradient`."""
    bypass = values.get("bypass_old_logprob_for_rollout", values.get("bypass_mode"))
    if bypass is not None:
        out["bypass_mode"] = bypass
    pure = [k for k in ("use_pure_rollout_correction", "use_policy_gradient") if values.get(k)]
    if not pure:
        return
    if bypass is False:
        raise ValueError(f"{pure[0]}=true needs bypass mode, which is explicitly false.")
    if values.get("loss_type", "reinforce") != "reinforce":
        raise ValueError(f"{pure[0]}=true means loss_type=reinforce, but loss_type={values['loss_type']!r}.")
    out.update(bypass_mode=True, loss_type="reinforce")


def _from_slime(values: Mapping[str, Any]) -> dict[str, Any]:
    out = {k: v for k, v in values.items() if k not in _SLIME_KEYS}
    lower, upper = values.get("tis_lower_bound"), values.get("tis_upper_bound")
    out["rollout_is"] = None
    if values.get("use_tis") and not values.get("get_mismatch_metrics"):
        out["rollout_is"] = values.get("tis_level", "token")
        out.update(_slime_threshold(values.get("tis_mode", "truncate"), lower, upper))
        out["rollout_is_batch_normalize"] = bool(values.get("tis_batch_normalize", False))
    if values.get("use_rs") and not values.get("get_mismatch_metrics"):
        out.update(_slime_rejection(values, lower, upper))
    if values.get("rs_veto_threshold") is not None and not values.get("get_mismatch_metrics"):
        out["rollout_token_veto_threshold"] = values["rs_veto_threshold"]
    if "use_rollout_logprobs" in values:
        out["bypass_mode"] = bool(values["use_rollout_logprobs"])
    return out


def _slime_threshold(mode: str, lower: Any, upper: Any) -> dict[str, Any]:
    if mode not in _SLIME_MODES:
        raise ValueError(f"tis_mode must be one of {tuple(_SLIME_MODES)}, got {mode!r}.")
    upper = 2.0 if upper is None else upper
    if mode == "truncate":
        return {"rollout_is_threshold": upper, "rollout_is_mode": "truncate"}
    return {"rollout_is_threshold": _band(lower, upper, "tis_upper_bound"), "rollout_is_mode": mode}


def _slime_rejection(values: Mapping[str, Any], tis_lower: Any, tis_upper: Any) -> dict[str, Any]:
    level = values.get("rs_level", values.get("tis_level", "token"))
    if level not in _LEGACY_RS:
        raise ValueError(f"rs_level must be one of {tuple(_LEGACY_RS)}, got {level!r}.")
    lower, upper = values.get("rs_lower_bound"), values.get("rs_upper_bound")
    upper = tis_upper if upper is None else upper
    lower = tis_lower if lower is None else lower
    return {
        "rollout_rs": _LEGACY_RS[level],
        "rollout_rs_threshold": _band(lower, 2.0 if upper is None else upper, "rs_upper_bound"),
    }


def _band(lower: Any, upper: Any, name: str) -> str:
    """`"lower_upper"`; without a lower bound, the reciprocal of the upper one, which is `name`."""
    if lower is not None:
        return f"{lower}_{upper}"
    if isinstance(upper, str) and "_" in upper:
        return upper
    return f"{1.0 / parse_number(upper, name)!r}_{upper}"
