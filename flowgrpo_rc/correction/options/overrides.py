"""Keys beside a preset: each overrides what the preset says of the same thing, and nothing else.

A key that is absent, or null in a dialect where null means "not set", leaves the preset's setting alone. The two halves
of a band are two things: `rollout_rs_threshold: 3.0` beside a preset with the band `0.5_2.0` is the upper half, and
gives `0.5_3.0`; `rollout_rs_threshold_lower: 0.1` gives `0.1_2.0`, and null there the reciprocal of the upper half, as
in legacy verl. A new criterion brings a band of its own: beside `geo_rs` (`0.999_1.001`), `rollout_rs: sequence` with
`rollout_rs_threshold: 3.0` is the band `1/3_3`. A key that nothing in the preset can take up is an error.
"""

from collections.abc import Mapping
from typing import Any

from flowgrpo_rc.correction.options import dialects
from flowgrpo_rc.correction.options.dialects import LEGACY_RS, Translation, Values, band, bound, given, switch
from flowgrpo_rc.correction.plan import parse_is_threshold, parse_number, shown, split_band

_RS_BOUNDS = ("rs_lower_bound", "rs_upper_bound")
_TIS_BOUNDS = ("tis_lower_bound", "tis_upper_bound")
_CRITERION = ("rollout_rs", "rollout_rs_threshold")
_VETO = "rollout_token_veto_threshold"
_UPPER, _LOWER = "rollout_rs_threshold", "rollout_rs_threshold_lower"


def override(values: Values, base: Mapping[str, Any], preset: str) -> Translation:
    """What `values`, which `named_keys` has approved, change of a preset.

    Args:
        values: keys of one dialect and canonical ones.
        base: the preset's canonical keys.
        preset: its name, for messages.

    Raises:
        TypeError: a switch or a bound of the wrong type.
        ValueError: contradicting values, a bad one, or a key that cannot act beside this preset.
    """
    slime, legacy = dialects.dialect_keys(values)
    if slime:
        canonical = _Slime(values, base, preset).canonical()
        dialects.refuse_contradiction(values, canonical, "slime", slime)
        return Translation(canonical, "slime", slime)
    canonical = {**dialects.without_dialect(values), **dialects.legacy_mode(values, base["loss_type"])}
    dialects.refuse_contradiction(given(values, dialects.LEGACY_SETS), canonical, "legacy verl", legacy)
    rejection = _legacy_rejection(values, base, preset)
    canonical.update(rejection)
    if not legacy and rejection.get(_UPPER, values.get(_UPPER)) != values.get(_UPPER):
        legacy = (_UPPER,)  # one half of a band
    return Translation(canonical, "legacy verl" if legacy else "", legacy)


def _legacy_rejection(values: Values, base: Mapping[str, Any], preset: str) -> dict[str, Any]:
    """`rollout_rs` and its threshold, from their canonical or legacy forms."""
    lower, criterion = bound(values, _LOWER), base["rollout_rs"]
    if "rollout_rs" in values:
        asked = values["rollout_rs"]
        is_legacy = dialects.is_legacy_level(asked)
        asked = LEGACY_RS[asked] if is_legacy else asked
        if asked is None:
            _refuse({} if lower is None else {_LOWER: lower}, preset, "with rollout_rs=null", "leave it out")
            return {} if _UPPER in values else {_UPPER: None}
        if asked != criterion:
            return _new_criterion(values, base, asked, is_legacy)
    if criterion is None:
        _refuse(given(values, (_LOWER,)), preset, "without a criterion", "add rollout_rs")
        return {}
    changed = {key for key in (_UPPER, _LOWER) if key in values}
    if not changed:
        return {"rollout_rs": criterion}
    if not _is_k1(criterion):
        _refuse(given(values, (_LOWER,)), preset, f"with {criterion}", "bound that by rollout_rs_threshold alone")
        return {"rollout_rs": criterion}
    return {"rollout_rs": criterion, _UPPER: _halves(values, base, preset)}


def _new_criterion(values: Values, base: Mapping[str, Any], asked: Any, is_legacy: bool) -> dict[str, Any]:
    """Another criterion than the preset's, with the band that is given, or the preset's if it fits."""
    lower = bound(values, _LOWER)
    if not is_legacy:
        if lower is not None:
            raise ValueError(
                "rollout_rs_threshold_lower belongs to legacy rollout_rs (token, sequence, geometric); "
                f"with rollout_rs={asked!r} write the band as rollout_rs_threshold='lower_upper'."
            )
        return {}
    if _UPPER not in values and _is_k1(base["rollout_rs"]):
        below, above = split_band(base[_UPPER], _UPPER)
        below = below if lower is None and _LOWER not in values else lower
        return {"rollout_rs": asked, _UPPER: band(below, above, _LOWER, _UPPER)}
    is_threshold = values.get("rollout_is_threshold", base["rollout_is_threshold"])
    return {"rollout_rs": asked, _UPPER: dialects.legacy_band(values, lower, is_threshold)}


def _halves(values: Values, base: Mapping[str, Any], preset: str) -> Any:
    """The preset's band with the halves that `values` give."""
    written, lower = values.get(_UPPER), bound(values, _LOWER)
    whole = isinstance(written, str) and any(mark in written for mark in ("_", ",", "auto"))
    if whole or (written is None and _UPPER in values):
        if lower is not None:
            raise ValueError(
                f"{_LOWER}={shown(lower)} beside {_UPPER}={shown(written)}; give both halves, or the whole band there."
            )
        return written
    below, above = split_band(base[_UPPER], _UPPER)
    if below is None:
        below = 1.0 / parse_number(above, _UPPER)
    upper = above if written is None else bound(values, _UPPER)
    if _LOWER in values:
        return band(lower, upper, _LOWER, _UPPER)
    return _half_of_preset(below, upper, preset, _UPPER, _LOWER)


