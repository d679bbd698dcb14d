"""A check: a measurement, the limits of its value, and the remedy beyond them.

``docs/report.md`` has the evidence for the limits of each check.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from flowgrpo_rc.report.finding import PROBLEM, WATCH, Finding, HealthyRange, number
from flowgrpo_rc.report.history import History, NothingMeasuredError, Series


@dataclass(frozen=True)
class Measurement:
    """A value with its source."""

    value: float
    metric: str
    steps: tuple[int, int]
    says: str | None = None  # The measurement in words; None: the metric, its value and the steps
    advice: str | None = None  # A remedy that replaces the check's own


# Returns None, or raises ``NothingMeasuredError``, if the rows hold nothing to measure.
Measure = Callable[[History], Measurement | None]

# Replaces a check's own advice, which would change nothing in the updates.
WEIGHTS_ONLY_DIAGNOSE = (
    "Weights only diagnose in bypass mode with PPO: see to the findings on the gap, or set rollout_is=null."
)
# The same limits as for SDE steps.
AS_SDE = HealthyRange()


@dataclass(frozen=True, kw_only=True)
class Check:
    """A named check. It is skipped on a kind of log-prob with limits of None."""

    name: str
    title: str
    measure: Measure
    sde: HealthyRange  # For SDE steps, whose log-probs are means over latent dimensions
    tokens: HealthyRange | None = AS_SDE  # For tokens
    limits: str = ""  # The limits in words, if their numbers are only a code
    of_densities: bool = False  # The limits assume log ratios of densities
    advice: str | Callable[[History], str]  # The remedy, or a function that returns the one for a run
    of_weights: bool = False
    """It judges importance weights. If they only diagnose, none of their values is a problem by itself."""

    def limits_for(self, history: History) -> HealthyRange | None:
        """The limits for the run's kind of log-prob."""
        return self.sde if history.sde or self.tokens is AS_SDE else self.tokens

    def advice_for(self, history: History) -> str:
        """The remedy for the run."""
        return self.advice if isinstance(self.advice, str) else self.advice(history)

    def run(self, history: History) -> Finding | None:
        """The finding; None if there is nothing to measure."""
        limits = self.limits_for(history)
        # Limits in nats per dimension mean nothing for log-probs in another unit.
        if limits is None or (self.of_densities and not history.densities):
            return None
        try:
            found = self.measure(history)
        except NothingMeasuredError:
            found = None
        if found is None:
            return None
        level, limit = limits.judge(found.value)
        advice = found.advice or self.advice_for(history)
        correction = history.mode.rollout_correction
        # In bypass mode with PPO weights enter no loss and reject nothing, so that they cannot spoil a run.
        if self.of_weights and not (correction.weights_act or correction.rollout_is_mode == "mask"):
            level = WATCH if level == PROBLEM else level
            advice = WEIGHTS_ONLY_DIAGNOSE
        return Finding(
            level=level,
            check=self.name,
            title=self.title,
            metric=found.metric,
            value=found.value,
            limit=limit,
            band=self.limits or limits.words(),
            steps=found.steps,
            measured=found.says or f"{found.metric} is {number(found.value)} {span_words(found.steps)}",
            advice=advice,
        )


def checks(
    rows: Iterable[tuple[str, str, Measure]],
    limits: Mapping[str, HealthyRange | tuple[HealthyRange, HealthyRange | None]],
    advice: Mapping[str, str | Callable[[History], str]],
    *,
    of_densities: Collection[str] = (),
    of_weights: bool = False,
) -> list[Check]:
    """Join name, title and measure with limits (of SDE steps, and of tokens if those differ) and advice by name."""
    made = []
    for name, title, measure in rows:
        given = limits[name]
        sde, tokens = given if isinstance(given, tuple) else (given, given)
        own = {"sde": sde, "tokens": tokens, "advice": advice[name], "of_densities": name in of_densities}
        made.append(Check(name=name, title=title, measure=measure, of_weights=of_weights, **own))
    return made


def span_words(steps: tuple[int, int]) -> str:
    """``over steps 3-8``, ``at step 8``."""
    return f"at step {steps[0]}" if steps[0] == steps[1] else f"over steps {steps[0]}-{steps[1]}"


def recent_mean(*names: str, away_from: float | None = None) -> Measure:
    """Recent mean of the first of ``names`` that is logged, or its distance from ``away_from``."""

    def measure(history: History) -> Measurement:
        series = history.require(*names)
        value = series.mean
        says = f"{series.metric} is {number(value)}"
        if away_from is not None:
            value = abs(value - away_from)
            says += f", {number(value)} away from {away_from:g},"
        return Measurement(value, series.metric, series.span, f"{says} {span_words(series.span)}")

    return measure


def recent_max(*names: str) -> Measure:
    """Largest recent value."""

    def measure(history: History) -> Measurement:
        series = history.require(*names)
        return Measurement(max(series.values), series.metric, series.span)

    return measure


def against_clip(history: History, series: Series, what: str) -> Measurement | None:
    """The mean of ``series`` in half widths of a clip band that is centred at the engine, else None. ``what`` names the
    series; ``{metric}`` in it is replaced by its metric."""
    width = history.clip_width
    # Elsewhere the clip is centred at the actor, and the gap does not use it up.
    if not width or not history.clips_at_the_engine:
        return None
    value = series.mean / width
    measured = f"{what.format(metric=series.metric)} is {number(series.mean)} {span_words(series.span)}"
    says = f"{measured}, {number(value)} times the clip band of {number(width)}"
    return Measurement(value, series.metric, series.span, says)
