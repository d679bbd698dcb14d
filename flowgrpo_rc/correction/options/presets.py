"""Named configurations: verl 0.9.1's factory methods, and the names of its first release and of the papers.

A preset combines importance weights, a rejection criterion, and a mode: decoupled (pi_old is recomputed) or bypass
(pi_old is pi_rollout) with its loss. Each line of ``Presets`` has a description, the function from thresholds to
settings, and the fixed settings. ``from_dict({"preset": NAME, ...})`` selects one from YAML.
"""

import inspect
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

from flowgrpo_rc.correction.options.dialects import band
from flowgrpo_rc.correction.plan import is_band

P = ParamSpec("P")
T = TypeVar("T")
Number = int | float
Band = str | int | float
Settings = dict[str, Any]
_GEO_BAND = "0.999_1.001"
_GEO_LOWER = 0.999
_LEGACY_VETO = 1e-4
_TOKEN: Settings = {"rollout_is": "token"}
_ROW: Settings = {"rollout_is": "sequence"}
_BYPASS: Settings = {"bypass_mode": True}
_REINFORCE: Settings = {"bypass_mode": True, "loss_type": "reinforce"}


class Preset(Generic[P]):
    """A class's attribute that is called as a classmethod: ``Config.geo_rs(1.01)`` makes one configuration."""

    def __init__(self, text: str, settings: Callable[P, Settings], fixed: Settings | None = None) -> None:
        """``text`` describes it, ``settings`` maps thresholds to settings, ``fixed`` are the other settings."""
        self.__doc__ = text
        self._settings = settings
        self._fixed = fixed or {}

    def __set_name__(self, owner: type, name: str) -> None:
        # The first name stays: an alias does not rename a preset.
        self.name = getattr(self, "name", name)

    def __get__(self, instance: object, owner: type[T]) -> Callable[P, T]:
        def make(*args: P.args, **kwargs: P.kwargs) -> T:
            return owner(**self._settings(*args, **kwargs), **self._fixed)

        # Shown by ``help()``.
        make.__name__ = self.name
        make.__doc__ = self.__doc__
        # The signature of the settings, since help() and editors show that of a wrapper otherwise.
        signature = inspect.signature(self._settings).replace(return_annotation=owner)
        make.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]
        return make


def _weights(threshold: Number = 2.0) -> Settings:
    return {"rollout_is_threshold": threshold}


def _icepop(threshold: float = 5.0, threshold_lower: float = 0.5) -> Settings:
    return _TOKEN | {"rollout_is_threshold": f"{threshold_lower}_{threshold}"}


def _row_ratio(is_threshold: Number = 2.0, rs_threshold: Band = "0.5_2.0") -> Settings:
    return {**_ROW, **_weights(is_threshold), "rollout_rs": "seq_sum_k1", "rollout_rs_threshold": rs_threshold}


