"""Checks on weights, rejection and divergences. Limits for tokens are the customary ones of LLM runs."""

from dataclasses import replace

from flowgrpo_rc.gap.safety import REJECTED, ZEROED
from flowgrpo_rc.report.check import Check, Measurement, recent_max, recent_mean, span_words
from flowgrpo_rc.report.checks_gap import shared_check
from flowgrpo_rc.report.finding import HealthyRange, number
from flowgrpo_rc.report.history import History


def rejected(history: History) -> Measurement | None:
    """The share of steps or tokens that rejection removed."""
    metric = "rollout_corr/rollout_rs_masked_fraction"
    # In bypass mode the rows may have the kept share alone.
    if history.recent(metric) is not None:
        return recent_mean(metric)(history)
    kept = history.require("actor/kept_fraction")
    value = 1 - kept.mean
    says = f"rejection removed {number(value)} of the samples (1 - {kept.metric}) {span_words(kept.span)}"
    return Measurement(value, kept.metric, kept.span, says)


def weights_outside(history: History) -> Measurement:
    """The share of weights beyond the upper bound, and below the lower one."""
    high = history.require("rollout_corr/rollout_is_ratio_fraction_high")
    low = history.recent("rollout_corr/rollout_is_ratio_fraction_low")
    value = high.mean + (low.mean if low is not None else 0.0)
    says = f"{number(value)} of the weights lay beyond the bounds {span_words(high.span)}"
    return Measurement(value, high.metric, high.span, says)


def weights_at_the_bound(history: History) -> Measurement | None:
    """The share of recent steps whose largest weight reached the upper bound."""
    largest = history.require("rollout_corr/rollout_is_max")
    importance = history.mode.rollout_correction.plan().importance
    if importance is None:
        return None
    bound = importance.upper
    # A truncated weight equals its bound up to rounding.
    value = sum(v >= bound * (1 - 1e-6) for v in largest.values) / len(largest)
    says = f"the largest weight reached its bound {number(bound)} in {number(value)} of the batches"
    return Measurement(value, largest.metric, largest.span, f"{says} {span_words(largest.span)}")


def closer_or_decoupled(history: History) -> str:
    """The remedies for a wide gap; decoupled mode is one as long as the run bypasses."""
    mode = history.mode_for_remedies
    if mode.limits_the_gap and not history.fallen_back:
        return "Raise the engine's precision, refresh its weights more often, or set bypass_mode=false."
    return "Raise the engine's precision, or refresh its weights more often."


WEIGHT_CHECKS = (
    Check(
        name="is_mean",
        title="Mean weight",
        measure=recent_mean("rollout_corr/rollout_is_mean"),
        sde=HealthyRange(0.95, 1.05, 0.5, 2.0),
        tokens=HealthyRange(0.8, 1.25, 0.5, 2.0),
        advice="Check that the log-probs belong to the samples; raise rollout_is_threshold, or refresh rollouts.",
    ),
    Check(
        name="is_std",
        title="Spread of the weights",
        measure=recent_mean("rollout_corr/rollout_is_std"),
        sde=HealthyRange(high=0.1, problem_high=1.0),
        tokens=HealthyRange(high=0.5, problem_high=1.0),
        advice="Lower rollout_is_threshold, or use rollout_is=token or geometric.",
    ),
    Check(
        name="ess",
        title="Effective sample size",
        measure=recent_mean("rollout_corr/rollout_is_eff_sample_size"),
        sde=HealthyRange(low=0.9, problem_low=0.3),
        tokens=HealthyRange(low=0.5, problem_low=0.3),
        advice="Lower rollout_is_threshold, use rollout_is=token or geometric, or reject with rollout_rs.",
    ),
    Check(
        name="is_outside",
        title="Weights beyond their bounds",
        measure=weights_outside,
        sde=HealthyRange(high=0.05, problem_high=0.3),
        advice="Bring engine and actor closer, or widen rollout_is_threshold.",
    ),
    Check(
        name="is_bound",
        title="Largest weight at its bound",
        measure=weights_at_the_bound,
        sde=HealthyRange(high=0.5),
        tokens=None,
        advice="Find that sample (logprob_abs_diff_max), or reject it with rollout_rs; the gap is larger than assumed.",
    ),
    shared_check(
        ZEROED,
        name="is_dropped",
        title="Weights set to zero or masked",
        measure=recent_mean("rollout_corr/rollout_is_oob_ratio", "rollout_corr/rollout_is_masked_fraction"),
    ),
    Check(
        name="is_norm_factor",
        title="Batch normalisation of the weights",
        measure=recent_mean("rollout_corr/rollout_is_batch_norm_factor"),
        sde=HealthyRange(0.95, 1.05, 0.5, 2.0),
        tokens=HealthyRange(0.8, 1.25, 0.5, 2.0),
        advice="Look for the cause of the shift; normalisation only rescales the gradient.",
    ),
)


