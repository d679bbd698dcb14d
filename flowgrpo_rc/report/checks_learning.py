"""Checks on learning: rewards, gradients, the guard, and the log itself."""

import itertools
import math
from dataclasses import replace
from statistics import fmean, median, pstdev
from typing import Any

from flowgrpo_rc.gap.safety import CLIP, ENGINE_GAP, REJECTED, ZEROED, remedy
from flowgrpo_rc.report.check import Check, Measurement, checks, recent_mean, span_words
from flowgrpo_rc.report.finding import HealthyRange, number
from flowgrpo_rc.report.history import REWARD, ROLLOUT, History, Series

# Standard errors that a fall must exceed: then one in 100 runs of 12 steps that only scatter is a false alarm, one
# in 1000 of 60 steps.
SIGNIFICANT = 3.0
# Least scatter of one evaluation, in standard deviations of a batch.
EVALUATION = 0.1
# Training steps that a trend needs: four in each third.
ENOUGH = 12


def scatter(values: tuple[float, ...]) -> float:
    """The standard deviation of a single step, from differences of neighbours, which a trend does not affect."""
    if len(values) < 3:
        return 0.0
    return math.sqrt(fmean((b - a) ** 2 for a, b in itertools.pairwise(values)) / 2)


def reward_unit(history: History, series: Series) -> float:
    """The rewards' standard deviation within a batch, the unit of falls; without it, the rewards' own size."""
    # Falls are comparable between rewards only in units of their spread within a batch.
    within = None if history.learns_from_preferences else history.series("reward/std")
    if within is not None:
        return within.mean or 1.0
    return max(abs(series.mean), pstdev(series.values)) or 1.0


def thirds(series: Series) -> list[Series]:
    """The first, the middle and the last third."""
    length = len(series) // 3
    return [series.part(0, length), series.part(length, 2 * length), series.part(2 * length, len(series))]


def reward_fall(history: History) -> Measurement:
    """Fall of the training reward from its best earlier third to its last third."""
    series = history.whole(*REWARD, least=ENOUGH)
    *before, last = thirds(series)
    best = max(before, key=lambda part: part.mean)
    error = scatter(series.values) * math.sqrt(1 / len(best) + 1 / len(last))
    # Noise alone makes the best third better than the last.
    fall = best.mean - last.mean
    ends = " to ".join(f"{number(part.mean)} (steps {part.span[0]}-{part.span[1]})" for part in (best, last))
    if fall <= max(SIGNIFICANT * error, 0.0):
        return Measurement(0.0, series.metric, series.span, f"{series.metric} went from {ends}")
    value = fall / reward_unit(history, series)
    says = f"{series.metric} fell from {ends}, {number(value)} standard deviations of a batch"
    return Measurement(value, series.metric, series.span, says)


def held_out_fall(history: History) -> Measurement:
    """Fall of the held-out reward from its best earlier few to the last few. The best of many is high by chance alone,
    hence the logarithm in the threshold."""
    series = history.whole("val/reward/mean", least=4)
    few = 2 if len(series) < 6 else 3
    last = series.part(-few, len(series))
    earlier = [series.part(i, i + few) for i in range(len(series) - 2 * few + 1)]
    best = max(earlier, key=lambda part: part.mean)
    unit = reward_unit(history, series)
    # Few evaluations can agree by chance.
    error = max(scatter(series.values), EVALUATION * unit) * math.sqrt(2 / few)
    fall = best.mean - last.mean
    says = f"{series.metric} is {number(last.mean)} {span_words(last.span)}, at best {number(best.mean)} "
    says += span_words(best.span)
    if fall <= math.sqrt(SIGNIFICANT**2 + 2 * math.log(len(earlier))) * error:
        return Measurement(0.0, series.metric, series.span, says)
    return Measurement(fall / unit, series.metric, series.span, says, _held_out_advice(history))


def _held_out_advice(history: History) -> str | None:
    """The training reward of the same time separates the two causes."""
    rewards = history.series(*REWARD)
    if rewards is None or len(rewards) < ENOUGH or history.learns_from_preferences:
        return None
    first, _, last = thirds(rewards)
    if last.mean > first.mean:
        return (
            "The training reward climbs meanwhile, so the policy learns the reward's weakness or the prompts by heart: "
            "look at the samples, stop at the best checkpoint, set actor.use_kl_loss=true, or add prompts."
        )
    return "The training reward falls too: see the findings on gap and clip, and go back to the best checkpoint."