def _geo(rs_threshold: Band = _GEO_BAND) -> Settings:
    return {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": rs_threshold}


def _geo_weights(is_threshold: Number = 2.0, rs_threshold: Band = _GEO_BAND) -> Settings:
    return _weights(is_threshold) | _geo(rs_threshold)


def _k3(rs_threshold: float = 0.01) -> Settings:
    return {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": rs_threshold}


def _k3_weights(is_threshold: Number = 2.0, rs_threshold: float = 0.01) -> Settings:
    return _weights(is_threshold) | _k3(rs_threshold)


# verl's first release passes the two bounds separately, the upper one first. A whole band may stand in its place; the
# lower bound of a lone upper one is its reciprocal.


def _joined(upper: Band, lower: Number | None) -> Band:
    if lower is None:
        return upper
    return band({"rs_threshold_lower": lower, "rs_threshold": upper}, "rs_threshold_lower", "rs_threshold")


def _row_ratio_legacy(
    is_threshold: Number = 2.0, rs_threshold: Band = "0.5_2.0", rs_threshold_lower: Number | None = None
) -> Settings:
    return _row_ratio(is_threshold, _joined(rs_threshold, rs_threshold_lower))


def _row_ratio_one_bound(threshold: Number = 2.0) -> Settings:
    # A lower bound of 0: small products are weighted down, not rejected.
    return _row_ratio(threshold, f"0_{threshold}")


def _geo_legacy(
    rs_threshold: Band = _GEO_BAND,
    rs_threshold_lower: Number | None = None,
    veto_threshold: float | None = _LEGACY_VETO,
) -> Settings:
    return {**_geo(_joined(rs_threshold, rs_threshold_lower)), "rollout_token_veto_threshold": veto_threshold}


def _geo_masked(
    rs_threshold: Band = 1.001,
    rs_threshold_lower: Number | None = _GEO_LOWER,
    veto_threshold: float | None = _LEGACY_VETO,
) -> Settings:
    # The default lower bound must not stand beside a whole band.
    has_both = is_band(rs_threshold) and rs_threshold_lower == _GEO_LOWER
    return _geo_legacy(rs_threshold, None if has_both else rs_threshold_lower, veto_threshold)


class Presets:
    """Mixin of ``RolloutCorrectionConfig``: every preset, called as a classmethod with its thresholds."""

    __slots__ = ()

    disabled = Preset("Metrics only: neither weights nor rejection.", lambda: {})

    # Decoupled: three policies, weights and rejection from pi_old / pi_rollout.
    decoupled_token_is = Preset("Per-element truncated weights (TIS).", _weights, _TOKEN)
    decoupled_seq_is = Preset("One truncated weight per row: the product of its ratios.", _weights, _ROW)
    decoupled_token_icepop = Preset("Per-element weights, zero outside the bounds (IcePop); nothing rejected.", _icepop)
    decoupled_seq_is_rs = Preset("Row weights, and rejection of rows whose product of ratios is too far.", _row_ratio)
    decoupled_geo_rs = Preset("Rejection of rows whose geometric-mean ratio leaves the bounds; no weights.", _geo)
    decoupled_geo_rs_seq_tis = Preset("``decoupled_geo_rs`` with row weights.", _geo_weights, _ROW)
    decoupled_geo_rs_token_tis = Preset("``decoupled_geo_rs`` with element weights.", _geo_weights, _TOKEN)
    decoupled_k3_rs = Preset("Rejection of rows whose mean k3 divergence exceeds the threshold; no weights.", _k3)
    decoupled_k3_rs_seq_tis = Preset("``decoupled_k3_rs`` with row weights.", _k3_weights, _ROW)
    decoupled_k3_rs_token_tis = Preset("``decoupled_k3_rs`` with element weights.", _k3_weights, _TOKEN)

    # Bypass: two policies, everything from pi_theta / pi_rollout.
    bypass_ppo_clip = Preset("PPO clipped around pi_rollout; its ratio is the importance weight.", lambda: {}, _BYPASS)
    bypass_ppo_clip_geo_rs = Preset("``bypass_ppo_clip``, rows rejected by the geometric-mean ratio.", _geo, _BYPASS)
    bypass_ppo_clip_k3_rs = Preset("``bypass_ppo_clip``, rows rejected by mean k3.", _k3, _BYPASS)
    bypass_pg_is = Preset("REINFORCE with truncated row weights.", _weights, _ROW | _REINFORCE)
    bypass_pg_token_icepop = Preset("REINFORCE, element weights zero outside the bounds.", _icepop, _REINFORCE)
    bypass_pg_geo_rs = Preset("REINFORCE, rows rejected by the geometric-mean ratio; no weights.", _geo, _REINFORCE)
    bypass_pg_geo_rs_seq_tis = Preset("``bypass_pg_geo_rs`` with row weights.", _geo_weights, _ROW | _REINFORCE)
    bypass_pg_geo_rs_token_tis = Preset("``bypass_pg_geo_rs`` with element weights.", _geo_weights, _TOKEN | _REINFORCE)

    # Names of the first release and of the papers.
    token_is = token_tis = decoupled_token_is
    seq_is = decoupled_seq_is
    pure_is = pg_is = bypass_pg_is
    ppo_is_bypass = Preset("Element weights as diagnostics, PPO clipped around pi_rollout.", _weights, _TOKEN | _BYPASS)
    seq_mis = Preset("``decoupled_seq_is_rs`` with one threshold for both, and no lower bound.", _row_ratio_one_bound)
    seq_is_rs = Preset("``decoupled_seq_is_rs`` with the bounds apart.", _row_ratio_legacy)
    geo_rs = Preset("``decoupled_geo_rs`` with the bounds apart, and a veto on catastrophic elements.", _geo_legacy)
    geo_mis = Preset(
        "``geo_rs`` with a lower bound of 0.999 unless another is given (null: the reciprocal).", _geo_masked
    )
    pg_rs = Preset("``bypass_pg_geo_rs`` with the bounds apart, and a veto.", _geo_legacy, _REINFORCE)


PRESET_NAMES = tuple(sorted(name for name, value in vars(Presets).items() if isinstance(value, Preset)))
