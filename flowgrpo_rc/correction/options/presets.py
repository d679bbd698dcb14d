"""Named configurations: verl 0.9.1's factory methods, and the names the first release and the papers use.

Each preset fixes a mode (decoupled: pi_old is recomputed; bypass: pi_old is pi_rollout), a loss, a weight and a
criterion; its arguments are the thresholds. `from_dict({"preset": NAME, ...})` selects one from YAML.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

from flowgrpo_rc.correction.options.dialects import band

if TYPE_CHECKING:
    from typing_extensions import Self

Band = str | int | float | int
_GEO_BAND = "0.999_1.001"
_GEO_LOWER = 0.999
_LEGACY_VETO = 1e-4


class Presets:
    """Mixin of `RolloutCorrectionConfig`: every preset as a classmethod."""

    __slots__ = ()

    @classmethod
    def _make(cls, **fields: Any) -> "Self":
        return cls(**fields)

    # Decoupled: three policies, weights and rejection from pi_old / pi_rollout.

    @classmethod
    def decoupled_token_is(cls, threshold: int | float = 2.0) -> "Self":
        """Per-element truncated weights (TIS)."""
        return cls._make(rollout_is="token", rollout_is_threshold=threshold)

    @classmethod
    def decoupled_seq_is(cls, threshold: int | float = 2.0) -> "Self":
        """One truncated weight per row: the product of its ratios."""
        return cls._make(rollout_is="sequence", rollout_is_threshold=threshold)

    @classmethod
    def decoupled_token_icepop(cls, threshold: float = 5.0, threshold_lower: float = 0.5) -> "Self":
        """Per-element weights, zero outside the band (IcePop); the mask stays as it is."""
        return cls._make(rollout_is="token", rollout_is_threshold=f"{threshold_lower}_{threshold}")

    @classmethod
    def decoupled_seq_is_rs(cls, is_threshold: int | float = 2.0, rs_threshold: Band = "0.5_2.0") -> "Self":
        """Row weights, and rejection of rows whose product of ratios leaves the band."""
        return cls.decoupled_seq_is(is_threshold)._with(_seq_sum(rs_threshold))

    @classmethod
    def decoupled_geo_rs(cls, rs_threshold: Band = _GEO_BAND) -> "Self":
        """Rejection of rows whose geometric-mean ratio leaves the band; no weights."""
        return cls.disabled()._with(_geo(rs_threshold))

    @classmethod
    def decoupled_geo_rs_seq_tis(cls, is_threshold: int | float = 2.0, rs_threshold: Band = _GEO_BAND) -> "Self":
        """`decoupled_geo_rs` with row weights."""
        return cls.decoupled_seq_is(is_threshold)._with(_geo(rs_threshold))

    @classmethod
    def decoupled_geo_rs_token_tis(cls, is_threshold: int | float = 2.0, rs_threshold: Band = _GEO_BAND) -> "Self":
        """`decoupled_geo_rs` with element weights."""
        return cls.decoupled_token_is(is_threshold)._with(_geo(rs_threshold))

    @classmethod
    def decoupled_k3_rs(cls, rs_threshold: float = 0.01) -> "Self":
        """Rejection of rows whose mean k3 divergence exceeds the threshold; no weights."""
        return cls.disabled()._with(_k3(rs_threshold))

    @classmethod
    def decoupled_k3_rs_seq_tis(cls, is_threshold: int | float = 2.0, rs_threshold: float = 0.01) -> "Self":
        """`decoupled_k3_rs` with row weights."""
        return cls.decoupled_seq_is(is_threshold)._with(_k3(rs_threshold))

    @classmethod
    def decoupled_k3_rs_token_tis(cls, is_threshold: int | float = 2.0, rs_threshold: float = 0.01) -> "Self":
        """`decoupled_k3_rs` with element weights."""
        return cls.decoupled_token_is(is_threshold)._with(_k3(rs_threshold))

    # Bypass: two policies, everything from pi_theta / pi_rollout.

    @classmethod
    def bypass_ppo_clip(cls) -> "Self":
        """PPO clipped around the rollout policy; its ratio is the importance weight."""
        return cls.disabled()._with({"bypass_mode": True})

    @classmethod
    def bypass_ppo_clip_geo_rs(cls, rs_threshold: Band = _GEO_BAND) -> "Self":
        """`bypass_ppo_clip` with rejection by the geometric-mean ratio."""
        return cls.bypass_ppo_clip()._with(_geo(rs_threshold))

    @classmethod
    def bypass_ppo_clip_k3_rs(cls, rs_threshold: float = 0.01) -> "Self":
        """`bypass_ppo_clip` with rejection by mean k3."""
        return cls.bypass_ppo_clip()._with(_k3(rs_threshold))

    @classmethod
    def bypass_pg_is(cls, threshold: int | float = 2.0) -> "Self":
        """REINFORCE with truncated row weights."""
        return cls.decoupled_seq_is(threshold)._with(_REINFORCE)

    @classmethod
    def bypass_pg_token_icepop(cls, threshold: float = 5.0, threshold_lower: float = 0.5) -> "Self":
        """REINFORCE with element weights that are zero outside the band."""
        return cls.decoupled_token_icepop(threshold, threshold_lower)._with(_REINFORCE)

    @classmethod
    def bypass_pg_geo_rs(cls, rs_threshold: Band = _GEO_BAND) -> "Self":
        """REINFORCE without weights, rows rejected by the geometric-mean ratio."""
        return cls.decoupled_geo_rs(rs_threshold)._with(_REINFORCE)

    @classmethod
    def bypass_pg_geo_rs_seq_tis(cls, is_threshold: int | float = 2.0, rs_threshold: Band = _GEO_BAND) -> "Self":
        """`bypass_pg_geo_rs` with row weights."""
        return cls.decoupled_geo_rs_seq_tis(is_threshold, rs_threshold)._with(_REINFORCE)

    @classmethod
    def bypass_pg_geo_rs_token_tis(cls, is_threshold: int | float = 2.0, rs_threshold: Band = _GEO_BAND) -> "Self":
        """`bypass_pg_geo_rs` with element weights."""
        return cls.decoupled_geo_rs_token_tis(is_threshold, rs_threshold)._with(_REINFORCE)

    @classmethod
    def disabled(cls) -> "Self":
        """Metrics only: neither weights nor rejection."""
        return cls._make(rollout_is=None)

    # Names of the first release and of the papers.

    @classmethod
    def token_is(cls, threshold: int | float = 2.0) -> "Self":
        """Alias of `decoupled_token_is`."""
        return cls.decoupled_token_is(threshold)

    @classmethod
    def token_tis(cls, threshold: int | float = 2.0) -> "Self":
        """Alias of `decoupled_token_is`."""
        return cls.decoupled_token_is(threshold)

    @classmethod
    def seq_is(cls, threshold: int | float = 2.0) -> "Self":
        """Alias of `decoupled_seq_is`."""
        return cls.decoupled_seq_is(threshold)

    # Those with rejection take its upper and its lower bound apart, in this order, as the first release's did; without
    # a lower bound it is the reciprocal of the upper one. Instead of the upper bound a whole band may stand.

    @classmethod
    def seq_is_rs(
        cls,
        is_threshold: int | float = 2.0,
        rs_threshold: Band = "0.5_2.0",
        rs_threshold_lower: int | float | None = None,
    ) -> "Self":
        """The first release's `seq_is_rs`: `decoupled_seq_is_rs` with the bounds apart."""
        return cls.decoupled_seq_is_rs(is_threshold, _joined(rs_threshold, rs_threshold_lower))

    @classmethod
    def seq_mis(cls, threshold: int | float = 2.0) -> "Self":
        """`decoupled_seq_is_rs` with one threshold for both, and no lower bound."""
        return cls.decoupled_seq_is_rs(threshold, f"0_{threshold}")

    @classmethod
    def geo_rs(
        cls,
        rs_threshold: Band = _GEO_BAND,
        rs_threshold_lower: int | float | None = None,
        veto_threshold: float | None = _LEGACY_VETO,
    ) -> "Self":
        """The first release's `geo_rs`: `decoupled_geo_rs` and a veto on catastrophic elements."""
        bounds = _joined(rs_threshold, rs_threshold_lower)
        return cls.decoupled_geo_rs(bounds)._with({"rollout_token_veto_threshold": veto_threshold})

    @classmethod
    def geo_mis(
        cls,
        rs_threshold: Band = 1.001,
        rs_threshold_lower: int | float | None = _GEO_LOWER,
        veto_threshold: float | None = _LEGACY_VETO,
    ) -> "Self":
        """`geo_rs` with a lower bound of 0.999 unless another is given, or null for the reciprocal."""
        if isinstance(rs_threshold, str) and "_" in rs_threshold and rs_threshold_lower == _GEO_LOWER:
            rs_threshold_lower = None
        return cls.geo_rs(rs_threshold, rs_threshold_lower, veto_threshold)

    @classmethod
    def ppo_is_bypass(cls, threshold: int | float = 2.0) -> "Self":
        """The first release's bypass preset: element weights as diagnostics, PPO clipped around pi_rollout."""
        return cls.decoupled_token_is(threshold)._with({"bypass_mode": True})

    @classmethod
    def pure_is(cls, threshold: int | float = 2.0) -> "Self":
        """Alias of `bypass_pg_is`."""
        return cls.bypass_pg_is(threshold)

    @classmethod
    def pg_is(cls, threshold: int | float = 2.0) -> "Self":
        """Alias of `bypass_pg_is`."""
        return cls.bypass_pg_is(threshold)

    @classmethod
    def pg_rs(
        cls,
        rs_threshold: Band = _GEO_BAND,
        rs_threshold_lower: int | float | None = None,
        veto_threshold: float | None = _LEGACY_VETO,
    ) -> "Self":
        """The transitional release's `pg_rs`: `bypass_pg_geo_rs` and a veto on catastrophic elements."""
        bounds = _joined(rs_threshold, rs_threshold_lower)
        return cls.bypass_pg_geo_rs(bounds)._with({"rollout_token_veto_threshold": veto_threshold})

    def _with(self, changes: dict[str, Any]) -> "Self":
        return dataclasses.replace(self, **changes)  # pyright: ignore[reportArgumentType]


_REINFORCE = {"bypass_mode": True, "loss_type": "reinforce"}

PRESET_NAMES = tuple(sorted(n for n, v in vars(Presets).items() if isinstance(v, classmethod) and n[0] != "_"))


def _joined(upper: Band, lower: int | float | None) -> Band:
    """A band from its two bounds; `upper` alone may be a band already."""
    return upper if lower is None else band(lower, upper, "rs_threshold_lower", "rs_threshold")


def _seq_sum(threshold: Band) -> dict[str, Any]:
    return {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": threshold}


def _geo(threshold: Band) -> dict[str, Any]:
    return {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": threshold}


def _k3(threshold: float) -> dict[str, Any]:
    return {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": threshold}