def gradient_jump(history: History) -> Measurement | None:
    """The largest recent gradient norm over the usual one."""
    series = history.whole("actor/grad_norm", least=ENOUGH)
    recent = history.require("actor/grad_norm")
    # A mean would contain the jump itself.
    usual = median(series.values)
    if usual <= 0:
        return None
    largest = max(recent.values)
    says = f"the largest gradient norm {span_words(recent.span)} is {number(largest)}, the run's median {number(usual)}"
    return Measurement(largest / usual, series.metric, recent.span, says)


def policy_shift(history: History) -> Measurement | None:
    """The mean log ratio to the old policy, in half widths of the clip band."""
    series = history.require("actor/ppo_kl")
    width = history.clip_width
    if not width or not history.clips_the_ratio or history.averages_old_policy:
        return None
    says = f"actor/ppo_kl is {number(series.mean)} {span_words(series.span)}, the clip band {number(width)}"
    return Measurement(abs(series.mean) / width, series.metric, series.span, says)


# The guard's figures in words, by the end of guard/alarm_....
GUARDED = {
    CLIP: "samples outside the clip band before anything was learned",
    REJECTED: "samples rejected",
    ZEROED: "importance weights of 0",
    ENGINE_GAP: "engine and actor with equal weights",
}


def guard_alarms(history: History) -> Measurement:
    """1 if the guard raises alarms or has left bypass mode, else 0, with the causes."""
    alarms = history.require("guard/alarms")
    # Rows of a resumed run may hold alarms of its earlier mode, which is_raised ignores.
    causes = [name for name in GUARDED if history.is_raised(f"guard/alarm_{name}")]
    over = f": {', '.join(GUARDED[name] for name in causes)}" if causes else ""
    mode = history.mode_for_remedies
    if history.fallen_back and mode.has_limit:
        # The alarm was raised under the configured limit, but decoupled mode is no remedy any more.
        mode = replace(mode, rollout_correction=replace(mode.rollout_correction, bypass_mode=False))
    advice = " ".join(dict.fromkeys(f"{remedy(name, mode)}." for name in causes)) or None
    metric, state, value = "guard/alarms", "is quiet", 0.0
    if history.fallen_back:
        metric, state, value = "guard/fallback", "has the run in decoupled mode", 1.0
    elif history.is_raised("guard/alarms"):
        state, value = "raises alarms", 1.0
    says = f"the guard {state} at step {alarms.steps[-1]}{over}"
    return Measurement(value, metric, alarms.span, says, advice)


def not_finite(history: History) -> Measurement:
    """Number of values that are NaN or infinite; a half for broken lines or repeated steps."""
    bad = [(step, name) for step, name, value in history.not_finite if _is_not_finite(value, name, history)]
    span = (history.steps[0], history.steps[-1])
    if bad:
        names = ", ".join(dict.fromkeys(name for _, name in bad[:5]))
        says = f"{len(bad)} values are NaN or infinite, first at step {bad[0][0]}: {names}"
        return Measurement(float(len(bad)), bad[0][1], span, says)
    # The last line of a killed run is often cut off, which is no problem by itself.
    if history.broken_lines:
        says = f"metrics.jsonl: {history.broken_lines} line(s) cut off or not readable"
        return Measurement(0.5, "metrics.jsonl", span, says)
    if history.repeated:
        says = f"metrics.jsonl: {len(history.repeated)} step(s) stand there again or out of order, "
        says += f"the first is step {history.repeated[0]}"
        return Measurement(0.5, "metrics.jsonl", span, f"{says}; did two runs write one folder?")
    return Measurement(0.0, "metrics.jsonl", span, f"{len(history.rows)} rows, every value finite")


def _is_not_finite(value: Any, name: str, history: History) -> bool:
    """NaN or infinity, also as text or null if other rows hold numbers of that name."""
    if isinstance(value, (int, float)):
        return True
    text = "nan" if value is None else str(value).strip().lower().lstrip("+-")
    return text in ("nan", "inf", "infinity") and history.series(name) is not None


LOG_CHECK = Check(
    name="log",
    title="The log itself",
    measure=not_finite,
    sde=HealthyRange(high=0.0, problem_high=0.5),
    limits="healthy: every line read, every step once and in order, every value finite, problem: NaN or infinity",
    advice="Resume from the last checkpoint with trainer.resume_mode=auto; a NaN is named in the run's error.",
)


