"""Options of a correction, parsed once into plain numbers: a ``CorrectionPlan``. Imports no torch.

Weights, rejection, metrics and ``explain`` read the plan; nothing else parses a threshold. Ratios are train over
rollout, ``r = exp(log_prob - rollout_log_prob)``.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from flowgrpo_rc.checks import choice, show

SAFETY_BOUND = 20.0
"""Every exponent is clamped to [-SAFETY_BOUND, SAFETY_BOUND] before ``exp``."""
# Tables of names stand here, without torch, so that configurations validate against them quickly.
IS_LEVELS = ("token", "sequence", "geometric")
RS_OPTIONS = (
    *("token_k1", "token_k2", "token_k3"),
    *("seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3"),
    *("seq_max_k2", "seq_max_k3"),
)
"""Rejection criteria, as an aggregate and a statistic of ``numerics/rejection.py``."""
AUTO = "auto"
"""A rejection threshold that follows the measured gap (``Criterion.calibrated``)."""
ThresholdSpec = int | float | str | None


@dataclass(frozen=True, slots=True)
class WeightMode:
    """A value of ``rollout_is_mode``."""

    title: str
    """Name of the method, for ``explain``."""
    effect: str
    """Effect at the bounds ``{lower:g}`` and ``{upper:g}``, for ``explain``."""
    bound: Callable[[Any, Any, "ImportanceSampling"], Any]
    """Weights, from ratios, flags of the ratios beyond the bounds, and the bounds. The first two are tensors."""
    one_bound: bool = False
    """There is only an upper bound."""
    lower_may_be_zero: bool = False
    """The lower bound may be 0, for none."""
    rejects: bool = False
    """Elements beyond the bounds leave the mask."""
    outside_metric: str | None = None
    """Metric of the share beyond the bounds."""
    slime_fractions: Mapping[str, str] = field(default_factory=dict)
    """slime's names of the share above ("high") and below ("low") the bounds."""


def _clamped(ratio: Any, _outside: Any, spec: "ImportanceSampling") -> Any:
    return ratio.clamp(spec.lower, spec.upper)


WEIGHT_MODES = {
    "truncate": WeightMode(
        title="truncated importance sampling",
        effect="at most {upper:g}",
        bound=_clamped,
        one_bound=True,
        slime_fractions={"mis_truncate_fraction": "high"},
    ),
    "zero": WeightMode(
        title="IcePop",
        effect="0 outside [{lower:g}, {upper:g}]",
        bound=lambda ratio, outside, _: ratio.masked_fill(outside, 0.0),
        # verl's name.
        outside_metric="rollout_is_oob_ratio",
        slime_fractions={"mis_mask_fraction_low": "low", "mis_mask_fraction_high": "high"},
    ),
    "clip": WeightMode(
        title="clipped importance sampling",
        effect="clipped into [{lower:g}, {upper:g}]",
        bound=_clamped,
        lower_may_be_zero=True,
        slime_fractions={"mis_clip_fraction_low": "low", "mis_clip_fraction_high": "high"},
    ),
    "mask": WeightMode(
        title="masked importance sampling",
        effect="unbounded, with everything outside [{lower:g}, {upper:g}] rejected",
        bound=lambda ratio, *_: ratio,
        lower_may_be_zero=True,
        rejects=True,
        outside_metric="rollout_is_masked_fraction",
        slime_fractions={"mis_mask_fraction_low": "low", "mis_mask_fraction_high": "high"},
    ),
}


