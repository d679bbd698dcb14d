"""`explain`: in words, which algorithm a configuration is, and which classic mistakes it makes."""

import math
from dataclasses import dataclass, fields

from flowgrpo_rc.correction.options.config import RolloutCorrectionConfig
from flowgrpo_rc.correction.plan import SAFETY_BOUND, Criterion, ImportanceSampling

_STATISTICS = {"k1": "the ratio", "k2": "k2 = l^2/2", "k3": "k3 = r - 1 - l"}
_AGGREGATES = {
    "token": "each element alone",
    "seq_sum": "a row's total",
    "seq_mean": "a row's mean",
    "seq_max": "a row's largest value",
}
_ROW_RATIOS = {"token": "ratio", "seq_sum": "product of ratios", "seq_mean": "geometric-mean ratio"}
_LEVELS = {
    "token": "each element's ratio",
    "sequence": "the product of a row's ratios",
    "geometric": "the geometric mean of a row's ratios",
}


@dataclass(frozen=True, slots=True)
class Explanation:
    """A configuration in words."""

    text: str
    warnings: tuple[str, ...]


def explain(config: RolloutCorrectionConfig) -> Explanation:
    """Says which policies a configuration uses, what it clips, weights and rejects, and what that costs."""
    lines = (
        f"Algorithm: {_algorithm(config)}",
        f"Policies:  {_policies(config)}",
        f"Clipped:   {_clipped(config)}",
        f"Weighted:  {_weighted(config)}",
        f"Rejected:  {_rejected(config)}",
        f"Cost:      {_cost(config)}",
        f"Guard:     {_guard(config)}",
    )
    return Explanation("\n".join(lines), tuple(_mistakes(config)))


def in_force(config: RolloutCorrectionConfig) -> str:
    """What acts on the loss, in one line: mode, weights, rejection; what only measures is said to do so."""
    plan = config.plan()
    mode = "decoupled mode (pi_old recomputed)"
    if config.bypass_mode:
        mode = f"bypass mode (pi_old = pi_rollout, {config.loss_type})"
    parts = []
    if not config.weights_act:
        parts.append("the PPO ratio pi_theta/pi_rollout is the importance weight itself")
        if plan.importance is not None and plan.importance.mode != "mask":
            parts.append(f"rollout_is={config.rollout_is} is measured, not applied")
    elif plan.importance is not None:
        norm = ", divided by their batch mean" if plan.importance.batch_normalize else ""
        parts.append(f"weights {_LEVELS[plan.importance.level]} {_ratio(config)}, {_bounds(plan.importance)}{norm}")
    rejected = _rejections(config)
    if rejected:
        parts.append(f"rejects {'; '.join(rejected)}")
    if config.weights_act and plan.importance is None and not rejected:
        parts.append("no importance weights, no rejection: the gap to pi_rollout is measured, not corrected")
    return f"{mode}: {'; '.join(parts)}"


def _ratio(config: RolloutCorrectionConfig) -> str:
    return "pi_theta/pi_rollout" if config.bypass_mode else "pi_old/pi_rollout"


def _algorithm(config: RolloutCorrectionConfig) -> str:
    plan = config.plan()
    parts = []
    if plan.importance is not None and config.weights_act:
        names = {
            "truncate": "truncated importance sampling",
            "zero": "IcePop",
            "clip": "clipped importance sampling",
        }
        parts.append(names.get(plan.importance.mode, "masked importance sampling"))
    if plan.can_reject:
        parts.append("rejection sampling")
    extras = " with " + " and ".join(parts) if parts else ""
    if not config.bypass_mode:
        return f"decoupled PPO{extras}" if extras else "PPO against pi_old; the rollout gap is measured, not corrected"
    return f"off-policy REINFORCE{extras}" if config.loss_type == "reinforce" else f"PPO in bypass mode{extras}"


def _policies(config: RolloutCorrectionConfig) -> str:
    if config.bypass_mode:
        return "two: pi_rollout (behaviour, and in place of pi_old) and pi_theta (trained)"
    return "three: pi_rollout (behaviour), pi_old (recomputed, centre of the clip) and pi_theta (trained)"


