"""The same figures under the names of slime's MIS helper."""

from flowgrpo_rc.correction.numerics.metrics import Metrics, metrics_from_moments
from flowgrpo_rc.correction.numerics.moments import Moments
from flowgrpo_rc.correction.numerics.run import RolloutCorrection
from flowgrpo_rc.correction.plan import WEIGHT_MODES

_NAMES = {
    "mismatch_training_log_ppl": "training_log_ppl",
    "mismatch_training_ppl": "training_ppl",
    "mismatch_rollout_log_ppl": "rollout_log_ppl",
    "mismatch_rollout_ppl": "rollout_ppl",
    "mismatch_kl": "kl",
    "mismatch_k3_kl": "k3_kl",
    "mismatch_log_ppl_diff": "log_ppl_diff",
    "mismatch_log_ppl_abs_diff": "log_ppl_abs_diff",
    "mismatch_ppl_ratio": "ppl_ratio",
    "train_rollout_logprob_abs_diff": "logprob_abs_diff_mean",
    "mis_catastrophic_token_fraction": "rollout_is_catastrophic_token_fraction",
    "mis_catastrophic_seq_fraction": "rollout_is_veto_fraction",
    "mis_ratio_mean_after_mis": "rollout_is_mean",
    "mis_batch_norm_factor": "rollout_is_batch_norm_factor",
}


def slime_metrics(result: RolloutCorrection | Moments, *, ppo_ratio_mean: float | None = None) -> Metrics:
    """The figures under slime's names (``mismatch_*``, ``mis_*``, ...), without a prefix.

    Args:
        result: of a correction, or its ``Moments``.
        ppo_ratio_mean: mean of pi_theta / pi_old, which the caller has; reported as ``ois``.
    """
    moments = result if isinstance(result, Moments) else result.moments
    ours = metrics_from_moments(moments, "")
    out = {name: ours[source] for name, source in _NAMES.items() if source in ours}
    spec = moments.plan.importance
    if spec is not None:
        raw_excess = (
            moments.sums["excess"] if spec.level == "token" else moments.element_sum("is_ratio") - moments.count
        )
        out["mis_mean_is_weight_before_clip"] = 1.0 + raw_excess / moments.count
        for name, side in WEIGHT_MODES[spec.mode].slime_fractions.items():
            out[name] = moments.element_sum(f"is_{side}") / moments.count
    if ppo_ratio_mean is not None:
        out["ois"] = ppo_ratio_mean
    return out
