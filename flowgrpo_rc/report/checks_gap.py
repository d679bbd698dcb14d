"""Checks on the gap between rollout engine and actor, and on its effect on the clip."""

from collections.abc import Callable
from statistics import median

from flowgrpo_rc.gap.safety import (
    CLIP,
    CLIP_AT_TIMESTEP,
    ENGINE_GAP,
    LIMITS,
    TOKEN_GAP_NOT_SAFE,
    may_calibrate_clip,
    widen_limit,
)
from flowgrpo_rc.report.check import Measure, Measurement, against_clip, checks, recent_max, recent_mean, span_words
from flowgrpo_rc.report.finding import HealthyRange, number
from flowgrpo_rc.report.history import WINDOW, History

# Mean |log pi_actor - log pi_engine|: with equal weights, in bypass mode before the update, or as corrected.
GAP = ("rollout_sync/engine_gap_abs_mean", "actor/log_ratio_abs_mean_first", "rollout_corr/logprob_abs_diff_mean")
# The settings under which engine and actor compute the same in float32.
FLOAT32 = {
    "actor_rollout_ref.rollout.dtype": "float32",
    "actor_rollout_ref.rollout.name": "diffusers",
    "actor_rollout_ref.rollout.quantization": None,
    "actor_rollout_ref.model.dtype": "float32",
    "trainer.mixed_precision": "no",
}
# A gap below this is float32 rounding; its growth means nothing.
NOTHING = 1e-7


def clip_share(what: str, *names: str) -> Measure:
    """``against_clip`` of the first of ``names`` that is logged."""
    return lambda history: against_clip(history, history.require(*names), what)


def gap_at_the_worst_timestep(history: History) -> Measurement | None:
    """The largest gap of a timestep, in half widths of the clip band; a calibrated band follows each timestep."""
    by_timestep = history.by_timestep()
    names = (GAP[0], "rollout_corr/logprob_abs_diff", "actor/rollout_corr/logprob_abs_diff")
    steps = next((by_timestep[name] for name in names if name in by_timestep), None)
    if steps is None or history.mode.diffusion_loss.clip_ratio == "auto":
        return None
    # The mean over timesteps hides one that is clipped entirely.
    timestep, series = max(steps.items(), key=lambda item: item[1].mean)
    return against_clip(history, series, f"the gap at timestep {timestep:g}")


def gap_growth(history: History) -> Measurement | None:
    """The gap now over the gap of the first steps. Without rescoring, staleness would count as gap, so no lag then."""
    # Only rescoring under equal weights separates the engine's gap from staleness.
    names = [GAP[0]]
    if not history.staleness:
        names.append(GAP[1] if history.mode.bypasses else GAP[2])
    series = history.whole(*names, least=2 * WINDOW)
    last = history.require(*names)
    first = series.part(0, WINDOW)
    # Growth from rounding to rounding may be a large factor.
    if first.mean < NOTHING:
        return None
    says = f"{series.metric} went from {number(first.mean)} to {number(last.mean)} {span_words(series.span)}"
    return Measurement(last.mean / first.mean, series.metric, series.span, says)


def gap_outliers(history: History) -> Measurement | None:
    """The largest gap of a batch over its mean, as the median of the recent batches."""
    largest, mean = (history.require(f"rollout_corr/logprob_abs_diff_{kind}") for kind in ("max", "mean"))
    if len(largest) != len(mean) or min(mean.values) < NOTHING:
        return None
    value = median(high / low for high, low in zip(largest.values, mean.values, strict=True))
    says = f"the largest |log ratio| of a batch is {number(value)} times its mean {span_words(largest.span)}"
    return Measurement(value, largest.metric, largest.span, says)


def float32_deviation(history: History) -> Measurement | None:
    """The ratio's distance from 1 before an update, if both sides compute in float32 with the same weights."""
    same = all(history.setting(path) == value for path, value in FLOAT32.items())
    return recent_max("actor/ratio_deviation_first")(history) if same and not history.staleness else None


def clipped(metric: str):
    """A recent clip fraction, if the objective clips."""
    return lambda history: recent_mean(metric)(history) if history.clips and not history.averages_old_policy else None


def clipped_first(history: History) -> Measurement | None:
    """The share that the gap alone puts beyond the objective's limit."""
    limit = history.mode.objective.limit
    # On clean images no engine's log-prob enters a ratio.
    if not history.mode.has_limit or history.mode.objective.clean:
        return None
    # The metric is the share itself, and rescoring logs the same share in decoupled mode.
    if limit.share_per_metric == 1:
        return recent_mean(limit.share_metric, "rollout_sync/outside_clip")(history)
    series = history.require(limit.share_metric)
    share = limit.share_per_metric * series.mean
    says = f"{limit.share_per_metric} times {series.metric} is {number(share)} {span_words(series.span)}"
    return Measurement(limit.share_beyond(series.mean), series.metric, series.span, says)


