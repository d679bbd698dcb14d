"""Thresholds and options, parsed once: from what a user writes to a ``CorrectionPlan`` of plain numbers.

Everything downstream (weights, rejection, metrics, ``explain``) reads the plan; nothing else looks into a
threshold string. Ratios are train over rollout, ``r = exp(log_prob - rollout_log_prob)``, everywhere here.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import lru_cache
from numbers import Real
from typing import Literal

SAFETY_BOUND = 20.0
"""Every exponent is clamped to [-SAFETY_BOUND, SAFETY_BOUND] before ``exp``."""

IS_LEVELS = ("token", "sequence", "geometric")


@dataclass(frozen=True, slots=True)
class WeightMode:
    """What a value of ``rollout_is_mode`` means beside its arithmetic, which is in ``numerics/weights.py``."""

    one_bound: bool = False
    """Whether there is an upper bound alone."""
    lower_may_be_zero: bool = False
    """Whether the lower bound may be 0, for none."""
    rejects: bool = False
    """Whether elements beyond the bounds leave the mask."""
    outside_metric: str | None = None
    """The metric that counts them."""
    slime_fractions: Mapping[str, str] = field(default_factory=dict)
    """slime's names of the share above ("high") and below ("low") the bounds."""


_MASKED = {"mis_mask_fraction_low": "low", "mis_mask_fraction_high": "high"}
WEIGHT_MODES = {
    "truncate": WeightMode(one_bound=True, slime_fractions={"mis_truncate_fraction": "high"}),
    "zero": WeightMode(outside_metric="rollout_is_oob_ratio", slime_fractions=_MASKED),
    "clip": WeightMode(
        lower_may_be_zero=True, slime_fractions={"mis_clip_fraction_low": "low", "mis_clip_fraction_high": "high"}
    ),
    "mask": WeightMode(
        lower_may_be_zero=True,
        rejects=True,
        outside_metric="rollout_is_masked_fraction",
        slime_fractions=_MASKED,
    ),
}
IS_MODES = tuple(WEIGHT_MODES)
RS_OPTIONS = (
    *("token_k1", "token_k2", "token_k3"),
    *("seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3"),
    *("seq_max_k2", "seq_max_k3"),
)

AUTO = "auto"
"""A rejection threshold that follows the measured gap: ``calibrated``."""

ThresholdSpec = int | float | str | None

_BAND_FORM = "give a number, or 'lower_upper' as in '0.5_2.0'"
_NUMBER_FORM = "give one number"
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_TWO_NUMBERS = re.compile(rf"\W*({_NUMBER})(?:\s*[-,;:/~|]\s*|\s+|\s*\.\.+\s*|\s*to\s*)({_NUMBER})\W*", re.ASCII)


@dataclass(frozen=True, slots=True)
class ImportanceSampling:
    """How importance weights are made: level, mode, and the bounds on the train/rollout ratio."""

    level: Literal["token", "sequence", "geometric"]
    mode: str
    """One of ``WEIGHT_MODES``."""
    lower: float
    """0 means that nothing is done to small weights."""
    upper: float
    reported_lower: float
    """The bound that ``..._fraction_low`` counts against: ``lower``, but ``1 / upper`` for truncated weights, as in
    verl. Against 0 nothing counts."""
    batch_normalize: bool = False

    @property
    def rejects(self) -> bool:
        """Whether elements beyond the bounds leave the mask."""
        return WEIGHT_MODES[self.mode].rejects

    @property
    def log_upper(self) -> float:
        """The log ratio above which ``..._fraction_high`` counts."""
        return math.log(self.upper)

    @property
    def log_lower(self) -> float:
        """The log ratio below which ``..._fraction_low`` counts."""
        return math.log(self.reported_lower) if self.reported_lower > 0.0 else -math.inf


@dataclass(frozen=True, slots=True)
class Criterion:
    """One rejection criterion. k1 keeps ``lower <= aggregate of l <= upper``; k2 and k3 keep what is ``<= upper``."""

    name: str
    aggregate: Literal["token", "seq_sum", "seq_mean", "seq_max"]
    statistic: Literal["k1", "k2", "k3"]
    upper: float
    """k1: log of the ratio's upper bound. k2, k3: upper bound of the statistic."""
    lower: float = -math.inf
    """k1: log of the ratio's lower bound. Unused otherwise."""
    mirrored: bool = False
    """Report the k1 fractions in verl's direction (high = small ratio); only the verl drop-in sets this."""
    calibrated: bool = False
    """The bounds come with every batch (``rollout_rs_threshold=auto``); ``upper`` and ``lower`` are infinite here."""

    @property
    def statistic_bounds(self) -> tuple[float, float]:
        """Bounds of the statistic; for k1, which is ``-l``, the negated bounds of ``l``."""
        return (-self.upper, -self.lower) if self.statistic == "k1" else (-math.inf, self.upper)


