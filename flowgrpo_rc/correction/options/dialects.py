"""Other projects' keys for rollout correction, translated into the canonical ones.

Three dialects: verl's first release ("legacy verl"), its transitional keys, and slime's MIS options. `to_canonical`
translates keys that stand alone; `overrides` has those beside a preset.
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flowgrpo_rc.correction.plan import parse_number, plain_threshold, shown, split_band

LEGACY_RS = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
"""Levels of rejection in verl's first release and in slime, and what they are called today."""
_PURE = ("use_pure_rollout_correction", "use_policy_gradient")
_LEGACY_KEYS = ("bypass_old_logprob_for_rollout", *_PURE, "rollout_rs_threshold_lower")
# Canonical keys that those set; `rollout_rs` and its threshold keep their names and change their form.
LEGACY_SETS = ("bypass_mode", "loss_type")
_SLIME_KEYS = (
    *("use_tis", "tis_mode", "tis_level", "tis_lower_bound", "tis_upper_bound", "tis_batch_normalize"),
    *("use_rs", "rs_level", "rs_lower_bound", "rs_upper_bound", "rs_veto_threshold"),
    *("use_rollout_logprobs", "get_mismatch_metrics", "rs_trust_region", "rs_tr_threshold"),
)
_VETO = "rollout_token_veto_threshold"
_SLIME_SETS = ("bypass_mode", _VETO)
_SLIME_LEVELS = ("token", "sequence", "geometric")
_SLIME_MODES = ("truncate", "clip", "mask")
# How slime's documentation of its metrics calls some options.
_SLIME_OTHER_NAMES = {"veto_threshold": "rs_veto_threshold"}
DEFAULT_UPPER = 2.0
"""The upper bound of weights where none is given; rejection falls back to it in both dialects."""

Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Translation:
    """Canonical keys, and the keys of another dialect that they came from."""

    canonical: dict[str, Any]
    dialect: str = ""
    keys: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()
    """Keys that have no effect beside the others."""

    def warning(self, form: Values) -> str:
        """What to say of it; `form` holds the canonical keys to print."""
        text = ", ".join(f"{key}={_pasteable(value)}" for key, value in form.items())
        idle = f"{', '.join(self.idle)} without effect there; " if self.idle else ""
        return f"{self.dialect} keys ({', '.join(self.keys)}) were translated; {idle}the canonical form is: {text}"


def to_canonical(values: Values) -> Translation:
    """`values`, of which `named_keys` has approved, in canonical keys.

    Raises:
        TypeError: a switch or a bound of the wrong type.
        ValueError: contradicting values, or a bad one; the message names the key as it was given.
    """
    slime, legacy = dialect_keys(values)
    if slime:
        canonical = _from_slime(values)
        refuse_contradiction(values, canonical, "slime", slime)
        return Translation(canonical, "slime", slime, tuple(idle_veto(values)))
    if legacy:
        canonical, idle = _from_legacy(values)
        refuse_contradiction(given(values, LEGACY_SETS), canonical, "legacy verl", legacy)
        return Translation(canonical, "legacy verl", legacy, idle)
    return Translation(dict(values))


def named_keys(values: Values, canonical: Iterable[str]) -> dict[str, Any]:
    """`values` with slime's keys in one spelling: of `tis-mode` and `mis_tis_mode` both become `tis_mode`.

    Raises:
        ValueError: a key of no dialect (the message lists the nearest known ones), or one key in two spellings.
    """
    every, out = known_keys(canonical), {}
    for key, value in values.items():
        name = key if key in every else _slime_name(key)
        if name is None:
            raise ValueError(f"Unknown rollout-correction key {key!r}; nearest known: {nearest(key, every)}.")
        if name in out:
            raise ValueError(f"{name} is there twice, in two spellings: {shown(out[name])} and {shown(value)}.")
        out[name] = value
    return out


def is_known(key: str, canonical: Iterable[str]) -> bool:
    """Whether `from_dict` understands a key, in some spelling."""
    return key in known_keys(canonical) or _slime_name(key) is not None