CORRECTION_CHECKS = (
    *(replace(check, of_weights=True) for check in WEIGHT_CHECKS),
    shared_check(REJECTED, name="rejected", title="Rejected samples", measure=rejected),
    Check(
        name="veto",
        title="Rows vetoed",
        measure=recent_max("rollout_corr/rollout_is_veto_fraction"),
        sde=HealthyRange(high=0.0, problem_high=0.1),
        advice="Look at those samples: prompt, mask and log-probs; do not just relax rollout_token_veto_threshold.",
    ),
    Check(
        name="gap_mean",
        title="Mean difference of the log-probs",
        measure=recent_mean("rollout_corr/logprob_abs_diff_mean"),
        sde=HealthyRange(high=5e-3, problem_high=0.05),
        tokens=HealthyRange(high=0.05, problem_high=0.5),
        of_densities=True,
        advice=closer_or_decoupled,
    ),
    Check(
        name="kl",
        title="KL of rollout from training",
        measure=recent_mean("rollout_corr/kl", away_from=0),
        sde=HealthyRange(high=5e-3, problem_high=0.05),
        tokens=HealthyRange(high=0.05, problem_high=0.1),
        of_densities=True,
        advice="Compare the weights, noise schedule and temperature of engine and actor.",
    ),
    Check(
        name="k3_kl",
        title="KL, non-negative estimate",
        measure=recent_mean("rollout_corr/k3_kl"),
        sde=HealthyRange(high=1e-5, problem_high=1e-3),
        tokens=HealthyRange(high=0.05, problem_high=0.1),
        of_densities=True,
        advice="Raise the engine's precision, or refresh its weights more often.",
    ),
    Check(
        name="chi2_token",
        title="Chi-squared of single ratios",
        measure=recent_mean("rollout_corr/chi2_token"),
        sde=HealthyRange(high=1e-2, problem_high=1.0),
        tokens=HealthyRange(high=0.5, problem_high=1.0),
        advice="Use rollout_is=token with a low threshold, or reject with rollout_rs.",
    ),
    Check(
        name="chi2_seq",
        title="Chi-squared of whole rows",
        measure=recent_mean("rollout_corr/chi2_seq"),
        sde=HealthyRange(high=5e-2, problem_high=1.0),
        tokens=HealthyRange(high=10.0),
        advice="Use rollout_is=token or geometric instead of sequence.",
    ),
    Check(
        name="ppl_ratio",
        title="Perplexity, training over rollout",
        measure=recent_mean("rollout_corr/ppl_ratio", away_from=1),
        sde=HealthyRange(high=5e-3, problem_high=0.05),
        tokens=HealthyRange(high=0.1, problem_high=0.5),
        of_densities=True,
        advice="Compare the weights, noise schedule and temperature of engine and actor.",
    ),
    Check(
        name="log_ppl_abs_diff",
        title="Difference of the rows' log perplexities",
        measure=recent_mean("rollout_corr/log_ppl_abs_diff"),
        sde=HealthyRange(high=5e-3, problem_high=0.05),
        tokens=HealthyRange(high=0.1, problem_high=1.0),
        of_densities=True,
        advice="Compare dtype, quantization, kernels and weights of engine and actor before training on.",
    ),
)
