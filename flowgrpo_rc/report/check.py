"""One check: what it measures, the limits that it holds the value against, and what to do beyond them."""

from collections.abc import Callable
from dataclasses import dataclass

from flowgrpo_rc.report.finding import PROBLEM, WATCH, Finding, HealthyRange, number
from flowgrpo_rc.report.history import History, Series


@dataclass(frozen=True)
class Measurement:
    """A value with where it comes from."""

    value: float
    metric: str
    steps: tuple[int, int]
    says: str | None = None
    """What was measured, in words; None: the metric, its value and the steps."""
    advice: str | None = None
    """In place of the check's own."""


Measure = Callable[[History], Measurement | None]
"""None where the rows hold nothing to measure."""

WEIGHTS_ONLY_DIAGNOSE = (
    "Weights only diagnose in bypass mode with PPO: see to the findings on the gap, or set rollout_is=null."
)
"""In place of a check's own advice, which would change what no update sees."""
AS_SDE = HealthyRange()
"""Stands for the limits of SDE steps."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """A named check. Limits of None leave it out on that kind of log-prob."""

    name: str
    title: str
    measure: Measure
    sde: HealthyRange | None
    """For SDE steps, whose log-probs are means over latent dimensions."""
    tokens: HealthyRange | None = AS_SDE
    """For tokens."""
    reason: str
    """Why the limits are where they are."""
    limits: str = ""
    """The limits in words, where their numbers are only a code."""
    of_densities: bool = False
    """Whether the limits take a log ratio for one of densities: that of ``cps`` leaves out ``1/(2 std^2)``."""
    advice: str | Callable[[History], str]
    """What to do, or what tells it for the run as it is set up."""
    of_weights: bool = False
    """Whether it judges importance weights. Where they only diagnose, no value of theirs is a problem by itself."""

    def __post_init__(self) -> None:
        if self.tokens is AS_SDE:
            object.__setattr__(self, "tokens", self.sde)

    def limits_for(self, history: History) -> HealthyRange | None:
        """Those of the run's kind of log-prob."""
        return self.sde if history.sde else self.tokens

    def advice_for(self, history: History) -> str:
        """The advice that suits the run."""
        return self.advice if isinstance(self.advice, str) else self.advice(history)

    def run(self, history: History) -> Finding | None:
        """The finding; None where there is nothing to measure."""
        limits = self.limits_for(history)
        if limits is None or (self.of_densities and history.cps):
            return None
        found = self.measure(history)
        if found is None:
            return None
        level, limit = limits.judge(found.value)
        advice = found.advice or self.advice_for(history)
        if self.of_weights and not history.weights_act:
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


def span_words(steps: tuple[int, int]) -> str:
    """``over steps 3-8``, ``at step 8``."""
    return f"at step {steps[0]}" if steps[0] == steps[1] else f"over steps {steps[0]}-{steps[1]}"


def recent_mean(*names: str, away_from: float | None = None) -> Measure:
    """The mean over the window of the first of ``names`` that is logged; its distance from ``away_from``, if given."""

    def measure(history: History) -> Measurement | None:
        series = history.recent(*names)
        if series is None:
            return None
        value = series.mean
        says = f"{series.metric} is {number(value)}"
        if away_from is not None:
            value = abs(value - away_from)
            says += f", {number(value)} away from {away_from:g},"
        return Measurement(value, series.metric, series.span, f"{says} {span_words(series.span)}")

    return measure


def recent_max(*names: str) -> Measure:
    """The largest value in the window."""

    def measure(history: History) -> Measurement | None:
        series = history.recent(*names)
        return None if series is None else Measurement(max(series.values), series.metric, series.span)

    return measure


def against_clip(history: History, series: Series | None, what: str) -> Measurement | None:
    """The mean of ``series`` in half widths of the clip band, where that is centred at the engine; else None.

    ``what`` names the series; ``{metric}`` in it stands for its metric.
    """
    width = history.clip_width
    if series is None or not width or not history.clips_at_the_engine:
        return None
    value = series.mean / width
    measured = f"{what.format(metric=series.metric)} is {number(series.mean)} {span_words(series.span)}"
    says = f"{measured}, {number(value)} times the clip band of {number(width)}"
    return Measurement(value, series.metric, series.span, says)