@dataclass(frozen=True, slots=True)
class ImportanceSampling:
    """Importance weights: level, mode, and the bounds on the train/rollout ratio."""

    level: str
    """One of ``IS_LEVELS``."""
    mode: str
    """One of ``WEIGHT_MODES``."""
    lower: float
    """0 leaves small weights alone."""
    upper: float
    batch_normalize: bool = False

    @property
    def rejects(self) -> bool:
        """Elements beyond the bounds leave the mask."""
        return WEIGHT_MODES[self.mode].rejects

    @property
    def reported_lower(self) -> float:
        """The bound of ``..._fraction_low``: ``lower``, but as in verl ``1 / upper`` for truncated weights."""
        return 1.0 / self.upper if WEIGHT_MODES[self.mode].one_bound else self.lower

    @property
    def log_bounds(self) -> tuple[float, float]:
        """The log ratios below and above which ``..._fraction_low`` and ``..._fraction_high`` count."""
        return _log(self.reported_lower), math.log(self.upper)


@dataclass(frozen=True, slots=True)
class Criterion:
    """One rejection criterion. k1 keeps ``lower <= aggregate of l <= upper``; k2 and k3 keep ``statistic <= upper``."""

    name: str
    aggregate: str
    """``token``, ``seq_sum``, ``seq_mean`` or ``seq_max``."""
    statistic: str
    """``k1``, ``k2`` or ``k3``."""
    upper: float
    """k1: log of the ratio's upper bound. k2, k3: upper bound of the statistic."""
    lower: float = -math.inf
    """k1: log of the ratio's lower bound. Unused otherwise."""
    mirrored: bool = False
    """Report the k1 fractions in verl's direction (high = small ratio); only the verl drop-in sets this."""
    calibrated: bool = False
    """The bounds come with every batch (``rollout_rs_threshold=auto``); ``upper`` and ``lower`` are infinite here."""


@dataclass(frozen=True, slots=True)
class CorrectionPlan:
    """Everything that one call computes, without tensors, and valid by construction (see ``make_plan``)."""

    importance: ImportanceSampling | None = None
    criteria: tuple[Criterion, ...] = ()
    log_veto: float | None = None
    counts_empty_rows: bool = False
    """Rows without a valid element enter averages over rows as zeros, as in verl; only the verl drop-in sets this."""

    @property
    def can_reject(self) -> bool:
        """Some option may remove elements from the mask."""
        weights_reject = self.importance is not None and self.importance.rejects
        return bool(self.criteria) or self.log_veto is not None or weights_reject

    def couples_elements(self, *, uses_weights: bool = True) -> bool:
        """An element's fate depends on others: of its row, or with batch normalisation of the batch.

        Args:
            uses_weights: the loss reads the weights; otherwise they count only where they reject.
        """
        importance = self.importance
        if importance is not None and not (uses_weights or importance.rejects):
            importance = None
        # Callers may then have to see whole windows, or the whole batch, before they learn from a part.
        if importance is not None and (importance.level != "token" or importance.batch_normalize):
            return True
        return self.log_veto is not None or any(c.aggregate != "token" for c in self.criteria)

    @property
    def calibrated(self) -> bool:
        """A criterion needs a bound of every row."""
        return any(c.calibrated for c in self.criteria)


def make_plan(
    rollout_is: str | None = None,
    rollout_is_threshold: ThresholdSpec = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_is_mode: str | None = None,
    rollout_rs: str | None = None,
    rollout_rs_threshold: ThresholdSpec = None,
    rollout_token_veto_threshold: ThresholdSpec = None,
) -> CorrectionPlan:
    """Parses and validates the options of one call.

    Thresholds are checked without weights or a criterion too: a typo must not wait until these are switched on.

    Raises:
        TypeError: a bool or another type where a number or string belongs.
        ValueError: an unknown option, or a bound that is NaN, not positive, or out of order.
    """
    choice("rollout_is", rollout_is, (None, *IS_LEVELS))
    choice("rollout_is_mode", rollout_is_mode, (None, *WEIGHT_MODES))
    importance = None
    if rollout_is_threshold is not None:
        bounds = _is_bounds(rollout_is_threshold, rollout_is_mode)
        if rollout_is is not None:
            importance = ImportanceSampling(rollout_is, *bounds, bool(rollout_is_batch_normalize))
    elif rollout_is is not None:
        raise ValueError(
            f"rollout_is_threshold is null with rollout_is={rollout_is!r}; give a number or 'lower_upper', or set "
            "rollout_is=null for no weights."
        )
    log_veto = None
    if rollout_token_veto_threshold is not None:
        log_veto = math.log(parse_number(rollout_token_veto_threshold, "rollout_token_veto_threshold"))
    return CorrectionPlan(importance, _criteria(rollout_rs, rollout_rs_threshold), log_veto)