@dataclass(frozen=True, slots=True)
class CorrectionPlan:
    """What one call computes. Hashable, without tensors, and valid by construction (see ``make_plan``)."""

    importance: ImportanceSampling | None = None
    criteria: tuple[Criterion, ...] = ()
    log_veto: float | None = None

    @property
    def can_reject(self) -> bool:
        """Whether any element can leave the mask."""
        weights_reject = self.importance is not None and self.importance.rejects
        return bool(self.criteria) or self.log_veto is not None or weights_reject

    @property
    def calibrated(self) -> bool:
        """Whether the plan needs bounds of every row to be carried out."""
        return any(c.calibrated for c in self.criteria)


def parse_number(value: object, name: str) -> float:
    """A positive, finite-or-infinite float from a number or numeric string.

    Raises:
        TypeError: a bool, or neither a number nor a string.
        ValueError: not a number, too large for a float, NaN, zero or negative.
    """
    return _positive(value, name, _NUMBER_FORM)


def plain_threshold(value: object, name: str, *, band: bool = True) -> ThresholdSpec:
    """``value`` as a plain int, float or string: numbers of other types (numpy's, ``Decimal``) become floats.

    Args:
        band: whether it may be a band.

    Raises:
        TypeError: a bool, a list, or whatever else is neither a number nor a string; the message has the form to write.
    """
    if value is None or type(value) in (int, float, str):
        return value  # pyright: ignore[reportReturnType]
    _check_type(value, name, _BAND_FORM if band else _NUMBER_FORM)
    return value if isinstance(value, str) else float(value)  # pyright: ignore[reportArgumentType]


def split_band(spec: object, name: str) -> tuple[object | None, object]:
    """``(lower, upper)`` as written in ``"lower_upper"``, ``(None, upper)`` of a lone number.

    Raises:
        ValueError: more than two parts, or null.
    """
    if isinstance(spec, str) and "_" in spec:
        parts = [part.strip() for part in spec.split("_")]
        if len(parts) > 2:
            raise ValueError(f"{name}: {shown(spec)} has {len(parts)} parts; {_BAND_FORM}.")
        if "" in parts:
            raise ValueError(f"{name}: {shown(spec)} lacks a bound; {_BAND_FORM}.")
        return parts[0], parts[1]
    if spec is None:
        raise ValueError(f"{name} is null; {_BAND_FORM}.")
    return None, spec


