"""slime's options of importance sampling and rejection (``use_tis``, ``rs_level``, ...), in canonical keys."""

from typing import Any

from flowgrpo_rc.correction.options.legacy import LEVELS, is_k1
from flowgrpo_rc.correction.options.values import (
    BoundKeys,
    Values,
    choice,
    given,
    is_band,
    refuse_unused,
    switch,
)
from flowgrpo_rc.correction.plan import parse_is_threshold, parse_number, plain_threshold, shown, split_band

KEYS = (
    *("use_tis", "tis_mode", "tis_level", "tis_lower_bound", "tis_upper_bound", "tis_batch_normalize"),
    *("use_rs", "rs_level", "rs_lower_bound", "rs_upper_bound", "rs_veto_threshold"),
    *("use_rollout_logprobs", "get_mismatch_metrics", "rs_trust_region", "rs_tr_threshold"),
)
_MODES = ("truncate", "clip", "mask")
_WEIGHT_BOUNDS = BoundKeys("tis_lower_bound", "tis_upper_bound")
_REJECTION_BOUNDS = BoundKeys("rs_lower_bound", "rs_upper_bound")
_VETO = "rs_veto_threshold"
_CANONICAL_VETO = "rollout_token_veto_threshold"
_CRITERION = ("rollout_rs", "rollout_rs_threshold")
DEFAULT_UPPER = 2.0
"""slime's upper bound of weights where none is given; rejection falls back to it."""


def slime_name(key: str) -> str | None:
    """One of ``KEYS`` in its usual spelling: of ``tis-mode`` and ``mis_tis_mode`` both it is ``tis_mode``.

    ``None`` for any other key. slime's documentation of its metrics also leaves out ``tis_`` and ``rs_``.
    """
    name = key.replace("-", "_")
    short = name.removeprefix("mis_")
    candidates = [name]
    if short != name:
        candidates += [short, f"tis_{short}", f"rs_{short}" if short == "veto_threshold" else ""]
    return next((candidate for candidate in candidates if candidate in KEYS), None)


def unused_veto(values: Values) -> dict[str, Any]:
    """slime's veto where ``use_rs`` is false: it is a part of rejection there."""
    return given(values, (_VETO,)) if switch(values, "use_rs") is False else {}