def _clipped(config: RolloutCorrectionConfig) -> str:
    if config.bypass_mode and config.loss_type == "reinforce":
        return "nothing"
    return f"the PPO ratio {'pi_theta/pi_rollout' if config.bypass_mode else 'pi_theta/pi_old'}, around 1"


def _weighted(config: RolloutCorrectionConfig) -> str:
    spec = config.plan().importance
    if spec is None:
        return "nothing"
    if not config.weights_act:
        does = "rejects (rollout_is_mode=mask)" if spec.mode == "mask" else "adds diagnostics"
        return f"nothing: the PPO ratio is the importance weight; rollout_is only {does}"
    when = "at every mini-step" if config.bypass_mode else "once per batch"
    norm = ", then divided by their mean over the batch" if spec.batch_normalize else ""
    return f"the loss, by {_LEVELS[spec.level]} {_ratio(config)}, {_bounds(spec)}{norm}; fixed {when}, no gradient"


def _bounds(spec: ImportanceSampling) -> str:
    if spec.mode == "truncate":
        return f"at most {spec.upper:g}"
    if spec.mode == "zero":
        return f"0 outside [{spec.lower:g}, {spec.upper:g}]"
    if spec.mode == "clip":
        return f"clipped into [{spec.lower:g}, {spec.upper:g}]"
    return f"unbounded, with what lies outside [{spec.lower:g}, {spec.upper:g}] rejected"


def _rejected(config: RolloutCorrectionConfig) -> str:
    parts = _rejections(config)
    if not parts:
        return "nothing"
    share = "they stay in the denominator" if config.rejection_normalization == "all" else "they leave the denominator"
    return "; ".join(parts) + f"; on the diffusion path {share} of the mean"


def _rejections(config: RolloutCorrectionConfig) -> list[str]:
    """What each criterion rejects, the veto and `rollout_is_mode=mask` included."""
    plan = config.plan()
    parts = [_criterion(c, _ratio(config)) for c in plan.criteria]
    if plan.importance is not None and plan.importance.mode == "mask":
        spec = plan.importance
        parts.append(f"what has {_LEVELS[spec.level]} outside [{spec.lower:g}, {spec.upper:g}]")
    if plan.log_veto is not None:
        parts.append(f"rows with one ratio {_ratio(config)} below {math.exp(plan.log_veto):g} (veto)")
    return parts


def _criterion(c: Criterion, ratio: str) -> str:
    unit = "elements" if c.aggregate == "token" else "rows"
    if c.calibrated:
        return f"rows of which {c.name} is beyond what the measured gap of their timesteps explains (auto)"
    if c.statistic == "k1":
        low, high = math.exp(c.lower), math.exp(c.upper)
        return f"{unit} whose {_ROW_RATIOS[c.aggregate]} {ratio} is outside [{low:g}, {high:g}] ({c.name})"
    return f"{unit} where {_STATISTICS[c.statistic]}, {_AGGREGATES[c.aggregate]}, exceeds {c.upper:g} ({c.name})"


def _cost(config: RolloutCorrectionConfig) -> str:
    if config.bypass_mode:
        return "no scoring pass; weights and rejection are recomputed at every mini-step"
    if config.rollout_is_batch_normalize:
        return "a scoring pass of the actor per batch (batch normalisation needs all of it first)"
    return "a scoring pass of the actor per batch, or none where the first mini-batch's own forward supplies pi_old"


def _guard(config: RolloutCorrectionConfig) -> str:
    """Of a training run; thresholds may be text."""
    if config.guard == "off":
        return "none"
    does = "falls back to decoupled mode" if config.guard == "fallback" and config.bypass_mode else "warns"
    clip = f"{float(config.guard_clip_fraction):.0%} clipped before anything is learned, "
    return (
        f"{does} after {config.guard_patience} updates in a row with more than "
        f"{clip if config.loss_type == 'ppo_clip' else ''}{float(config.guard_rejected_fraction):.0%} rejected, or an "
        f"engine gap of {float(config.guard_engine_gap):g} per latent dimension"
    )