def _is_bounds(spec: ThresholdSpec, mode: str | None) -> tuple[str, float, float]:
    """``(mode, lower, upper)`` of an importance-sampling threshold; ``lower`` is 0 for none.

    A number ``u`` alone means ``truncate``, and ``"lower_upper"`` means ``zero`` (IcePop). An explicit ``mode`` with
    two bounds reads a lone ``u`` as ``1/u_u``. A lower bound of 0 needs ``clip`` or ``mask``.
    """
    name = "rollout_is_threshold"
    # verl has no mode: the form of its threshold decides.
    if mode is None:
        mode = "zero" if is_band(spec) else "truncate"
    if not WEIGHT_MODES[mode].one_bound:
        return mode, *_bounds(spec, name, zero_allowed=WEIGHT_MODES[mode].lower_may_be_zero)
    if is_band(spec):
        raise ValueError(f"{name}={spec!r}: truncation has one bound, the upper; give a single number.")
    return mode, 0.0, parse_number(spec, name, _BAND_FORM)


def _criteria(rollout_rs: str | None, spec: ThresholdSpec) -> tuple[Criterion, ...]:
    """The criteria of a comma-separated ``rollout_rs``, in order, without repetitions. ``spec`` has one entry for all
    of them or one for each, comma-separated."""
    entries = [e.strip() for e in spec.split(",") if e.strip()] if isinstance(spec, str) else [spec]
    if rollout_rs is None:
        for entry in entries or [spec]:
            if is_band(entry):
                _bounds(entry, "rollout_rs_threshold", zero_allowed=True)
            elif entry not in (None, AUTO):
                parse_number(entry, "rollout_rs_threshold", _BAND_FORM)
        return ()
    if not isinstance(rollout_rs, str):
        raise TypeError(f"rollout_rs must be a string or null, got {show(rollout_rs)}.")
    # A repeated criterion would report its metrics twice under one name.
    options = list(dict.fromkeys(part.strip() for part in rollout_rs.split(",") if part.strip()))
    if not options:
        raise ValueError("rollout_rs is an empty list; use null for no rejection.")
    for option in options:
        choice("rollout_rs", option, RS_OPTIONS)
    named = ",".join(options)
    if spec is None:
        raise ValueError(f"rollout_rs={named!r} needs rollout_rs_threshold.")
    # The batch carries one bound for each row, which cannot serve two criteria.
    if AUTO in entries and (len(entries) > 1 or len(options) > 1 or options[0].startswith("token")):
        raise ValueError(
            f"rollout_rs_threshold={spec!r}: auto stands alone and calibrates one criterion of whole rows, got "
            f"{named!r}; give one of the seq_ criteria in rollout_rs, e.g. seq_mean_k1, or thresholds."
        )
    if len(entries) not in (1, len(options)):
        raise ValueError(
            f"rollout_rs_threshold={show(spec)} has {len(entries)} entries; give one for all or one for each of "
            f"{', '.join(options)}; for k1 {_BAND_FORM}."
        )
    # One threshold serves all criteria, as in verl.
    if len(entries) == 1:
        entries *= len(options)
    return tuple(_criterion(option, entry) for option, entry in zip(options, entries, strict=True))


