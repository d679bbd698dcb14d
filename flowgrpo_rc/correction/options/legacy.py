"""Keys of verl's first release and of its transitional one ("legacy verl"), in canonical keys.

``rollout_rs`` named the level alone (``token``), and its bounds stood in two keys. Switches chose the mode.
"""

from typing import Any

from flowgrpo_rc.checks import show
from flowgrpo_rc.correction.options.values import BoundKeys, Values, bound, given, refuse_unused, switch

LEVELS = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
"""Levels of rejection in verl's first release and in slime, and the criteria that they are today."""
_PURE = ("use_pure_rollout_correction", "use_policy_gradient")
_BOUNDS = BoundKeys("rollout_rs_threshold_lower", "rollout_rs_threshold")
KEYS = ("bypass_old_logprob_for_rollout", *_PURE, _BOUNDS.lower)
"""Keys that are legacy verl's alone; ``rollout_rs`` and its threshold kept their names and changed their form."""
SETS = ("bypass_mode", "loss_type")
"""Canonical keys that the switches set."""


def is_legacy_level(value: object) -> bool:
    """Whether ``rollout_rs`` has this value in legacy verl alone."""
    return isinstance(value, str) and value in LEVELS


def is_k1(criterion: str | None) -> bool:
    """Whether a criterion bounds the ratio on both sides."""
    return criterion is not None and criterion.endswith("k1")


def mode_changes(values: Values, base: Values) -> dict[str, Any]:
    """What ``bypass_old_logprob_for_rollout`` and the two names of "pure" correction change of ``base``.

    Raises:
        TypeError: a switch that is no boolean.
        ValueError: switches that contradict each other, or canonical keys.
    """
    bypass = switch(values, "bypass_old_logprob_for_rollout")
    changes: dict[str, Any] = {} if bypass is None else {"bypass_mode": bypass}
    bypass = changes.get("bypass_mode", values.get("bypass_mode"))
    pure = {key: on for key in _PURE if (on := switch(values, key)) is not None}
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
            changes.update(bypass_mode=True, loss_type="reinforce")
        elif loss is None and base["loss_type"] == "reinforce":
            changes["loss_type"] = "ppo_clip"
    return changes


def rejection_changes(values: Values, base: Values, preset: str | None) -> dict[str, Any]:
    """What ``rollout_rs`` and its bounds, in their canonical or legacy forms, change of ``base``.

    Another criterion than the preset's takes the bounds that are given, or else the preset's if they are of a ratio.

    Raises:
        TypeError: a bound of the wrong type.
        ValueError: bounds out of order, or a key that cannot act beside this preset.
    """
    criterion = base["rollout_rs"]
    written = values.get("rollout_rs", criterion)
    is_legacy = is_legacy_level(written)
    asked = LEVELS[written] if is_legacy else written
    lower = bound(values, _BOUNDS.lower)
    lower_given = given(values, (_BOUNDS.lower,))
    if asked is None and "rollout_rs" not in values:
        refuse_unused(lower_given, preset, "without a criterion", "add rollout_rs")
        return {}
    if asked is None:
        refuse_unused(lower_given, preset, "with rollout_rs=null", "leave it out")
        return {_BOUNDS.upper: values.get(_BOUNDS.upper)}
    if asked != criterion and not is_legacy:
        if lower is not None:
            raise ValueError(
                "rollout_rs_threshold_lower belongs to legacy rollout_rs (token, sequence, geometric); "
                f"with rollout_rs={asked!r} write the band as rollout_rs_threshold='lower_upper'."
            )
        return {}
    if asked == criterion and not is_k1(criterion):
        refuse_unused(lower_given, preset, f"with {criterion}", "bound that by rollout_rs_threshold alone")
        return {}
    if asked == criterion and not values.keys() & _BOUNDS:
        return {"rollout_rs": criterion}
    if asked == criterion or (is_k1(criterion) and _BOUNDS.upper not in values):
        return {"rollout_rs": asked, _BOUNDS.upper: _whole_or_changed_band(values, base, preset)}
    upper = bound(values, _BOUNDS.upper)
    if upper is None:
        upper = values.get("rollout_is_threshold", base["rollout_is_threshold"])
    if upper is None:
        raise ValueError(
            f"rollout_rs_threshold is null with rollout_rs={written!r}, and so is rollout_is_threshold, which would "
            "stand in for it; give rollout_rs_threshold a number or 'lower_upper'."
        )
    return {"rollout_rs": asked, _BOUNDS.upper: _BOUNDS.band(lower, upper)}


def _whole_or_changed_band(values: Values, base: Values, preset: str | None) -> Any:
    """``rollout_rs_threshold`` beside a preset's: as it is where it is whole, else as the upper half."""
    written = values.get(_BOUNDS.upper)
    is_whole = isinstance(written, str) and any(mark in written for mark in ("_", ",", "auto"))
    if not is_whole and (written is not None or _BOUNDS.upper not in values):
        return _BOUNDS.changed_band(base[_BOUNDS.upper], values, preset)
    if values.get(_BOUNDS.lower) is not None:
        raise ValueError(
            f"{_BOUNDS.lower}={show(values[_BOUNDS.lower])} beside {_BOUNDS.upper}={show(written)}; give both "
            "halves, or the whole band there."
        )
    return written
