"""Other projects' keys for rollout correction, translated into the canonical ones.

Two dialects: verl's first release with its transitional keys ("legacy verl"), and slime's MIS options. Each is
translated alone; canonical keys may stand beside it where they do not contradict it. Beside a ``preset`` the
configuration takes canonical keys only.
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from flowgrpo_rc.checks import choice, show
from flowgrpo_rc.correction.plan import is_band, parse_number, plain_threshold, split_band

Values = Mapping[str, Any]
"""Keys as the user gave them, each with its value."""
LEVELS = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
"""Levels of rejection in verl's first release and in slime, and the criteria that they are today."""
LEGACY = {
    "bypass_old_logprob_for_rollout": "bypass_mode",
    "use_pure_rollout_correction": "bypass_mode and loss_type",
    "use_policy_gradient": "bypass_mode and loss_type",
    "rollout_rs_threshold_lower": 'rollout_rs_threshold: "lower_upper"',
}
"""Keys of legacy verl alone, and the canonical ones. ``rollout_rs`` kept its name, and changed its values."""
SLIME = {
    "use_tis": "rollout_is",
    "tis_mode": "rollout_is_mode",
    "tis_level": "rollout_is",
    "tis_lower_bound": 'rollout_is_threshold: "lower_upper"',
    "tis_upper_bound": "rollout_is_threshold",
    "tis_batch_normalize": "rollout_is_batch_normalize",
    "use_rs": "rollout_rs",
    "rs_level": "rollout_rs",
    "rs_lower_bound": 'rollout_rs_threshold: "lower_upper"',
    "rs_upper_bound": "rollout_rs_threshold",
    "rs_veto_threshold": "rollout_token_veto_threshold",
    "use_rollout_logprobs": "bypass_mode",
    "get_mismatch_metrics": "preset: disabled",
    "rs_trust_region": "rollout_rs",
    "rs_tr_threshold": "rollout_rs_threshold",
}
"""slime's keys, and the canonical ones."""
_SPELLINGS = {
    **{spelling: key for key in SLIME for spelling in (key, f"mis_{key}")},
    # slime's documentation of its metrics leaves out tis_ and rs_.
    **{f"mis_{key.removeprefix('tis_')}": key for key in SLIME if key.startswith("tis_")},
    "mis_veto_threshold": "rs_veto_threshold",
}
_DEFAULT_UPPER = 2.0
"""slime's upper bound of weights where none is given; rejection falls back to it."""


def translate(values: Values, defaults: Values) -> tuple[dict[str, Any], str]:
    """Every canonical key's value, and a warning that prints the canonical form; empty if nothing was translated.

    Args:
        values: keys that ``named_keys`` has approved, without ``preset``.
        defaults: every canonical key.

    Raises:
        TypeError: a switch or a bound of the wrong type.
        ValueError: keys of two dialects, or contradicting or bad values.
    """
    # Two dialects would need an order between them, which no user could guess.
    slime = [key for key in values if key in SLIME]
    legacy = [k for k in values if k in LEGACY or (k == "rollout_rs" and is_legacy_level(values[k]))]
    if slime and legacy:
        raise ValueError(f"Keys of two dialects: {', '.join(slime)} (slime) and {', '.join(legacy)} (legacy verl).")
    canonical = {key: value for key, value in values.items() if key in defaults}
    if not slime and not legacy:
        return {**defaults, **canonical}, ""
    dialect = "slime" if slime else "legacy verl"
    keys = ", ".join(slime or legacy)
    changes, idle = _of_slime(values) if slime else _of_legacy(values)
    for key, value in canonical.items():
        # Legacy verl's own rollout_rs and rollout_rs_threshold have the canonical names.
        is_canonical = slime or (key in ("bypass_mode", "loss_type") and value is not None)
        if is_canonical and changes.get(key, value) != value:
            raise ValueError(f"{key}={value!r} contradicts {keys} ({dialect}), which give {key}={changes[key]!r}.")
    # Printed as YAML, so that users can replace their keys by it.
    whole = {**defaults, **canonical, **changes}
    form = ", ".join(
        f"{key}={_as_yaml(value)}"
        for key, value in whole.items()
        if value != defaults[key] or key in canonical or key in changes
    )
    unused = f"{', '.join(idle)} without effect there; " if idle else ""
    return whole, f"{dialect} keys ({keys}) were translated; {unused}the canonical form is: {form}"


def refuse_beside_preset(values: Values, preset: str) -> None:
    """Refuses another dialect's key or value beside a preset; the ``ValueError`` has the canonical form."""
    forms = {**LEGACY, **SLIME}
    if is_legacy_level(values.get("rollout_rs")):
        forms["rollout_rs"] = f"rollout_rs: {LEVELS[values['rollout_rs']]}"
    for key, value in values.items():
        if key in forms:
            raise ValueError(
                f"{key}={show(value)} beside preset {preset!r}: canonical keys alone override a preset; write "
                f"{forms[key]}."
            )


