"""Checks for reward hacking: the reward climbs, and images or scorers that had no part in training get worse."""

import math
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean

from flowgrpo_rc.report.check import Check, Measurement, checks
from flowgrpo_rc.report.checks_learning import SIGNIFICANT, reward_unit, scatter
from flowgrpo_rc.report.finding import HealthyRange, number
from flowgrpo_rc.report.history import REWARD, WINDOW, History, Series
from flowgrpo_rc.rewards.registry import STATISTICS

# Training steps whose mean is the start. Fast learners have moved far after as many more.
START = 8
# Standard errors that the largest change of eight must exceed.
SIGNIFICANT_OF_MANY = 4.0
# Least and largest scatter of one evaluation of an observer, in standard deviations of its scores. Means of 50 images
# scatter by .14; a sudden fall is no scatter.
EVALUATION = (0.05, 0.15)
# Evaluations that are averaged at the start and at the end.
FEW = 2
# Weight of a reward that only looks on, relative to the largest weight or to 1.
NEGLIGIBLE = 0.01


def _ratio(value: float) -> float:
    # A hundredth of white is next to nothing; no ratio of two values below it counts.
    return math.log(value + 0.01)


def _odds(share: float) -> float:
    # Likewise a twentieth of the pixels, at both ends.
    return math.log((share + 0.05) / (1.05 - share))


SCALES: dict[str, Callable[[float], float]] = {
    "images/luminance": _odds,
    "images/contrast": _ratio,
    "images/saturation": _ratio,
    "images/sharpness": _ratio,
    "images/dark_share": _odds,
    "images/clipped_share": _odds,
    "images/jpeg_bits": _ratio,
    "images/diversity": _ratio,
}
"""Statistics that are compared with their start, each with a scale on which a change is a difference."""
PROMPT_SHARE = "images/prompt_share"


def factors(series: Series) -> Series:
    """A statistic of ``SCALES`` as a multiple of its start; shares as a multiple of their odds."""
    scaled = [SCALES[series.metric](value) for value in series.values]
    start = fmean(scaled[:START])
    return replace(series, values=tuple(math.exp(value - start) for value in scaled))


def shift(series: Series) -> tuple[float, float]:
    """Change from the start to the last steps, and the standard error of a change by the scatter of the first ones."""
    change = fmean(series.values[-WINDOW:]) - fmean(series.values[:START])
    return change, scatter(series.values[: START + WINDOW]) * math.sqrt(1 / START + 1 / WINDOW)