class SlimeKeys:
    """slime's keys, checked; ``changes`` gives the canonical keys that they change, one method for each thing.

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

    def __init__(self, values: Values, base: Values, preset: str | None) -> None:
        self._values = values
        self._base = base
        self._preset = preset
        choice(values, "rs_level", tuple(LEVELS))
        self._normalize = switch(values, "tis_batch_normalize")
        self._level = choice(values, "tis_level", tuple(LEVELS))
        self._mode = choice(values, "tis_mode", _MODES)
        self._use_tis = switch(values, "use_tis")
        self._use_rs = switch(values, "use_rs")
        if preset is None:
            self._use_tis = bool(self._use_tis)
            self._mode = self._mode or "truncate"
            self._normalize = bool(self._normalize) if self._use_tis else None
            self._use_rs = self._use_rs or None

    def changes(self) -> dict[str, Any]:
        changes = self._policies_and_veto()
        if switch(self._values, "get_mismatch_metrics"):
            return {**changes, **dict.fromkeys(("rollout_is", *_CRITERION, _CANONICAL_VETO))}
        changes |= self._weights()
        changes |= self._rejection()
        if self._normalize is not None:
            changes["rollout_is_batch_normalize"] = self._normalize
        return changes

    def _policies_and_veto(self) -> dict[str, Any]:
        region = self._values.get("rs_trust_region")
        if region is not None and region is not False:
            raise ValueError(
                f"rs_trust_region={shown(region)}: slime's trust region is not implemented here; set it to null, and "
                "reject with use_rs, rs_level and its bounds."
            )
        bypass = switch(self._values, "use_rollout_logprobs")
        changes: dict[str, Any] = {} if bypass is None else {"bypass_mode": bypass}
        veto = plain_threshold(self._values.get(_VETO), _VETO, band=False)
        if veto is not None:
            parse_number(veto, _VETO)
        is_asked = veto is not None or (_VETO in self._values and self._preset is not None)
        if is_asked and not unused_veto(self._values):
            changes[_CANONICAL_VETO] = veto
        return changes

    def _weights(self) -> dict[str, Any]:
        if self._use_tis is False:
            return {"rollout_is": None}
        asked = given(self._values, ("tis_level", "tis_mode", _WEIGHT_BOUNDS.lower, _WEIGHT_BOUNDS.upper))
        shared = self._bounds_shared_with_rejection()
        if not self._use_tis and self._base["rollout_is"] is None:
            unused = {key: value for key, value in asked.items() if key not in shared}
            refuse_unused(unused, self._preset, "without weights", "add use_tis: true")
            return {}
        if not self._use_tis and not asked:
            return {}
        changes: dict[str, Any] = {"rollout_is": self._level or self._base["rollout_is"] or "token"}
        lower, upper = _WEIGHT_BOUNDS.read(self._values)
        if self._mode is None and lower is None and upper is None:
            return changes
        threshold = self._base["rollout_is_threshold"]
        mode, _, above = parse_is_threshold(threshold)
        if self._mode is not None:
            mode = changes["rollout_is_mode"] = self._mode
        if mode != "truncate":
            changes["rollout_is_threshold"] = _WEIGHT_BOUNDS.changed_band(threshold, asked, self._preset)
            return changes
        if _WEIGHT_BOUNDS.lower not in shared:
            unused = given(asked, (_WEIGHT_BOUNDS.lower,))
            refuse_unused(unused, self._preset, "with truncated weights", "add tis_mode: clip")
        changes["rollout_is_threshold"] = above if upper is None else upper
        return changes

    def _bounds_shared_with_rejection(self) -> set[str]:
        """The bounds of weights that are those of rejection too, where it is new and has none of its own."""
        if not self._use_rs or self._base["rollout_rs"] is not None:
            return set()
        lower, upper = _REJECTION_BOUNDS.read(self._values)
        shared = {_WEIGHT_BOUNDS.lower} if lower is None else set()
        return shared | ({_WEIGHT_BOUNDS.upper} if upper is None else set())

    def _rejection(self) -> dict[str, Any]:
        criterion = self._base["rollout_rs"]
        bounds = given(self._values, (_REJECTION_BOUNDS.lower, _REJECTION_BOUNDS.upper))
        asked = {**given(self._values, ("rs_level",)), **bounds}
        if self._use_rs is False:
            refuse_unused(unused_veto(self._values), self._preset, "with use_rs: false", "leave it out")
            has_veto = self._base[_CANONICAL_VETO] is not None and _CANONICAL_VETO not in self._values
            return dict.fromkeys((*_CRITERION, _CANONICAL_VETO) if has_veto else _CRITERION)
        if criterion is None and not self._use_rs:
            refuse_unused(asked, self._preset, "without a criterion", "add use_rs: true")
            return {}
        if criterion is None:
            return self._new_rejection()
        if not asked:
            return {}
        new = LEVELS[asked["rs_level"]] if "rs_level" in asked else criterion
        if new != criterion and (bounds or not is_k1(criterion)):
            return self._new_rejection()
        if not is_k1(criterion):
            remedy = "bound that by rollout_rs_threshold, or add rs_level"
            refuse_unused(asked, self._preset, f"with {criterion}", remedy)
        band = _REJECTION_BOUNDS.changed_band(self._base["rollout_rs_threshold"], bounds, self._preset)
        return {"rollout_rs": new, "rollout_rs_threshold": band}

    def _new_rejection(self) -> dict[str, Any]:
        """Criterion and band where there was no rejection: a bound that is not set is that of the weights.

        Where those have no lower bound either, it is the reciprocal of *their* upper bound, whatever ``rs_upper_bound``
        is.
        """
        lower, upper = _REJECTION_BOUNDS.read(self._values)
        weights_lower, weights_upper = _WEIGHT_BOUNDS.read(self._values)
        if weights_upper is None:
            weights_upper = self._base["rollout_is_threshold"] or DEFAULT_UPPER
        lower_key = _REJECTION_BOUNDS.lower
        upper_key = _REJECTION_BOUNDS.upper
        if upper is None:
            upper = weights_upper
            upper_key = _WEIGHT_BOUNDS.upper
        if lower is None and not is_band(upper):
            lower = weights_lower
            lower_key = _WEIGHT_BOUNDS.lower
        if lower is None and not is_band(upper):
            below, above = split_band(weights_upper, _WEIGHT_BOUNDS.upper)
            lower = 1.0 / parse_number(above, _WEIGHT_BOUNDS.upper) if below is None else below
        level = self._values.get("rs_level") or "token"
        return {"rollout_rs": LEVELS[level], "rollout_rs_threshold": BoundKeys(lower_key, upper_key).band(lower, upper)}