def _widen_limit(history: History) -> str:
    return widen_limit(history.mode_for_remedies, fallen_back=history.fallen_back)


def calibrate_or_widen(history: History) -> str:
    """The remedy that gives the configured limit more room."""
    way = _widen_limit(history)
    if may_calibrate_clip(history.mode_for_remedies, fallen_back=history.fallen_back):
        way = "Set diffusion_loss.clip_ratio to auto or four times the mean gap"
    return f"{way}, raise rollout.dtype, or set bypass_mode=false."


def figure_limits(figure: str) -> HealthyRange:
    """The limits of a figure of ``gap.safety``: healthy up to ``costs``, a problem above ``not_safe``."""
    return HealthyRange(high=LIMITS[figure].costs, problem_high=LIMITS[figure].not_safe)


def figure_remedy(figure: str) -> Callable[[History], str]:
    """The remedy for a figure of ``gap.safety``, that of probe and guard."""
    return lambda history: f"{history.remedy(figure)}."


GAP_LIMITS = {
    "clip_first": figure_limits(CLIP),
    "gap_vs_clip": (HealthyRange(high=0.5, problem_high=0.8), None),
    "gap_timestep": (HealthyRange(high=1.0, problem_high=2.0), None),
    "staleness": (HealthyRange(high=0.5, problem_high=2.0), None),
    "engine_gap": (figure_limits(ENGINE_GAP), HealthyRange(high=0.1, problem_high=TOKEN_GAP_NOT_SAFE)),
    "gap_growth": HealthyRange(high=2.0, problem_high=10.0),
    "gap_outliers": (HealthyRange(high=20.0), None),
    "float32_deviation": (HealthyRange(high=1e-6, problem_high=1e-4), None),
    "clip_fraction": HealthyRange(high=0.3, problem_high=0.6),
    "clip_inert": HealthyRange(high=0.2, problem_high=0.4),
}
GAP_ADVICE = {
    "clip_first": figure_remedy(CLIP),
    "gap_vs_clip": calibrate_or_widen,
    "gap_timestep": figure_remedy(CLIP_AT_TIMESTEP),
    "staleness": "Lower rollout.ahead, adapter_lag or actor.optim.lr, or set rollout_correction.bypass_mode=false.",
    "engine_gap": figure_remedy(ENGINE_GAP),
    "gap_growth": "Look for weights that stopped arriving at the engine, or for an adapter that outgrew its precision.",
    "gap_outliers": "Find the sample or timestep (logprob_abs_diff/ts_*), or reject it with rollout_rs=seq_mean_k1.",
    "float32_deviation": "Compare noise level, guidance, latents and adapter of rollout and update: they are not the "
    "same.",
    "clip_fraction": lambda history: (
        f"{_widen_limit(history)}, lower actor.optim.lr, or take fewer optimizer steps a batch."
    ),
    "clip_inert": lambda history: f"{_widen_limit(history)} or lower actor.optim.lr.",
}
BEFORE_UPDATE = clip_share("the gap before each update ({metric})", GAP[1], GAP[0])
STALENESS = clip_share("the staleness of the engine's adapter", "rollout_sync/staleness_abs_mean")
PER_DIMENSION = recent_mean("rollout_sync/engine_gap_per_dimension", "rollout_sync/engine_gap_abs_mean")
GAP_CHECKS = checks(
    (
        ("clip_first", "Clipped before anything is learned", clipped_first),
        ("gap_vs_clip", "Gap against the clip band", BEFORE_UPDATE),
        ("gap_timestep", "Gap at the worst timestep", gap_at_the_worst_timestep),
        ("staleness", "Staleness against the clip band", STALENESS),
        ("engine_gap", "Engine and actor with equal weights", PER_DIMENSION),
        ("gap_growth", "Growth of the gap", gap_growth),
        ("gap_outliers", "Outliers of the gap", gap_outliers),
        ("float32_deviation", "Ratio before an update, float32 on both sides", float32_deviation),
        ("clip_fraction", "Clipped over all mini-steps", clipped("actor/pg_clipfrac")),
        ("clip_inert", "Gradients that clipping removed", clipped("actor/pg_clipfrac_inert")),
    ),
    GAP_LIMITS,
    GAP_ADVICE,
)
