"""Checks on weights, rejection and divergences. Limits for tokens are the customary ones of LLM runs."""

from flowgrpo_rc.gap.safety import REJECTED, ZEROED
from flowgrpo_rc.report.check import Measurement, checks, recent_max, recent_mean, span_words
from flowgrpo_rc.report.checks_gap import figure_limits, figure_remedy
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


WEIGHT_LIMITS = {
    "is_mean": (HealthyRange(0.95, 1.05, 0.5, 2.0), HealthyRange(0.8, 1.25, 0.5, 2.0)),
    "is_std": (HealthyRange(high=0.1, problem_high=1.0), HealthyRange(high=0.5, problem_high=1.0)),
    "ess": (HealthyRange(low=0.9, problem_low=0.3), HealthyRange(low=0.5, problem_low=0.3)),
    "is_outside": HealthyRange(high=0.05, problem_high=0.3),
    "is_bound": (HealthyRange(high=0.5), None),
    "is_dropped": figure_limits(ZEROED),
    "is_norm_factor": (HealthyRange(0.95, 1.05, 0.5, 2.0), HealthyRange(0.8, 1.25, 0.5, 2.0)),
}
WEIGHT_ADVICE = {
    "is_mean": "Check that the log-probs belong to the samples; raise rollout_is_threshold, or refresh rollouts.",
    "is_std": "Lower rollout_is_threshold, or use rollout_is=token or geometric.",
    "ess": "Lower rollout_is_threshold, use rollout_is=token or geometric, or reject with rollout_rs.",
    "is_outside": "Bring engine and actor closer, or widen rollout_is_threshold.",
    "is_bound": "Find that sample (logprob_abs_diff_max), or reject it with rollout_rs; the gap is larger than "
    "assumed.",
    "is_dropped": figure_remedy(ZEROED),
    "is_norm_factor": "Look for the cause of the shift; normalisation only rescales the gradient.",
}
DROPPED = recent_mean("rollout_corr/rollout_is_oob_ratio", "rollout_corr/rollout_is_masked_fraction")
LOG_PERPLEXITY = recent_mean("rollout_corr/log_ppl_abs_diff")
WEIGHT_CHECKS = checks(
    (
        ("is_mean", "Mean weight", recent_mean("rollout_corr/rollout_is_mean")),
        ("is_std", "Spread of the weights", recent_mean("rollout_corr/rollout_is_std")),
        ("ess", "Effective sample size", recent_mean("rollout_corr/rollout_is_eff_sample_size")),
        ("is_outside", "Weights beyond their bounds", weights_outside),
        ("is_bound", "Largest weight at its bound", weights_at_the_bound),
        ("is_dropped", "Weights set to zero or masked", DROPPED),
        (
            "is_norm_factor",
            "Batch normalisation of the weights",
            recent_mean("rollout_corr/rollout_is_batch_norm_factor"),
        ),
    ),
    WEIGHT_LIMITS,
    WEIGHT_ADVICE,
    of_weights=True,
)

LIMITS = {
    "rejected": figure_limits(REJECTED),
    "veto": HealthyRange(high=0.0, problem_high=0.1),
    "gap_mean": (HealthyRange(high=5e-3, problem_high=0.05), HealthyRange(high=0.05, problem_high=0.5)),
    "kl": (HealthyRange(high=5e-3, problem_high=0.05), HealthyRange(high=0.05, problem_high=0.1)),
    "k3_kl": (HealthyRange(high=1e-5, problem_high=1e-3), HealthyRange(high=0.05, problem_high=0.1)),
    "chi2_token": (HealthyRange(high=1e-2, problem_high=1.0), HealthyRange(high=0.5, problem_high=1.0)),
    "chi2_seq": (HealthyRange(high=5e-2, problem_high=1.0), HealthyRange(high=10.0)),
    "ppl_ratio": (HealthyRange(high=5e-3, problem_high=0.05), HealthyRange(high=0.1, problem_high=0.5)),
    "log_ppl_abs_diff": (HealthyRange(high=5e-3, problem_high=0.05), HealthyRange(high=0.1, problem_high=1.0)),
}
ADVICE = {
    "rejected": figure_remedy(REJECTED),
    "veto": "Look at those samples: prompt, mask and log-probs; do not just relax rollout_token_veto_threshold.",
    "gap_mean": closer_or_decoupled,
    "kl": "Compare the weights, noise schedule and temperature of engine and actor.",
    "k3_kl": "Raise the engine's precision, or refresh its weights more often.",
    "chi2_token": "Use rollout_is=token with a low threshold, or reject with rollout_rs.",
    "chi2_seq": "Use rollout_is=token or geometric instead of sequence.",
    "ppl_ratio": "Compare the weights, noise schedule and temperature of engine and actor.",
    "log_ppl_abs_diff": "Compare dtype, quantization, kernels and weights of engine and actor before training on.",
}
# Their limits assume log ratios of densities.
OF_DENSITIES = ("gap_mean", "kl", "k3_kl", "ppl_ratio", "log_ppl_abs_diff")
CORRECTION_CHECKS = (
    *WEIGHT_CHECKS,
    *checks(
        (
            ("rejected", "Rejected samples", rejected),
            ("veto", "Rows vetoed", recent_max("rollout_corr/rollout_is_veto_fraction")),
            ("gap_mean", "Mean difference of the log-probs", recent_mean("rollout_corr/logprob_abs_diff_mean")),
            ("kl", "KL of rollout from training", recent_mean("rollout_corr/kl", away_from=0)),
            ("k3_kl", "KL, non-negative estimate", recent_mean("rollout_corr/k3_kl")),
            ("chi2_token", "Chi-squared of single ratios", recent_mean("rollout_corr/chi2_token")),
            ("chi2_seq", "Chi-squared of whole rows", recent_mean("rollout_corr/chi2_seq")),
            ("ppl_ratio", "Perplexity, training over rollout", recent_mean("rollout_corr/ppl_ratio", away_from=1)),
            ("log_ppl_abs_diff", "Difference of the rows' log perplexities", LOG_PERPLEXITY),
        ),
        LIMITS,
        ADVICE,
        of_densities=OF_DENSITIES,
    ),
)