# Steps that the check on waiting needs: in the first, nothing has been drawn ahead yet.
ENOUGH_AHEAD = 4


def waiting(history: History) -> Measurement | None:
    """Share of the time that engines were idle, or that the trainer waited for images if that is more."""
    busy = history.require("perf/engines_busy")
    waits = history.require("perf/trainer_waits")
    if len(busy) < ENOUGH_AHEAD:
        return None
    # Both sides of one split wait at different times, so both shares count.
    idle = 1 - busy.mean
    says = f"engines were idle {idle:.0%} of the time, the trainer waited for images {waits.mean:.0%} of it, "
    says += span_words(busy.span)
    worse, value, advice = busy, idle, _if_rewards_are_slow(history)
    if waits.mean > idle:
        worse, value = waits, waits.mean
        advice = "Give the engines more GPUs (rollout.devices, rollout.engines), or draw in a lower rollout.dtype."
    if not history.setting(f"{ROLLOUT}.ahead", 0):
        advice = "Set rollout.ahead=1: the engines draw a batch while the trainer learns from the one before."
    return Measurement(value, worse.metric, worse.span, says, advice)


def _if_rewards_are_slow(history: History) -> str | None:
    """The remedy if rewards keep the trainer from the images, else None."""
    reward = history.recent("timing_s/reward")
    update = history.recent("timing_s/update")
    if reward is None or update is None or reward.mean <= update.mean:
        return None
    return (
        f"The trainer waits for rewards ({reward.mean:.3g} s a step) longer than it learns ({update.mean:.3g} s): have "
        "a server score them while it learns (reward.remote with streams=true), or make the server faster."
    )


def advice_on_alarms(history: History) -> str:
    """The alarm's own remedy; with a plain clip band in bypass mode and a guard that only warns, the usual ones."""
    mode = history.mode_for_remedies
    plain = mode.diffusion_loss.clip_ratio != "auto" and not mode.diffusion_loss.has_sides
    clips = mode.limits_the_gap and mode.objective.clips_plain_ratio and not history.fallen_back
    usual = clips and plain and mode.rollout_correction.guard != "fallback"
    return f"Do what the alarm said{': widen clip_ratio or set it to auto, or set guard=fallback' if usual else ''}."


LEARNING_LIMITS = {
    "reward_fall": HealthyRange(high=0.05, problem_high=0.1),
    "held_out_fall": HealthyRange(high=0.15, problem_high=0.35),
    "zero_std_groups": HealthyRange(high=0.5, problem_high=0.9),
    "grad_jump": HealthyRange(high=10.0, problem_high=100.0),
    "policy_shift": HealthyRange(high=0.5, problem_high=2.0),
    "waiting": HealthyRange(high=0.5),
}
LEARNING_ADVICE = {
    "reward_fall": "Stop, go back to the best checkpoint, and see to the findings on the gap and the clip first.",
    "held_out_fall": "Go back to the best checkpoint, and look at samples from before and after.",
    "zero_std_groups": "Choose prompts that are neither solved nor hopeless, raise rollout.n, or use a finer reward.",
    "grad_jump": "Lower actor.optim.lr or actor.grad_clip, and look at the batch of that step.",
    "policy_shift": "Lower actor.optim.lr, or take fewer optimizer steps a batch.",
    "waiting": "Give the trainer some of the engines' GPUs; flowgrpo-rc plan --gpus says which split is fastest.",
}
GUARD_CHECK = Check(
    name="guard",
    title="The guard",
    measure=guard_alarms,
    sde=HealthyRange(high=0.0),
    limits="healthy: quiet, watch: alarms, or fallen back",
    advice=advice_on_alarms,
)
LEARNING_CHECKS = (
    GUARD_CHECK,
    *checks(
        (
            ("reward_fall", "Training reward holds", reward_fall),
            ("held_out_fall", "Held-out reward holds", held_out_fall),
            ("zero_std_groups", "Groups with equal rewards", recent_mean("reward/zero_std_fraction")),
            ("grad_jump", "Jumps of the gradient", gradient_jump),
            ("policy_shift", "Shift of the policy within a batch", policy_shift),
            ("waiting", "Trainer and engines waiting for each other", waiting),
        ),
        LEARNING_LIMITS,
        LEARNING_ADVICE,
    ),
)
