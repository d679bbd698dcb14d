"""``explain``: the algorithm of a configuration in words, and the classic mistakes in it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import NamedTuple

from flowgrpo_rc.correction.options.config import RolloutCorrectionConfig
from flowgrpo_rc.correction.plan import SAFETY_BOUND, WEIGHT_MODES, CorrectionPlan, Criterion, ImportanceSampling

_LEVELS = {
    "token": "each element's ratio",
    "sequence": "the product of a row's ratios",
    "geometric": "the geometric mean of a row's ratios",
}


class Statistic(NamedTuple):
    """A statistic of rejection, for the words and the warnings about its threshold."""

    words: str
    largest: float
    """Its largest value for one element, whose log ratio is clamped to the safety bound."""
    wide: float
    """Its value at a log ratio of 0.1, far beyond the log ratios of SDE steps."""


STATISTICS = {
    "k1": Statistic("the ratio", SAFETY_BOUND, 0.1),
    "k2": Statistic("k2 = l^2/2", 0.5 * SAFETY_BOUND**2, 0.005),
    "k3": Statistic("k3 = r - 1 - l", math.exp(SAFETY_BOUND) - 1.0 - SAFETY_BOUND, 0.005),
}
_AGGREGATES = {
    "token": "each element alone",
    "seq_sum": "a row's total",
    "seq_mean": "a row's mean",
    "seq_max": "a row's largest value",
}
_ROW_RATIOS = {"token": "ratio", "seq_sum": "product of ratios", "seq_mean": "geometric-mean ratio"}


@dataclass(frozen=True, slots=True)
class Explanation:
    """A configuration in words."""

    text: str
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CleanImages:
    """An objective on clean images, which is in decoupled mode and learns from matching errors."""

    has_old: bool  # It compares with an old policy
    clips: bool  # It clips the ratio to that
    averaged: bool  # The old policy is an average of the actor, and draws


def explain(config: RolloutCorrectionConfig, clean: CleanImages | None = None) -> Explanation:
    """Describe the policies of a configuration, its clip, weights and rejection, and their cost; ``clean`` where the
    objective learns from clean images."""
    if clean is not None:
        policies, cost = _on_clean_images(clean)
    elif config.bypass_mode:
        policies = "two: pi_rollout (behaviour, and in place of pi_old) and pi_theta (trained)"
        cost = "no scoring pass; weights and rejection are recomputed at every mini-step"
    else:
        policies = "three: pi_rollout (behaviour), pi_old (recomputed, centre of the clip) and pi_theta (trained)"
        cost = "a scoring pass of the actor per batch, or none where the first mini-batch's own forward supplies pi_old"
        if config.rollout_is_batch_normalize:
            cost = "a scoring pass of the actor per batch (batch normalisation needs all of it first)"
    clipped = f"the PPO ratio {'pi_theta/pi_rollout' if config.bypass_mode else 'pi_theta/pi_old'}, around 1"
    rejected = "nothing"
    if rejections := _rejections(config):
        stay = "they stay in" if config.rejection_normalization == "all" else "they leave"
        rejected = f"{'; '.join(rejections)}; on the diffusion path {stay} the denominator of the mean"
    if clean is not None:
        clipped = "the ratio pi_theta/pi_old of matching errors, around 1" if clean.clips else "nothing"
    lines = (
        f"Algorithm: {_algorithm(config) if clean is None else 'an objective on clean images'}",
        f"Policies:  {policies}",
        f"Clipped:   {'nothing' if config.loss_type == 'reinforce' else clipped}",
        f"Weighted:  {_weighted(config)}",
        f"Rejected:  {rejected}",
        f"Cost:      {cost}",
        f"Guard:     {_guard(config, clean is not None)}",
    )
    return Explanation("\n".join(lines), tuple(_mistakes(config, clean is not None)))


def _on_clean_images(clean: CleanImages) -> tuple[str, str]:
    """The policies and the cost."""
    drew = "pi_rollout (drew the images, an older actor only with a lag)"
    late = "a scoring pass of the adapter that drew, where a lag is corrected"
    if not clean.has_old:
        return f"{drew}, pi_ref (the reference) and pi_theta (trained)", f"a forward pass of the reference; {late}"
    if clean.averaged:
        return f"{drew}, pi_old (an average of the actor) and pi_theta (trained)", f"a scoring pass of pi_old; {late}"
    cost = "a scoring pass of pi_old per batch, or none where the first mini-batch's own forward supplies it"
    return f"{drew}, pi_old (the actor before the batch) and pi_theta (trained)", f"{cost}; {late}"


def in_force(config: RolloutCorrectionConfig) -> str:
    """One line about the mode, weights and rejection that act on the loss, and about weights that are only measured."""
    weights = config.plan().importance
    mode = "decoupled mode (pi_old recomputed)"
    if config.bypass_mode:
        mode = f"bypass mode (pi_old = pi_rollout, {config.loss_type})"
    parts: list[str] = []
    if not config.weights_act:
        # Weights would count the same ratio twice.
        parts.append("the PPO ratio pi_theta/pi_rollout is the importance weight itself")
        if weights is not None and weights.mode != "mask":
            parts.append(f"rollout_is={config.rollout_is} is measured, not applied")
    elif weights is not None:
        norm = ", divided by their batch mean" if weights.batch_normalize else ""
        parts.append(f"weights {_weights(config, weights)}{norm}")
    if rejected := _rejections(config):
        parts.append(f"rejects {'; '.join(rejected)}")
    nothing = "no importance weights, no rejection: the gap to pi_rollout is measured, not corrected"
    return f"{mode}: {'; '.join(parts) or nothing}"


def _ratio(config: RolloutCorrectionConfig) -> str:
    return "pi_theta/pi_rollout" if config.bypass_mode else "pi_old/pi_rollout"


def _algorithm(config: RolloutCorrectionConfig) -> str:
    plan = config.plan()
    parts = []
    if plan.importance is not None and config.weights_act:
        parts.append(WEIGHT_MODES[plan.importance.mode].title)
    if plan.can_reject:
        parts.append("rejection sampling")
    extras = " with " + " and ".join(parts) if parts else ""
    if not config.bypass_mode:
        return f"decoupled PPO{extras}" if extras else "PPO against pi_old; the rollout gap is measured, not corrected"
    return f"off-policy REINFORCE{extras}" if config.loss_type == "reinforce" else f"PPO in bypass mode{extras}"


def _weighted(config: RolloutCorrectionConfig) -> str:
    weights = config.plan().importance
    if weights is None:
        return "nothing"
    if not config.weights_act:
        does = "rejects (rollout_is_mode=mask)" if weights.mode == "mask" else "adds diagnostics"
        return f"nothing: the PPO ratio is the importance weight; rollout_is only {does}"
    when = "at every mini-step" if config.bypass_mode else "once per batch"
    norm = ", then divided by their mean over the batch" if weights.batch_normalize else ""
    return f"the loss, by {_weights(config, weights)}{norm}; fixed {when}, no gradient"


def _weights(config: RolloutCorrectionConfig, weights: ImportanceSampling) -> str:
    bounds = WEIGHT_MODES[weights.mode].effect.format(lower=weights.lower, upper=weights.upper)
    return f"{_LEVELS[weights.level]} {_ratio(config)}, {bounds}"


def _rejections(config: RolloutCorrectionConfig) -> list[str]:
    """One phrase for each criterion, for the veto and for ``rollout_is_mode=mask``."""
    plan = config.plan()
    ratio = _ratio(config)
    parts = [_criterion(criterion, ratio) for criterion in plan.criteria]
    weights = plan.importance
    if weights is not None and weights.mode == "mask":
        parts.append(f"what has {_LEVELS[weights.level]} outside [{weights.lower:g}, {weights.upper:g}]")
    if plan.log_veto is not None:
        parts.append(f"rows with one ratio {ratio} below {math.exp(plan.log_veto):g} (veto)")
    return parts


def _criterion(c: Criterion, ratio: str) -> str:
    unit = "elements" if c.aggregate == "token" else "rows"
    if c.calibrated:
        return f"rows of which {c.name} is beyond what the measured gap of their timesteps explains (auto)"
    if c.statistic == "k1":
        bounds = f"[{math.exp(c.lower):g}, {math.exp(c.upper):g}]"
        return f"{unit} whose {_ROW_RATIOS[c.aggregate]} {ratio} is outside {bounds} ({c.name})"
    return f"{unit} where {STATISTICS[c.statistic].words}, {_AGGREGATES[c.aggregate]}, exceeds {c.upper:g} ({c.name})"


def _guard(config: RolloutCorrectionConfig, clean: bool) -> str:
    if config.guard == "off":
        return "none"
    if clean:
        return (
            f"warns after {config.guard_patience} updates in a row with {config.guard_rejected_fraction:.0%} rejected"
        )
    does = "falls back to decoupled mode" if config.guard == "fallback" and config.bypass_mode else "warns"
    clip = f"{config.guard_clip_fraction:.0%} clipped before anything is learned, "
    return (
        f"{does} after {config.guard_patience} updates in a row with more than "
        f"{clip if config.loss_type == 'ppo_clip' else ''}{config.guard_rejected_fraction:.0%} rejected, or an "
        f"engine gap of {config.guard_engine_gap:g} per latent dimension"
    )


def _mistakes(config: RolloutCorrectionConfig, clean: bool) -> Iterator[str]:
    plan = config.plan()
    corrects = plan.importance is not None or plan.can_reject
    by_row = [criterion.name for criterion in plan.criteria if criterion.aggregate != "token"]
    if not config.bypass_mode and not corrects and not clean:
        yield (
            "PPO against pi_old while the rollout policy is ignored: nothing corrects pi_old/pi_rollout. "
            "Set rollout_is, or bypass_mode=true."
        )
    if not config.weights_act and plan.importance is not None and plan.importance.mode != "mask":
        yield (
            "rollout_is in bypass mode with ppo_clip: applied weights would count pi_theta/pi_rollout twice, so they "
            "are diagnostics only. Set rollout_is=null, or loss_type=reinforce."
        )
    # Nothing else corrects for the rollout policy there, since that loss has no ratio.
    if config.loss_type == "reinforce" and not corrects:
        yield "REINFORCE on off-policy data without weights or rejection is biased. Set rollout_is."
    if config.guard == "fallback" and not config.bypass_mode:
        yield "guard=fallback has nothing to fall back to: the run is in decoupled mode already."
    # Silent otherwise: each step would be judged alone.
    if config.bypass_mode and by_row:
        yield (
            f"{', '.join(by_row)} in bypass mode: a loss that is fed one SDE step at a time, (B,) or (B, 1), can only "
            "see that step, and every criterion then acts per step. Feed it (B, W)."
        )
    yield from _never_binding(plan)
    if plan.can_reject and config.rejection_normalization == "all":
        yield (
            "rejected elements stay in the denominator of the diffusion loss, which shrinks the gradient by "
            "kept/total. rejection_normalization=kept avoids that."
        )
    # Settings of weights or rejection that are not there.
    if config.rollout_rs is None and config.rollout_rs_threshold is not None:
        yield f"rollout_rs_threshold={config.rollout_rs_threshold!r} has no rollout_rs to act on."
    for field in fields(config) if config.rollout_is is None else ():
        value = getattr(config, field.name)
        if field.name.startswith("rollout_is_") and value not in (field.default, None):
            yield f"{field.name}={value!r} has no rollout_is to act on: there are no weights."


def _never_binding(plan: CorrectionPlan) -> Iterator[str]:
    """Bounds that the safety clamp, or the scale of mean-pooled SDE log-probs, keeps out of reach."""
    weights = plan.importance
    if weights is not None and weights.log_bounds[1] >= SAFETY_BOUND:
        yield f"rollout_is_threshold: the upper bound {weights.upper:g} can never bind; ratios end at exp(20)."
    if plan.log_veto is not None and plan.log_veto >= 0:
        yield "rollout_token_veto_threshold of 1 or more rejects rows with any ratio below it: usually all."
    for c in plan.criteria if not plan.calibrated else ():
        # A sum over a row grows with its length, and has no largest or usual value.
        statistic = STATISTICS[c.statistic]
        if c.aggregate != "seq_sum" and c.upper >= statistic.largest and c.lower <= -SAFETY_BOUND:
            yield f"the threshold of {c.name} can never bind: log ratios are clamped to +-20."
        elif c.statistic == "k1" and not c.lower <= 0.0 <= c.upper:
            yield f"the band of {c.name} excludes a ratio of 1: it rejects samples without any mismatch."
        elif c.aggregate in ("token", "seq_mean") and c.upper > statistic.wide and c.lower < -STATISTICS["k1"].wide:
            yield (
                f"the threshold of {c.name} is wide for SDE steps, whose log-probs are means over latent dimensions "
                "(|l| of 1e-5 to 1e-2): it will hardly ever bind there. For tokens it is usual."
            )