def _criterion(option: str, entry: ThresholdSpec) -> Criterion:
    aggregate, _, statistic = option.rpartition("_")
    name = f"rollout_rs_threshold for {option}"
    if entry == AUTO:
        return Criterion(option, aggregate, statistic, math.inf, calibrated=True)
    # Held against sums of l, so that the bounds of the ratio become logarithms.
    if statistic == "k1":
        lower, upper = _bounds(entry, name, zero_allowed=True)
        return Criterion(option, aggregate, statistic, math.log(upper), _log(lower))
    return Criterion(option, aggregate, statistic, parse_number(entry, name))


# Numbers and bands as users write them.

_BAND_FORM = "give a number, or 'lower_upper' as in '0.5_2.0'"
_NUMBER_FORM = "give one number"


def plain_threshold(value: object, name: str, form: str = _BAND_FORM) -> ThresholdSpec:
    """``value`` as an int, float or string; numbers of other types, such as numpy's, become floats.

    Raises:
        TypeError: a bool, a list, or anything else that is neither a number nor a string; ``form`` is the remedy.
    """
    if value is None or type(value) in (int, float, str):
        return value  # pyright: ignore[reportReturnType]
    if isinstance(value, bool) or not isinstance(value, (Real, str)):
        kind = ", not a boolean" if isinstance(value, bool) else ""  # verl's words
        raise TypeError(f"{name} must be a number or a numeric string{kind}, got {show(value)}; {form}.")
    return value if isinstance(value, str) else float(value)


def is_band(value: object) -> bool:
    """A threshold is written as two bounds."""
    return isinstance(value, str) and "_" in value


def split_band(spec: str, name: str) -> tuple[str, str]:
    """``(lower, upper)`` as written in ``"lower_upper"``; ``ValueError`` unless there are two parts."""
    # Python reads "1_2" as 12, so that a third part would pass unnoticed.
    parts = [part.strip() for part in spec.split("_")]
    if len(parts) != 2:
        raise ValueError(f"{name}: {show(spec)} has {len(parts)} parts; {_BAND_FORM}.")
    return parts[0], parts[1]


def parse_number(value: object, name: str, form: str = _NUMBER_FORM, *, zero_allowed: bool = False) -> float:
    """A positive, finite-or-infinite float from a number or numeric string.

    Raises:
        TypeError: a bool, or neither a number nor a string; ``form`` is the remedy, also of what is no number.
        ValueError: not a number, NaN, negative, or zero where that is not allowed.
    """
    value = plain_threshold(value, name, form)
    # float() would read the _ as a separator of digits.
    if is_band(value):
        raise ValueError(f"{name}: {show(value)} is a band; {_NUMBER_FORM}.")
    try:
        number = float(value)  # pyright: ignore[reportArgumentType]
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"{name}: {show(value)} is not a number; {form}.") from error
    # NaN would compare as False everywhere, and keep or reject everything in silence.
    if math.isnan(number):
        raise ValueError(f"{name} must not be NaN.")
    if number < 0 or (number == 0 and not zero_allowed):
        raise ValueError(f"{name} must be positive, got {show(value)}.")
    return number


def _bounds(spec: ThresholdSpec, name: str, *, zero_allowed: bool) -> tuple[float, float]:
    """The bounds of a ratio; the lower one of a lone number is its reciprocal, and may be 0 if ``zero_allowed``."""
    if isinstance(spec, str) and is_band(spec):
        below, above = split_band(spec, name)
        upper = parse_number(above, name, _BAND_FORM)
        lower = parse_number(below, f"{name} (lower bound)", _BAND_FORM, zero_allowed=zero_allowed)
    else:
        upper = parse_number(spec, name, _BAND_FORM)
        # A lone number is symmetric in the log ratio.
        lower = 1.0 / upper
    if lower > upper:
        raise ValueError(f"{name}={show(spec)}: the lower bound {lower:g} exceeds the upper {upper:g}; {_BAND_FORM}.")
    return lower, upper


def _log(bound: float) -> float:
    return math.log(bound) if bound > 0.0 else -math.inf