def dialect_keys(values: Values) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Slime's keys among `values`, and legacy verl's.

    Raises:
        ValueError: there are both.
    """
    slime = tuple(k for k in values if k in _SLIME_KEYS)
    legacy = tuple(k for k in values if k in _LEGACY_KEYS or (k == "rollout_rs" and is_legacy_level(values[k])))
    if slime and legacy:
        raise ValueError(f"Keys of two dialects: {', '.join(slime)} (slime) and {', '.join(legacy)} (legacy verl).")
    return slime, legacy


def is_legacy_level(value: object) -> bool:
    """Whether `rollout_rs` has this value in legacy verl alone."""
    return isinstance(value, str) and value in LEGACY_RS


def known_keys(canonical: Iterable[str]) -> tuple[str, ...]:
    """Every key that `from_dict` understands: the canonical ones, those of the dialects, and `preset`."""
    return (*canonical, *_LEGACY_KEYS, *_SLIME_KEYS, "preset")


def nearest(key: str, known: Iterable[str]) -> str:
    """The known names most like `key`, comma-separated (all of them when none is close)."""
    known = tuple(known)
    return ", ".join(difflib.get_close_matches(key, known, n=3, cutoff=0.5) or known)


def switch(values: Values, key: str) -> bool | None:
    """A boolean key of a dialect; "true" and "false" are booleans, None where it is absent or null.

    Raises:
        TypeError: anything else, which must not count as true.
    """
    value = values.get(key)
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    if value is None or isinstance(value, bool):
        return value
    raise TypeError(f"{key} must be true or false, got {shown(value)}.")


def choice(values: Values, key: str, choices: tuple[str, ...]) -> str | None:
    """A key with one of `choices`, or None where it is absent or null."""
    value = values.get(key)
    if value is not None and value not in choices:
        raise ValueError(f"{key} must be one of {choices} or null, got {shown(value)}.")
    return value


def bound(values: Values, key: str) -> Any:
    """A bound as it was written, checked; None where it is absent or null. A lower one may be 0."""
    value = plain_threshold(values.get(key), key)
    if value is None or (isinstance(value, str) and "_" in value and "lower" not in key):
        return value  # a band, which the configuration checks
    number = parse_number(value, key) if "lower" not in key or not _is_zero(value) else 0.0
    return value.strip() if isinstance(value, str) and number else value


def band(lower: Any, upper: Any, lower_key: str, upper_key: str) -> str:
    """`"lower_upper"` of two bounds; without a lower one, the reciprocal of the upper one. Names keys in messages."""
    if isinstance(upper, str) and "_" in upper:
        if lower is not None:
            raise ValueError(
                f"{lower_key}={shown(lower)} beside {upper_key}={shown(upper)}, which has a lower bound already; give "
                "one of them."
            )
        return upper
    above = parse_number(upper, upper_key)
    if lower is None:
        return f"{1.0 / above!r}_{upper}"
    if float(lower) > above:
        raise ValueError(f"{lower_key}={shown(lower)} exceeds {upper_key}={shown(upper)}.")
    return f"{lower}_{upper}"


def refuse_contradiction(values: Values, canonical: Values, dialect: str, keys: tuple[str, ...]) -> None:
    """Refuses a canonical key beside keys of a dialect that give it another value."""
    for key, value in values.items():
        if key in canonical and canonical[key] != value:
            raise ValueError(
                f"{key}={value!r} contradicts {', '.join(keys)} ({dialect}), which give {key}={canonical[key]!r}."
            )


def given(values: Values, keys: Iterable[str]) -> dict[str, Any]:
    """Those of `keys` that are there and not null."""
    return {key: values[key] for key in keys if values.get(key) is not None}


def without_dialect(values: Values) -> dict[str, Any]:
    """The canonical keys among `values`."""
    return {k: v for k, v in values.items() if k not in _LEGACY_KEYS and k not in _SLIME_KEYS}


def legacy_mode(values: Values, loss_type: str = "ppo_clip") -> dict[str, Any]:
    """What `bypass_old_logprob_for_rollout`, `use_pure_rollout_correction` and `use_policy_gradient` set.

    Args:
        loss_type: the loss without them.
    """
    out: dict[str, Any] = {}
    bypass = switch(values, "bypass_old_logprob_for_rollout")
    if bypass is None and values.get("bypass_mode") is not None:
        bypass = values["bypass_mode"]
    elif bypass is not None:
        out["bypass_mode"] = bypass
    pure = {key: switch(values, key) for key in _PURE if switch(values, key) is not None}
    if len(set(pure.values())) > 1:
        raise ValueError(f"{' and '.join(pure)} are two names of one switch; they must not contradict each other.")
    loss = values.get("loss_type")
    for key, on in pure.items():
        if on and bypass is False:
            raise ValueError(f"{key}=true needs bypass mode, which is explicitly false.")
        if on and loss not in (None, "reinforce"):
            raise ValueError(f"{key}=true means loss_type=reinforce, but loss_type={loss!r}.")
        if not on and loss == "reinforce":
            raise ValueError(f"{key}=false contradicts loss_type='reinforce', which it would mean if it were true.")
        if on:
            out.update(bypass_mode=True, loss_type="reinforce")
        elif loss is None and loss_type == "reinforce":
            out["loss_type"] = "ppo_clip"
    return out


def slime_mode(values: Values) -> dict[str, Any]:
    """What slime's switches set that need no other key: `use_rollout_logprobs`, the veto; refuses a trust region."""
    region = values.get("rs_trust_region")
    if region is not None and region is not False:
        raise ValueError(
            f"rs_trust_region={shown(region)}: slime's trust region is not implemented here; set it to null, and "
            "reject with use_rs, rs_level and its bounds."
        )
    out: dict[str, Any] = {}
    bypass = switch(values, "use_rollout_logprobs")
    if bypass is not None:
        out["bypass_mode"] = bypass
    veto = plain_threshold(values.get("rs_veto_threshold"), "rs_veto_threshold", band=False)
    if veto is not None:
        parse_number(veto, "rs_veto_threshold")
    if "rs_veto_threshold" in values and not idle_veto(values):
        out[_VETO] = veto
    return out