def shown(value: object) -> str:
    """``repr``, cut where a message would drown in it."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print integers of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= 80 else f"{text[:77]}..."


def parse_is_threshold(
    spec: ThresholdSpec, mode: str | None = None, name: str = "rollout_is_threshold"
) -> tuple[str, float, float]:
    """``(mode, lower, upper)`` of an importance-sampling threshold; ``lower`` is 0 where there is none.

    A number ``u`` alone means ``truncate``, and ``"lower_upper"`` means ``zero`` (IcePop). An explicit ``mode`` of
    ``zero``, ``clip`` or ``mask`` reads a lone ``u`` as ``1/u_u``. A lower bound of 0, for none, needs ``clip`` or
    ``mask``.
    """
    if mode is not None and mode not in IS_MODES:
        raise ValueError(f"rollout_is_mode must be one of {IS_MODES} or null, got {mode!r}.")
    lower_text, upper_text = split_band(spec, name)
    upper = _positive(upper_text, name, _BAND_FORM, spec)
    if lower_text is None:
        if mode is None or WEIGHT_MODES[mode].one_bound:
            return mode or "truncate", 0.0, upper
        _check_order(1.0 / upper, upper, spec, name)
        return mode, 1.0 / upper, upper
    if mode is not None and WEIGHT_MODES[mode].one_bound:
        raise ValueError(f"{name}={spec!r}: truncation has one bound, the upper; give a single number.")
    lower = _lower_bound(lower_text, name, spec, zero_allowed=WEIGHT_MODES[mode or "zero"].lower_may_be_zero)
    _check_order(lower, upper, spec, name)
    return mode or "zero", lower, upper


def parse_rs_options(spec: str | None) -> tuple[str, ...]:
    """The criteria of a comma-separated ``rollout_rs``, in order, without repetitions."""
    if spec is None:
        return ()
    if not isinstance(spec, str):
        raise TypeError(f"rollout_rs must be a comma-separated string or null, got {shown(spec)}.")
    options = tuple(dict.fromkeys(part.strip() for part in spec.split(",") if part.strip()))
    if not options:
        raise ValueError("rollout_rs is an empty list; use null for no rejection.")
    for option in options:
        if option not in RS_OPTIONS:
            raise ValueError(f"Unknown rollout_rs option {option!r}; choose from {', '.join(RS_OPTIONS)}.")
    return options


def parse_criteria(options: tuple[str, ...], spec: ThresholdSpec) -> tuple[Criterion, ...]:
    """One ``Criterion`` per option. ``spec`` has one entry for all of them or one for each, comma-separated."""
    if not options:
        return ()
    if spec is None:
        raise ValueError(f"rollout_rs={','.join(options)!r} needs rollout_rs_threshold.")
    if spec == AUTO:
        return (_calibrated_criterion(options),)
    _check_type(spec, "rollout_rs_threshold", _BAND_FORM)
    entries = [e.strip() for e in spec.split(",") if e.strip()] if isinstance(spec, str) else [spec]
    if AUTO in entries:
        raise ValueError(f"rollout_rs_threshold={spec!r}: auto stands alone, for one criterion; give it, or numbers.")
    if len(entries) not in (1, len(options)):
        near = _near_band(spec) if len(options) == 1 else ""
        raise ValueError(
            f"rollout_rs_threshold={shown(spec)} has {len(entries)} entries; give one for all or one for each of "
            f"{', '.join(options)}; an entry for k1 is a number, or 'lower_upper' as in '0.5_2.0'{near}."
        )
    if len(entries) == 1:
        entries = entries * len(options)
    return tuple(_criterion(option, entry) for option, entry in zip(options, entries, strict=True))


def check_unused_rs_threshold(spec: ThresholdSpec) -> None:
    """A threshold beside no criterion acts on nothing, but must be one: a number or a band, or several with commas.

    Raises:
        TypeError, ValueError: as for a criterion, whichever it may be.
    """
    if spec is None or spec == AUTO:
        return
    name = "rollout_rs_threshold"
    for entry in spec.split(",") if isinstance(spec, str) else [spec]:
        below, above = split_band(entry, name)
        upper = _positive(above, name, _BAND_FORM, spec)
        if below is not None:
            _check_order(_lower_bound(below, name, spec, zero_allowed=True), upper, spec, name)


def mirror_k1(criteria: tuple[Criterion, ...]) -> tuple[Criterion, ...]:
    """The same thresholds read as verl's code reads them: the k1 band applied to ``-l`` instead of ``l``."""
    return tuple(
        replace(c, lower=-c.upper, upper=-c.lower, mirrored=True) if c.statistic == "k1" else c for c in criteria
    )


def make_plan(
    rollout_is: str | None = None,
    rollout_is_threshold: ThresholdSpec = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_is_mode: str | None = None,
    rollout_rs: str | None = None,
    rollout_rs_threshold: ThresholdSpec = None,
    rollout_token_veto_threshold: ThresholdSpec = None,
) -> CorrectionPlan:
    """Parses and validates the options of one call. Cached: a training step parses nothing.

    Raises:
        TypeError: a bool or another type where a number or string belongs.
        ValueError: an unknown option, or a bound that is NaN, not positive, or out of order.
    """
    for name, option in (
        ("rollout_is", rollout_is),
        ("rollout_is_mode", rollout_is_mode),
        ("rollout_rs", rollout_rs),
    ):
        if option is not None and not isinstance(option, str):
            raise TypeError(f"{name} must be a string or null, got {shown(option)}.")
    return _made_plan(
        rollout_is,
        plain_threshold(rollout_is_threshold, "rollout_is_threshold"),
        bool(rollout_is_batch_normalize),
        rollout_is_mode,
        rollout_rs,
        plain_threshold(rollout_rs_threshold, "rollout_rs_threshold"),
        plain_threshold(rollout_token_veto_threshold, "rollout_token_veto_threshold", band=False),
    )


@lru_cache(maxsize=256, typed=True)
def _made_plan(
    rollout_is: str | None,
    rollout_is_threshold: ThresholdSpec,
    rollout_is_batch_normalize: bool,
    rollout_is_mode: str | None,
    rollout_rs: str | None,
    rollout_rs_threshold: ThresholdSpec,
    rollout_token_veto_threshold: ThresholdSpec,
) -> CorrectionPlan:
    importance = None
    if rollout_is is not None:
        if rollout_is not in IS_LEVELS:
            raise ValueError(f"rollout_is must be one of {IS_LEVELS} or null, got {rollout_is!r}.")
        if rollout_is_threshold is None:
            raise ValueError(
                f"rollout_is_threshold is null with rollout_is={rollout_is!r}; give a number or 'lower_upper', or set "
                "rollout_is=null for no weights."
            )
        mode, lower, upper = parse_is_threshold(rollout_is_threshold, rollout_is_mode)
        reported = 1.0 / upper if WEIGHT_MODES[mode].one_bound else lower
        importance = ImportanceSampling(
            rollout_is,  # pyright: ignore[reportArgumentType]
            mode,
            lower,
            upper,
            reported,
            rollout_is_batch_normalize,
        )
    veto = rollout_token_veto_threshold
    log_veto = None if veto is None else math.log(parse_number(veto, "rollout_token_veto_threshold"))
    criteria = parse_criteria(parse_rs_options(rollout_rs), rollout_rs_threshold)
    return CorrectionPlan(importance, criteria, log_veto)


