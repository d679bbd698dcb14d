"""Checks on a prompt writer: rewrites that cannot be used, and its engine's gap."""

from flowgrpo_rc.report.check import Check, Measurement, checks, recent_mean, span_words
from flowgrpo_rc.report.finding import HealthyRange, number
from flowgrpo_rc.report.history import History

_HERE = "algorithm.prompt_writer"


def gap_in_the_clip_band(history: History) -> Measurement | None:
    """The mean gap of a token, in half widths of the clip band of ``token_loss``, on its narrower side. Nothing is
    measured with a lag, since staleness is part of the gap then, nor where the band is not centred at the engine."""
    series = history.require("writer/rollout_corr/logprob_abs_diff_mean")
    loss = history.setting(f"{_HERE}.actor.token_loss") or {}
    correction = history.setting(f"{_HERE}.actor.rollout_correction") or {}
    sides = [loss.get(f"clip_ratio_{side}") or loss.get("clip_ratio") for side in ("low", "high")]
    clip = min((side for side in sides if side is not None), default=None)
    centred = correction.get("bypass_mode", True) and correction.get("loss_type") != "reinforce"
    if clip is None or history.staleness or not centred or history.is_raised("writer/guard/fallback"):
        return None
    value = series.mean / clip
    says = f"the mean |log ratio| of a token is {number(value)} of clip_ratio={number(clip)} {span_words(series.span)}"
    return Measurement(value, series.metric, series.span, says)


def guard_alarms(history: History) -> Measurement:
    """1 if the prompt writer's guard raises alarms or has left bypass mode, else 0."""
    alarms = history.require("writer/guard/alarms")
    fallen_back = history.is_raised("writer/guard/fallback")
    raised = fallen_back or history.is_raised(alarms.metric)
    state = "raises alarms" if raised else "is quiet"
    if fallen_back:
        state = "has the writer in decoupled mode"
    metric = "writer/guard/fallback" if fallen_back else alarms.metric
    return Measurement(float(raised), metric, alarms.span, f"its guard {state} at step {alarms.steps[-1]}")


WRITER_LIMITS = {
    "writer_unfit": HealthyRange(high=0.2, problem_high=0.5),
    "writer_read": HealthyRange(low=0.9, problem_low=0.5),
    "writer_gap": HealthyRange(high=0.5, problem_high=0.8),
}
WRITER_ADVICE = {
    "writer_unfit": f"Raise {_HERE}.max_new_tokens, or ask for the prompt alone in {_HERE}.system_prompt.",
    "writer_read": f"Raise rollout.pipeline.max_sequence_length, or lower {_HERE}.max_new_tokens.",
    "writer_gap": f"Raise {_HERE}.engine.dtype, or widen {_HERE}.actor.token_loss.clip_ratio.",
}
WRITER_CHECKS = (
    *checks(
        (
            ("writer_unfit", "Rewrites that are empty or do not end", recent_mean("writer/unfit_fraction")),
            ("writer_read", "Rewrites that the image model reads to the end", recent_mean("writer/read_fraction")),
            ("writer_gap", "The prompt writer's gap against its clip band", gap_in_the_clip_band),
        ),
        WRITER_LIMITS,
        WRITER_ADVICE,
    ),
    Check(
        name="writer_guard",
        title="The prompt writer's guard",
        measure=guard_alarms,
        sde=HealthyRange(high=0.0),
        limits="healthy: quiet, watch: alarms, or fallen back",
        advice="Do what the alarm said.",
    ),
)