def _mistakes(config: RolloutCorrectionConfig) -> list[str]:
    plan = config.plan()
    found = []
    corrects = plan.importance is not None or plan.can_reject
    if not config.bypass_mode and not corrects:
        found.append(
            "PPO against pi_old while the rollout policy is ignored: nothing corrects pi_old/pi_rollout. "
            "Set rollout_is, or bypass_mode=true."
        )
    if not config.weights_act and plan.importance is not None and plan.importance.mode != "mask":
        found.append(
            "rollout_is in bypass mode with ppo_clip: applied weights would count pi_theta/pi_rollout twice, so they "
            "are diagnostics only. Set rollout_is=null, or loss_type=reinforce."
        )
    if config.bypass_mode and config.loss_type == "reinforce" and not corrects:
        found.append("REINFORCE on off-policy data without weights or rejection is biased. Set rollout_is.")
    if config.guard == "fallback" and not config.bypass_mode:
        found.append("guard=fallback has nothing to fall back to: the run is in decoupled mode already.")
    found.extend(_one_step_warnings(config))
    found.extend(_never_binding(config))
    if plan.can_reject and config.rejection_normalization == "all":
        found.append(
            "rejected elements stay in the denominator of the diffusion loss, which shrinks the gradient by "
            "kept/total. rejection_normalization=kept avoids that."
        )
    found.extend(_idle(config))
    return found


def _idle(config: RolloutCorrectionConfig) -> list[str]:
    """Settings of weights or rejection that are not there."""
    found = []
    if config.rollout_rs is None and config.rollout_rs_threshold is not None:
        found.append(f"rollout_rs_threshold={config.rollout_rs_threshold!r} has no rollout_rs to act on.")
    if config.rollout_is is None:
        for field in fields(config):
            name, value = field.name, getattr(config, field.name)
            if name.startswith("rollout_is_") and value not in (field.default, None):
                found.append(f"{name}={value!r} has no rollout_is to act on: there are no weights.")
    return found


def _one_step_warnings(config: RolloutCorrectionConfig) -> list[str]:
    rows = [c.name for c in config.plan().criteria if c.aggregate != "token"]
    if not (config.bypass_mode and rows):
        return []
    return [
        f"{', '.join(rows)} in bypass mode: a loss that is fed one SDE step at a time, (B,) or (B, 1), can only see "
        "that step, and every criterion then acts per step. Feed it (B, W)."
    ]


def _never_binding(config: RolloutCorrectionConfig) -> list[str]:
    """Bounds that the safety clamp, or the scale of mean-pooled SDE log-probs, keeps out of reach."""
    plan = config.plan()
    found = []
    spec = plan.importance
    if spec is not None and math.log(spec.upper) >= SAFETY_BOUND:
        found.append(f"rollout_is_threshold: the upper bound {spec.upper:g} can never bind; ratios end at exp(20).")
    if plan.log_veto is not None and plan.log_veto >= 0:
        found.append("rollout_token_veto_threshold of 1 or more rejects rows with any ratio below it: usually all.")
    for c in plan.criteria:
        if c.calibrated:
            continue
        if _out_of_reach(c):
            found.append(f"the threshold of {c.name} can never bind: log ratios are clamped to +-20.")
        elif c.statistic == "k1" and not c.lower <= 0.0 <= c.upper:
            found.append(f"the band of {c.name} excludes a ratio of 1: it rejects samples without any mismatch.")
        elif c.aggregate in ("token", "seq_mean") and _wide(c):
            found.append(
                f"the threshold of {c.name} is wide for SDE steps, whose log-probs are means over latent dimensions "
                "(|l| of 1e-5 to 1e-2): it will hardly ever bind there. For tokens it is usual."
            )
    return found


def _out_of_reach(c: Criterion) -> bool:
    if c.aggregate == "seq_sum":
        return False
    if c.statistic == "k1":
        return c.upper >= SAFETY_BOUND and c.lower <= -SAFETY_BOUND
    largest = 0.5 * SAFETY_BOUND**2 if c.statistic == "k2" else math.exp(SAFETY_BOUND) - 1.0 - SAFETY_BOUND
    return c.upper >= largest


def _wide(c: Criterion) -> bool:
    if c.statistic == "k1":
        return min(c.upper, -c.lower) > 0.1
    return c.upper > 0.5 * 0.1**2