def _calibrated_criterion(options: tuple[str, ...]) -> Criterion:
    first, *others = options
    aggregate, _, statistic = first.rpartition("_")
    if others or aggregate == "token":
        raise ValueError(
            f"rollout_rs_threshold='auto' calibrates one criterion of whole rows, got {','.join(options)!r}; give one "
            "of the seq_ criteria in rollout_rs, e.g. seq_mean_k1, or thresholds."
        )
    return Criterion(first, aggregate, statistic, math.inf, calibrated=True)  # pyright: ignore[reportArgumentType]


def _criterion(option: str, entry: object) -> Criterion:
    aggregate, _, statistic = option.rpartition("_")
    name = f"rollout_rs_threshold for {option}"
    lower_text, upper_text = split_band(entry, name)
    if statistic != "k1":
        if lower_text is not None:
            raise ValueError(f"{name} is one upper bound, got {shown(entry)}; only k1 criteria take 'lower_upper'.")
        upper = _positive(upper_text, name, _NUMBER_FORM)
        return Criterion(option, aggregate, statistic, upper)  # pyright: ignore[reportArgumentType]
    upper = _positive(upper_text, name, _BAND_FORM, entry)
    lower = 1.0 / upper if lower_text is None else _lower_bound(lower_text, name, entry, zero_allowed=True)
    _check_order(lower, upper, entry, name)
    log_lower = math.log(lower) if lower > 0 else -math.inf
    return Criterion(option, aggregate, "k1", math.log(upper), log_lower)  # pyright: ignore[reportArgumentType]


def _check_type(value: object, name: str, form: str) -> None:
    if isinstance(value, bool):
        raise TypeError(f"{name} must be a number or a numeric string, not a boolean, got {value}; {form}.")
    if not isinstance(value, (Real, Decimal, str)):
        near = _near_band(value) if form == _BAND_FORM else ""
        raise TypeError(f"{name} must be a number or a numeric string, got {shown(value)}; {form}{near}.")


def _near_band(value: object) -> str:
    """What the form would be here, where ``value`` is two numbers: '0.5-2.0', '0.5,2.0', [0.5, 2.0]."""
    found = _TWO_NUMBERS.fullmatch(str(value)) if isinstance(value, (str, list, tuple)) else None
    return f" (here '{found[1]}_{found[2]}')" if found else ""


def _positive(value: object, name: str, form: str, spec: object = None) -> float:
    number = _to_float(value, name, form, spec)
    if not number > 0:
        raise ValueError(f"{name} must be positive, got {shown(value)}.")
    return number


def _to_float(value: object, name: str, form: str = _NUMBER_FORM, spec: object = None) -> float:
    """The number that ``value`` is, one part of ``spec``; ``form`` is what a message tells to write."""
    _check_type(value, name, form)
    if isinstance(value, str) and "_" in value:  # float() would take it for a separator of digits
        raise ValueError(f"{name}: {shown(value)} is a band; give one number.")
    written = value if spec is None else spec
    near = _near_band(written) if form == _BAND_FORM else ""
    try:
        if isinstance(value, str) and not value.isascii():  # float() reads the digits of every script
            raise ValueError
        number = float(value)  # pyright: ignore[reportArgumentType]
    except ValueError as error:
        raise ValueError(f"{name}: {shown(written)} is not a number; {form}{near}.") from error
    except OverflowError:
        number = math.inf
    if math.isnan(number):
        raise ValueError(f"{name} must not be NaN.")
    if math.isinf(number) and not (isinstance(value, float) or "inf" in shown(value).lower()):
        raise ValueError(f"{name}: {shown(written)} is larger than any float; {form}.")
    return number


def _lower_bound(text: object, name: str, spec: object, *, zero_allowed: bool) -> float:
    number = _to_float(text, name, _BAND_FORM, spec)
    if number == 0 and zero_allowed:
        return 0.0
    return _positive(text, f"{name} (lower bound)", _BAND_FORM, spec)


def _check_order(lower: float, upper: float, spec: object, name: str) -> None:
    if lower > upper:
        raise ValueError(
            f"{name}={shown(spec)}: the lower bound {lower:g} exceeds the upper bound {upper:g}; a band is "
            "'lower_upper' as in '0.5_2.0'."
        )