def named_keys(values: Values, canonical: Iterable[str]) -> dict[str, Any]:
    """``values`` with slime's keys in one spelling: ``tis-mode`` and ``mis_tis_mode`` both become ``tis_mode``.

    Raises:
        ValueError: a key of no dialect (the message lists the nearest known ones), or one key in two spellings.
    """
    known = known_keys(canonical)
    named: dict[str, Any] = {}
    for key, value in values.items():
        name = key if key in known else slime_name(key)
        if name is None:
            raise ValueError(f"Unknown rollout-correction key {key!r}; nearest known: {nearest(key, known)}.")
        if name in named:
            raise ValueError(f"{name} is there twice, in two spellings: {show(named[name])} and {show(value)}.")
        named[name] = value
    return named


def slime_name(key: str) -> str | None:
    """A key of ``SLIME`` in its usual spelling: ``tis_mode`` for ``tis-mode`` and ``mis_tis_mode``; None for others."""
    return _SPELLINGS.get(key.replace("-", "_"))


def is_known(key: str, canonical: Iterable[str]) -> bool:
    """``from_dict`` understands this key, in some spelling."""
    return key in known_keys(canonical) or slime_name(key) is not None


def is_legacy_level(value: object) -> bool:
    """``rollout_rs`` has this value in legacy verl only."""
    return isinstance(value, str) and value in LEVELS


def known_keys(canonical: Iterable[str]) -> tuple[str, ...]:
    """Every key that ``from_dict`` understands: the canonical ones, those of the dialects, and ``preset``."""
    return (*canonical, *LEGACY, *SLIME, "preset")


def nearest(key: str, known: Iterable[str]) -> str:
    """The known names most like ``key``, comma-separated (all of them when none is close)."""
    known = tuple(known)
    return ", ".join(difflib.get_close_matches(key, known, n=3, cutoff=0.5) or known)


def band(values: Values, lower_key: str, upper_key: str) -> str:
    """``"lower_upper"`` of two keys; without a lower bound that is the reciprocal of the upper one.

    In place of the upper bound a whole band may stand.

    Raises:
        ValueError: the lower bound is above the upper one, or is given twice.
    """
    lower = _bound(values, lower_key)
    upper = _bound(values, upper_key)
    if is_band(upper):
        if lower is not None:
            raise ValueError(
                f"{lower_key}={show(lower)} beside {upper_key}={show(upper)}, which has a lower bound already; "
                "give one of them."
            )
        return upper
    above = parse_number(upper, upper_key)
    if lower is None:
        return f"{1.0 / above!r}_{upper}"
    if float(lower) > above:
        raise ValueError(f"{lower_key}={show(lower)} exceeds {upper_key}={show(upper)}.")
    return f"{lower}_{upper}"


def _of_legacy(values: Values) -> tuple[dict[str, Any], list[str]]:
    """The canonical keys that legacy verl's keys set, and keys without effect. A lone ``rollout_rs_threshold`` is the
    upper bound; null is ``rollout_is_threshold``."""
    changes = _legacy_mode(values)
    written = values.get("rollout_rs")
    lower = _bound(values, "rollout_rs_threshold_lower")
    # verl's first release wrote out thresholds that nothing used.
    if written is None:
        idle = [k for k in ("rollout_rs_threshold", "rollout_rs_threshold_lower") if values.get(k) is not None]
        return {**changes, **({"rollout_rs_threshold": None} if idle else {})}, idle
    if not is_legacy_level(written):
        if lower is not None:
            raise ValueError(
                "rollout_rs_threshold_lower belongs to legacy rollout_rs (token, sequence, geometric); "
                f"with rollout_rs={written!r} write the band as rollout_rs_threshold='lower_upper'."
            )
        return changes, []
    upper = values.get("rollout_rs_threshold")
    if upper is None:
        upper = values.get("rollout_is_threshold", _DEFAULT_UPPER)
    if upper is None:
        raise ValueError(
            f"rollout_rs_threshold is null with rollout_rs={written!r}, and so is rollout_is_threshold, its default; "
            "give rollout_rs_threshold a number or 'lower_upper'."
        )
    bounds = {**values, "rollout_rs_threshold": upper}
    threshold = band(bounds, "rollout_rs_threshold_lower", "rollout_rs_threshold")
    return {**changes, "rollout_rs": LEVELS[written], "rollout_rs_threshold": threshold}, []


def _legacy_mode(values: Values) -> dict[str, Any]:
    """``bypass_mode`` and ``loss_type`` by legacy verl's switches."""
    bypass = _switch(values, "bypass_old_logprob_for_rollout")
    changes: dict[str, Any] = {} if bypass is None else {"bypass_mode": bypass}
    # verl renamed the switch, so that a configuration may carry both.
    pure = {key: _switch(values, key) for key in ("use_pure_rollout_correction", "use_policy_gradient")}
    if set(pure.values()) >= {True, False}:
        raise ValueError(f"{' and '.join(pure)} are two names of one switch; they must not contradict each other.")
    for key, on in pure.items():
        if on and changes.get("bypass_mode", values.get("bypass_mode")) is False:
            raise ValueError(f"{key}=true needs bypass mode, which is explicitly false.")
        if on:
            changes |= {"bypass_mode": True, "loss_type": "reinforce"}
        elif on is False:
            changes["loss_type"] = "ppo_clip"
    return changes