def idle_veto(values: Values) -> Values:
    """slime's veto where `use_rs` is false: it is a part of rejection there."""
    key = "rs_veto_threshold"
    return given(values, (key,)) if switch(values, "use_rs") is False else {}


def _slime_name(key: str) -> str | None:
    """The canonical spelling of one of slime's keys; None for any other."""
    name = key.replace("-", "_")
    short = name.removeprefix("mis_")
    known = [name]
    if short != name:
        known += [short, f"tis_{short}", _SLIME_OTHER_NAMES.get(short, "")]
    return next((k for k in known if k in _SLIME_KEYS), None)


def _is_zero(value: object) -> bool:
    try:
        return float(value) == 0  # pyright: ignore[reportArgumentType]
    except ValueError:
        return False


def _pasteable(value: Any) -> str:
    """A value as YAML reads it back: bands in quotes, without which `0.5_5` would be a number."""
    if isinstance(value, str) and "_" in value and value[0] in "0123456789.+-":
        return f'"{value}"'
    if isinstance(value, float) and "e" in repr(value) and "." not in repr(value):
        return repr(value).replace("e", ".0e")  # to YAML 1e-05 is text
    return "null" if value is None else str(value)


def _from_legacy(values: Values) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Canonical keys, and keys without effect."""
    out = {**without_dialect(values), **legacy_mode(values)}
    level, lower = values.get("rollout_rs"), bound(values, "rollout_rs_threshold_lower")
    if is_legacy_level(level):
        out["rollout_rs"] = LEGACY_RS[str(level)]
        out["rollout_rs_threshold"] = legacy_band(values, lower, values.get("rollout_is_threshold", DEFAULT_UPPER))
        return out, ()
    if level is not None and lower is not None:
        raise ValueError(
            "rollout_rs_threshold_lower belongs to legacy rollout_rs (token, sequence, geometric); "
            f"with rollout_rs={level!r} write the band as rollout_rs_threshold='lower_upper'."
        )
    if level is not None:
        return out, ()
    out.pop("rollout_rs_threshold", None)
    return out, tuple(given(values, ("rollout_rs_threshold", "rollout_rs_threshold_lower")))


def legacy_band(values: Values, lower: Any, is_threshold: Any) -> str:
    """The band of a legacy `rollout_rs`; `is_threshold` stands in for a null upper bound."""
    upper = bound(values, "rollout_rs_threshold")
    upper = is_threshold if upper is None else upper
    if upper is None:
        raise ValueError(
            f"rollout_rs_threshold is null with rollout_rs={values.get('rollout_rs')!r}, and so is "
            "rollout_is_threshold, which would stand in for it; give rollout_rs_threshold a number or 'lower_upper'."
        )
    return band(lower, upper, "rollout_rs_threshold_lower", "rollout_rs_threshold")


def _from_slime(values: Values) -> dict[str, Any]:
    use_tis, use_rs, level, mode = slime_choices(values)
    out = {**without_dialect(values), "rollout_is": None, **given(slime_mode(values), _SLIME_SETS)}
    if switch(values, "get_mismatch_metrics"):
        return {**out, **dict.fromkeys(key for key in ("rollout_rs", _VETO) if key in out)}
    if use_tis:
        out["rollout_is"] = level or "token"
        out.update(slime_weights(values, mode or "truncate"))
        out["rollout_is_batch_normalize"] = switch(values, "tis_batch_normalize") or False
    if use_rs:
        out.update(slime_rejection(values, DEFAULT_UPPER))
    return out


def slime_choices(values: Values) -> tuple[bool | None, bool | None, str | None, str | None]:
    """`use_tis`, `use_rs`, `tis_level` and `tis_mode`, checked, as the other choices and switches are."""
    choice(values, "rs_level", _SLIME_LEVELS)
    switch(values, "tis_batch_normalize")
    level, mode = choice(values, "tis_level", _SLIME_LEVELS), choice(values, "tis_mode", _SLIME_MODES)
    return switch(values, "use_tis"), switch(values, "use_rs"), level, mode


def slime_weights(values: Values, mode: str) -> dict[str, Any]:
    """The bounds of slime's weights."""
    lower, upper = bound(values, "tis_lower_bound"), bound(values, "tis_upper_bound")
    upper = DEFAULT_UPPER if upper is None else upper
    if mode == "truncate":
        return {"rollout_is_threshold": upper, "rollout_is_mode": "truncate"}
    threshold = band(lower, upper, "tis_lower_bound", "tis_upper_bound")
    return {"rollout_is_threshold": threshold, "rollout_is_mode": mode}


def slime_rejection(values: Values, default_upper: Any) -> dict[str, Any]:
    """Criterion and band of slime's rejection: a bound that is not set is that of the weights.

    Where those have no lower bound either, it is the reciprocal of *their* upper bound, whatever `rs_upper_bound` is.
    """
    level = choice(values, "rs_level", _SLIME_LEVELS) or "token"
    tis_lower, tis_upper = bound(values, "tis_lower_bound"), bound(values, "tis_upper_bound")
    lower, upper = bound(values, "rs_lower_bound"), bound(values, "rs_upper_bound")
    lower_key, upper_key = "rs_lower_bound", "rs_upper_bound"
    tis_upper = default_upper if tis_upper is None else tis_upper
    if upper is None:
        upper, upper_key = tis_upper, "tis_upper_bound"
    if lower is None and not (isinstance(upper, str) and "_" in upper):
        lower, lower_key = tis_lower, "tis_lower_bound"
        if lower is None:
            below, above = split_band(tis_upper, "tis_upper_bound")
            lower = 1.0 / parse_number(above, "tis_upper_bound") if below is None else below
    return {"rollout_rs": LEGACY_RS[level], "rollout_rs_threshold": band(lower, upper, lower_key, upper_key)}