def has_climbed(history: History) -> bool:
    """Return true if the last third of the training reward is above the first, or the last evaluations above the first,
    beyond their scatter."""
    rewards = history.whole(*REWARD, least=START + WINDOW)
    first = rewards.part(0, max(START, len(rewards) // 3))
    last = rewards.part(-max(WINDOW, len(rewards) // 3), len(rewards))
    held_out = history.series("val/reward/mean")
    return _is_above(last, first, scatter(rewards.values)) or (
        # Evaluations repeat their prompts and noise, so that they scatter less.
        held_out is not None
        and len(held_out) >= 2 * FEW
        and _is_above(
            held_out.part(-FEW, len(held_out)),
            held_out.part(0, FEW),
            max(scatter(held_out.values), EVALUATION[0] * reward_unit(history, rewards)),
        )
    )


def _is_above(last: Series, first: Series, deviation: float) -> bool:
    return last.mean - first.mean > SIGNIFICANT * deviation * math.sqrt(1 / len(first) + 1 / len(last))


def image_drift(history: History) -> Measurement | None:
    """The largest factor by which a statistic of the images has left its start, while the reward climbed."""
    climbed = has_climbed(history)
    found = []
    for metric, scale in SCALES.items():
        series = history.series(metric)
        if series is not None and len(series) >= START + WINDOW:
            change, error = shift(replace(series, values=tuple(map(scale, series.values))))
            beyond = climbed and abs(change) > SIGNIFICANT_OF_MANY * error
            found.append((math.exp(abs(change)) if beyond else 1.0, abs(change), series))
    if not found:
        return None
    value, _, series = max(found, key=lambda one: one[:2])
    ends = (series.part(0, START), series.part(-WINDOW, len(series)))
    return Measurement(value, series.metric, series.span, f"{_ends(*ends)}{_meanwhile(climbed)}")


def prompt_share(history: History) -> Measurement | None:
    """The share of the images' variance that their prompts explain, over its best earlier mean, while the reward
    climbed. Learning raises it first even where the reward is hacked later."""
    series = history.whole(PROMPT_SHARE, least=START + WINDOW)
    climbed = has_climbed(history)
    now = series.part(-WINDOW, len(series))
    earlier = [series.part(i, i + START) for i in range(len(series) - START - WINDOW + 1)]
    best = max(earlier, key=lambda part: part.mean)
    error = scatter(series.values) * math.sqrt(1 / START + 1 / WINDOW)
    # The best of many is high by chance alone.
    fall = best.mean - now.mean
    fell = climbed and best.mean > 0 and fall > math.sqrt(SIGNIFICANT**2 + 2 * math.log(len(earlier))) * error
    value = max(0.0, now.mean / best.mean) if fell else 1.0
    return Measurement(value, series.metric, series.span, f"{_ends(best, now)}{_meanwhile(climbed)}")


def _ends(*parts: Series) -> str:
    ends = (f"{number(part.mean)} (steps {part.span[0]}-{part.span[1]})" for part in parts)
    return f"{parts[0].metric} went from {' to '.join(ends)}"


def _meanwhile(climbed: bool) -> str:
    return ", while the reward climbed" if climbed else "; the reward has not climbed"


def functions(history: History, prefix: str) -> list[str]:
    """The metrics under a prefix that are the mean of one reward function."""
    names = {name: name.removeprefix(prefix) for name in history.names if name.startswith(prefix)}
    # Names with a slash are of timesteps, deviations, or a reward's own metrics.
    return [name for name, function in names.items() if function not in STATISTICS and "/" not in function]


def observers(history: History) -> list[str]:
    """Held-out metrics of rewards that the run was not trained on, or with a negligible weight."""
    trained = {name.removeprefix("reward/") for name in functions(history, "reward/")}
    # After a validation before the first step, nothing shows yet which of them are trained on.
    if not trained:
        return []
    given = dict(history.setting("reward.functions") or {})
    given |= {name: one.get("weight", 1.0) for name, one in (history.setting("reward.reward_functions") or {}).items()}
    custom = history.setting("reward.custom_reward_function") or {}
    if custom.get("path"):
        given[custom.get("name")] = custom.get("weight", 1.0)
    weights = {name: abs(weight) for name, weight in given.items() if isinstance(weight, (int, float))}
    least = NEGLIGIBLE * max(weights.values(), default=1.0)
    trained -= {name for name, weight in weights.items() if weight <= least}
    return [name for name in functions(history, "val/reward/") if name.removeprefix("val/reward/") not in trained]


def observer_fall(history: History) -> Measurement | None:
    """The largest fall of an observer's held-out score from its start, while the reward climbed."""
    climbed = has_climbed(history)
    found = []
    for name in observers(history):
        series = history.series(name)
        if series is not None and len(series) >= 2 * FEW:
            start, now = series.part(0, FEW), series.part(-FEW, len(series))
            within = history.series(name.replace("val/reward/", "val/reward/std/"))
            unit = (within.values[0] if within is not None else abs(start.mean)) or 1.0
            fall = (start.mean - now.mean) / unit
            error = min(max(scatter(series.values) / unit, EVALUATION[0]), EVALUATION[1]) * math.sqrt(2 / FEW)
            says = f"{name} went from {number(start.mean)} to {number(now.mean)}"
            says += f", {number(abs(fall))} standard deviations of its scores {'down' if fall > 0 else 'up'}"
            found.append((fall if climbed and fall > SIGNIFICANT * error else 0.0, fall, series, says))
    if not found:
        return None
    value, _, series, says = max(found, key=lambda one: one[:2])
    return Measurement(value, series.metric, series.span, f"{says}{_meanwhile(climbed)}")


HACKING_LIMITS = {
    "image_drift": HealthyRange(high=3.0, problem_high=8.0),
    "prompt_share": HealthyRange(low=0.8, problem_low=0.4),
    "observer_fall": HealthyRange(high=0.15, problem_high=0.5),
}
HACKING_ADVICE = {
    "image_drift": "Compare samples from before and after; if they got worse, see docs/reward_hacking.md.",
    "prompt_share": "Look whether samples still show their prompts; if not, see docs/reward_hacking.md.",
    "observer_fall": "Compare samples from before and after the fall, and see docs/reward_hacking.md.",
}
HACKING_CHECKS: tuple[Check, ...] = tuple(
    checks(
        (
            ("image_drift", "Images against their start", image_drift),
            ("prompt_share", "Images depend on their prompts", prompt_share),
            ("observer_fall", "Scorers that only look hold", observer_fall),
        ),
        HACKING_LIMITS,
        HACKING_ADVICE,
    )
)