def _of_slime(values: Values) -> tuple[dict[str, Any], list[str]]:
    """The canonical keys that slime's keys set, by its own defaults, and keys without effect."""
    for key, choices in (("rs_level", LEVELS), ("tis_level", LEVELS), ("tis_mode", ("truncate", "clip", "mask"))):
        choice(key, values.get(key), (None, *choices))
    if values.get("rs_trust_region") not in (None, False):
        raise ValueError(
            f"rs_trust_region={show(values['rs_trust_region'])}: slime's trust region is not implemented here; set it "
            "to null, and reject with use_rs, rs_level and its bounds."
        )
    switches = ("use_tis", "use_rs", "tis_batch_normalize", "use_rollout_logprobs", "get_mismatch_metrics")
    weighs, rejects, normalizes, bypass, only_metrics = (_switch(values, key) for key in switches)
    changes: dict[str, Any] = {} if bypass is None else {"bypass_mode": bypass}
    idle: list[str] = []
    veto = values.get("rs_veto_threshold")
    if veto is not None:
        parse_number(veto, "rs_veto_threshold")
        # slime's code applies the veto under use_rs alone, against its document.
        if rejects is False:
            idle.append("rs_veto_threshold")
        else:
            changes["rollout_token_veto_threshold"] = veto
    # Metrics only, whatever else the file switches on.
    if only_metrics:
        off = ("rollout_is", "rollout_rs", "rollout_rs_threshold", "rollout_token_veto_threshold")
        return {**changes, **dict.fromkeys(off)}, idle
    changes["rollout_is"] = (values.get("tis_level") or "token") if weighs else None
    upper = values.get("tis_upper_bound")
    bounds = {**values, "tis_upper_bound": _DEFAULT_UPPER if upper is None else upper}
    threshold = None
    if weighs or rejects:
        # Checked also where truncation leaves it out, or a bound of rejection takes its place.
        _bound(bounds, "tis_lower_bound")
        threshold = _bound(bounds, "tis_upper_bound")
    if weighs:
        changes["rollout_is_mode"] = values.get("tis_mode") or "truncate"
        if changes["rollout_is_mode"] != "truncate":
            threshold = band(bounds, "tis_lower_bound", "tis_upper_bound")
        changes["rollout_is_threshold"] = threshold
        changes["rollout_is_batch_normalize"] = bool(normalizes)
    if rejects:
        changes["rollout_rs"] = LEVELS[values.get("rs_level") or "token"]
        changes["rollout_rs_threshold"] = _slime_rejection_band(bounds)
    return changes, idle


def _slime_rejection_band(bounds: Values) -> str:
    """The band of rejection; a bound that is not set falls back to the bound of the weights."""
    lower_key = "tis_lower_bound" if bounds.get("rs_lower_bound") is None else "rs_lower_bound"
    upper_key = "tis_upper_bound" if bounds.get("rs_upper_bound") is None else "rs_upper_bound"
    lower = bounds.get(lower_key)
    tis_upper = bounds["tis_upper_bound"]
    # A whole band has its own lower bound, unless rejection names one, which is then an error.
    if is_band(bounds[upper_key]):
        lower = bounds.get("rs_lower_bound")
    # slime takes it from the weights' upper bound, whatever rs_upper_bound is.
    elif lower is None and is_band(tis_upper):
        lower = split_band(tis_upper, "tis_upper_bound")[0]
    elif lower is None:
        lower = 1.0 / parse_number(tis_upper, "tis_upper_bound")
    return band({**bounds, lower_key: lower}, lower_key, upper_key)


def _switch(values: Values, key: str) -> bool | None:
    """A boolean key; ``None`` where it is absent or null. Any other value must not count as true."""
    value = values.get(key)
    # Overrides on verl's and slime's command lines arrive as text.
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    if value is None or isinstance(value, bool):
        return value
    raise TypeError(f"{key} must be true or false, got {show(value)}.")


def _bound(values: Values, key: str) -> Any:
    """A bound as it was written, checked; ``None`` where it is absent or null. A lower bound may be 0."""
    value = plain_threshold(values.get(key), key)
    is_lower = "lower" in key
    if value is not None and (is_lower or not is_band(value)):
        parse_number(value, key, zero_allowed=is_lower)
    return value.strip() if isinstance(value, str) else value


def _as_yaml(value: Any) -> str:
    """A value as YAML reads it back: bands in quotes, without which ``0.5_5`` would be a number."""
    if isinstance(value, str) and "_" in value and value[0] in "0123456789.+-":
        return f'"{value}"'
    # YAML 1.1 reads 1e-05 as text.
    if isinstance(value, float) and "e" in repr(value) and "." not in repr(value):
        return repr(value).replace("e", ".0e")
    return "null" if value is None else str(value)