def _half_of_preset(below: Any, upper: Any, preset: str, upper_key: str, lower_key: str) -> str:
    """A band with the preset's lower half."""
    if float(below) > parse_number(upper, upper_key):
        raise ValueError(
            f"{upper_key}={shown(upper)} is below {shown(below)}, the lower bound of preset {preset!r}; give "
            f"{lower_key} as well."
        )
    return band(below, upper, lower_key, upper_key)


def _is_k1(criterion: str | None) -> bool:
    return criterion is not None and criterion.endswith("k1")


def _refuse(wrong: Values, preset: str, where: str, remedy: str) -> None:
    """Refuses keys that nothing takes up."""
    for key, value in wrong.items():
        raise ValueError(f"{key}={shown(value)} has no effect beside preset {preset!r} {where}; {remedy}.")


class _Slime:
    """slime's keys beside a preset."""

    def __init__(self, values: Values, base: Mapping[str, Any], preset: str) -> None:
        self._values, self._preset = values, preset
        self._base = {**base, **dialects.without_dialect(values)}
        self._use_tis, self._use_rs, self._level, self._mode = dialects.slime_choices(values)

    def canonical(self) -> dict[str, Any]:
        """The canonical keys that they change."""
        out = {**dialects.without_dialect(self._values), **dialects.slime_mode(self._values)}
        if switch(self._values, "get_mismatch_metrics"):
            out.update(dict.fromkeys(("rollout_is", *_CRITERION, _VETO)))
            return out
        out.update(self._weights())
        out.update(self._rejection())
        normalize = switch(self._values, "tis_batch_normalize")
        if normalize is not None:
            out["rollout_is_batch_normalize"] = normalize
        return out

    def _weights(self) -> dict[str, Any]:
        if self._use_tis is False:
            return {"rollout_is": None}
        asked = given(self._values, ("tis_level", "tis_mode", *_TIS_BOUNDS))
        if not self._use_tis and not asked:
            return {}
        if not self._use_tis and self._base["rollout_is"] is None:
            asked = {key: value for key, value in asked.items() if key not in self._fallbacks()}
            self._refuse(asked, "without weights", "add use_tis: true")
            return {}
        out: dict[str, Any] = {"rollout_is": self._level or self._base["rollout_is"] or "token"}
        if self._mode is None and not given(asked, _TIS_BOUNDS):
            return out
        was, below, above = parse_is_threshold(self._base["rollout_is_threshold"])
        lower, upper = (bound(self._values, key) for key in _TIS_BOUNDS)
        mode = self._mode or was
        upper = above if upper is None else upper
        if mode == "truncate":
            if "tis_lower_bound" not in self._fallbacks():
                self._refuse(given(asked, _TIS_BOUNDS[:1]), "with truncated weights", "add tis_mode: clip")
            out["rollout_is_threshold"] = upper
        else:
            out["rollout_is_threshold"] = self._band(lower, below or None, upper, _TIS_BOUNDS)
        if self._mode is not None:
            out["rollout_is_mode"] = mode
        return out

    def _fallbacks(self) -> set[str]:
        """The bounds of weights that are those of rejection too, where it is new and has none of its own."""
        if not self._use_rs or self._base["rollout_rs"] is not None:
            return set()
        pairs = zip(_RS_BOUNDS, _TIS_BOUNDS, strict=True)
        return {tis for rs, tis in pairs if self._values.get(rs) is None}

    def _rejection(self) -> dict[str, Any]:
        asked, criterion = given(self._values, ("rs_level", *_RS_BOUNDS)), self._base["rollout_rs"]
        if self._use_rs is False:
            self._refuse(dialects.idle_veto(self._values), "with use_rs: false", "leave it out")
            has_veto = self._base[_VETO] is not None and _VETO not in self._values
            return dict.fromkeys((*_CRITERION, _VETO) if has_veto else _CRITERION)
        if criterion is None and not self._use_rs:
            self._refuse(asked, "without a criterion", "add use_rs: true")
            return {}
        if not asked and criterion is not None:
            return {}
        new = LEGACY_RS[asked["rs_level"]] if "rs_level" in asked else criterion
        if criterion is None or (new != criterion and (given(asked, _RS_BOUNDS) or not _is_k1(criterion))):
            return dialects.slime_rejection(self._values, self._base["rollout_is_threshold"] or dialects.DEFAULT_UPPER)
        if new == criterion and not _is_k1(criterion):
            self._refuse(asked, f"with {criterion}", "bound that by rollout_rs_threshold, or add rs_level")
        lower, upper = (bound(self._values, key) for key in _RS_BOUNDS)
        below, above = split_band(self._base[_UPPER], _UPPER)
        return {
            "rollout_rs": new,
            _UPPER: self._band(lower, below, above if upper is None else upper, _RS_BOUNDS),
        }

    def _band(self, lower: Any, below: Any, upper: Any, keys: tuple[str, str]) -> str:
        """A band with the lower bound that is given, or else the preset's."""
        if lower is None and below is not None and not (isinstance(upper, str) and "_" in upper):
            return _half_of_preset(below, upper, self._preset, keys[1], keys[0])
        return band(lower, upper, *keys)

    def _refuse(self, wrong: Values, where: str, remedy: str) -> None:
        _refuse(wrong, self._preset, where, remedy)
