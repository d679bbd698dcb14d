"""slime's options of importance sampling and rejection (``use_tis``, ``rs_level``, ...), in canonical keys."""

from typing import Any

from flowgrpo_rc.checks import choice, show
from flowgrpo_rc.correction.options.legacy import LEVELS, is_k1
from flowgrpo_rc.correction.options.values import BoundKeys, Values, given, refuse_unused, switch
from flowgrpo_rc.correction.plan import is_band, parse_is_threshold, parse_number, plain_threshold, split_band

KEYS = (
    *("use_tis", "tis_mode", "tis_level", "tis_lower_bound", "tis_upper_bound", "tis_batch_normalize"),
    *("use_rs", "rs_level", "rs_lower_bound", "rs_upper_bound", "rs_veto_threshold"),
    *("use_rollout_logprobs", "get_mismatch_metrics", "rs_trust_region", "rs_tr_threshold"),
)
_SWITCHES = ("tis_batch_normalize", "use_tis", "use_rs", "use_rollout_logprobs", "get_mismatch_metrics")
_CHOICES = {"rs_level": tuple(LEVELS), "tis_level": tuple(LEVELS), "tis_mode": ("truncate", "clip", "mask")}
_WEIGHT_BOUNDS = BoundKeys("tis_lower_bound", "tis_upper_bound")
_REJECTION_BOUNDS = BoundKeys("rs_lower_bound", "rs_upper_bound")
_VETO = "rs_veto_threshold"
_CANONICAL_VETO = "rollout_token_veto_threshold"
_CRITERION = ("rollout_rs", "rollout_rs_threshold")
_DEFAULT_UPPER = 2.0
"""slime's upper bound of weights where none is given; rejection falls back to it."""


def slime_name(key: str) -> str | None:
    """One of ``KEYS`` in its usual spelling: of ``tis-mode`` and ``mis_tis_mode`` both it is ``tis_mode``.

    ``None`` for any other key. slime's documentation of its metrics also leaves out ``tis_`` and ``rs_``.
    """
    name = key.replace("-", "_")
    candidates = [name]
    if name.startswith("mis_"):
        short = name.removeprefix("mis_")
        candidates = [name, short, f"tis_{short}", f"rs_{short}" if short == "veto_threshold" else ""]
    return next((candidate for candidate in candidates if candidate in KEYS), None)


def unused_veto(values: Values) -> dict[str, Any]:
    """slime's veto where ``use_rs`` is false: it is a part of rejection there."""
    return given(values, (_VETO,)) if switch(values, "use_rs") is False else {}


def changes(values: Values, base: Values, preset: str | None) -> dict[str, Any]:
    """The canonical keys that slime's keys change.

    Alone they mean what slime's own defaults make of them; beside a preset a key that is absent or null leaves the
    preset's setting as it is.

    Args:
        values: all keys that were given.
        base: canonical keys of the preset, with the canonical keys given beside it; the defaults without a preset.
        preset: its name, or ``None``.

    Raises:
        TypeError: a switch or a bound of the wrong type.
        ValueError: an unknown choice, a bad bound, or a key that cannot act beside this preset.
    """
    for key, choices in _CHOICES.items():
        choice(key, values.get(key), (None, *choices))
    values = {**values, **{key: switch(values, key) for key in _SWITCHES}}
    changed = _veto(values, preset)
    if preset is None:
        values["use_tis"] = bool(values["use_tis"])
        values["use_rs"] = values["use_rs"] or None
        values["tis_mode"] = values.get("tis_mode") or "truncate"
        values["tis_batch_normalize"] = bool(values["tis_batch_normalize"]) if values["use_tis"] else None
    if values["use_rollout_logprobs"] is not None:
        changed["bypass_mode"] = values["use_rollout_logprobs"]
    if values["get_mismatch_metrics"]:
        return {**changed, **dict.fromkeys(("rollout_is", *_CRITERION, _CANONICAL_VETO))}
    changed |= _weights(values, base, preset)
    changed |= _rejection(values, base, preset)
    if values["tis_batch_normalize"] is not None:
        changed["rollout_is_batch_normalize"] = values["tis_batch_normalize"]
    return changed


def _veto(values: Values, preset: str | None) -> dict[str, Any]:
    region = values.get("rs_trust_region")
    if region is not None and region is not False:
        raise ValueError(
            f"rs_trust_region={show(region)}: slime's trust region is not implemented here; set it to null, and "
            "reject with use_rs, rs_level and its bounds."
        )
    veto = plain_threshold(values.get(_VETO), _VETO, band=False)
    if veto is not None:
        parse_number(veto, _VETO)
    is_asked = veto is not None or (_VETO in values and preset is not None)
    return {_CANONICAL_VETO: veto} if is_asked and not unused_veto(values) else {}


def _weights(values: Values, base: Values, preset: str | None) -> dict[str, Any]:
    if values["use_tis"] is False:
        return {"rollout_is": None}
    asked = given(values, ("tis_level", "tis_mode", *_WEIGHT_BOUNDS))
    # Where rejection is new and has no bound of its own, that of the weights is its bound too.
    is_new = values["use_rs"] and base["rollout_rs"] is None
    pairs = zip(_WEIGHT_BOUNDS, _REJECTION_BOUNDS, strict=True)
    shared = {of_weights for of_weights, own in pairs if is_new and values.get(own) is None}
    if not values["use_tis"] and base["rollout_is"] is None:
        unused = {key: value for key, value in asked.items() if key not in shared}
        refuse_unused(unused, preset, "without weights", "add use_tis: true")
        return {}
    if not values["use_tis"] and not asked:
        return {}
    changed: dict[str, Any] = {"rollout_is": values.get("tis_level") or base["rollout_is"] or "token"}
    if not asked.keys() - {"tis_level"}:
        return changed
    threshold = base["rollout_is_threshold"]
    mode, _, above = parse_is_threshold(threshold)
    if values.get("tis_mode") is not None:
        mode = changed["rollout_is_mode"] = values["tis_mode"]
    if mode != "truncate":
        return {**changed, "rollout_is_threshold": _WEIGHT_BOUNDS.changed_band(threshold, asked, preset)}
    lower, upper = _WEIGHT_BOUNDS.read(values)
    if lower is not None and _WEIGHT_BOUNDS.lower not in shared:
        refuse_unused({_WEIGHT_BOUNDS.lower: lower}, preset, "with truncated weights", "add tis_mode: clip")
    return {**changed, "rollout_is_threshold": above if upper is None else upper}


def _rejection(values: Values, base: Values, preset: str | None) -> dict[str, Any]:
    criterion = base["rollout_rs"]
    bounds = given(values, _REJECTION_BOUNDS)
    asked = {**given(values, ("rs_level",)), **bounds}
    if values["use_rs"] is False:
        refuse_unused(unused_veto(values), preset, "with use_rs: false", "leave it out")
        has_veto = base[_CANONICAL_VETO] is not None and _CANONICAL_VETO not in values
        return dict.fromkeys((*_CRITERION, _CANONICAL_VETO) if has_veto else _CRITERION)
    if criterion is None and not values["use_rs"]:
        refuse_unused(asked, preset, "without a criterion", "add use_rs: true")
        return {}
    if criterion is not None and not asked:
        return {}
    new = LEVELS[asked.get("rs_level", "token")] if criterion is None or "rs_level" in asked else criterion
    if new != criterion and (bounds or not is_k1(criterion)):
        return {"rollout_rs": new, "rollout_rs_threshold": _new_band(values, base)}
    if not is_k1(criterion):
        refuse_unused(asked, preset, f"with {criterion}", "bound that by rollout_rs_threshold, or add rs_level")
    band = _REJECTION_BOUNDS.changed_band(base["rollout_rs_threshold"], bounds, preset)
    return {"rollout_rs": new, "rollout_rs_threshold": band}


def _new_band(values: Values, base: Values) -> str:
    """The band where there was no rejection: a bound that is not set is that of the weights.

    Where those have no lower bound either, it is the reciprocal of *their* upper bound, whatever ``rs_upper_bound`` is.
    """
    threshold = base["rollout_is_threshold"] or _DEFAULT_UPPER
    bounds = {_WEIGHT_BOUNDS.upper: threshold, **given(values, (*_WEIGHT_BOUNDS, *_REJECTION_BOUNDS))}
    pairs = zip(_REJECTION_BOUNDS, _WEIGHT_BOUNDS, strict=True)
    keys = BoundKeys(*(own if own in bounds else of_weights for own, of_weights in pairs))
    _WEIGHT_BOUNDS.read(bounds)  # checks them, those too that are not used here
    lower, upper = keys.read(bounds)
    if is_band(upper):
        lower = values.get(_REJECTION_BOUNDS.lower)
    elif lower is None:
        below, above = split_band(bounds[_WEIGHT_BOUNDS.upper], _WEIGHT_BOUNDS.upper)
        lower = 1.0 / parse_number(above, _WEIGHT_BOUNDS.upper) if below is None else below
    return keys.band(lower, upper)
