"""The verdict of the probe before training: is this configuration safe, and what would be.

The limits stand here, the rule that turns a measured figure, its interval and its limit into a verdict in `verdict.py`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from flowgrpo_rc.gap.clipping import limit_words
from flowgrpo_rc.gap.intervals import CONFIDENCE, MOST_IMAGES, Interval, images_to_settle
from flowgrpo_rc.gap.verdict import NOT_SAFE, NOT_SHOWN_SAFE, SAFE, Judged, decisive, judge, span
from flowgrpo_rc.trainer.config import FlowGRPOConfig

CLIPPED_LIMIT = 0.25
"""Share of samples outside the band before any learning above which bypass mode is called not safe;"""
CLIPPED_MUCH = 0.1
"""and above which it is said to cost."""
BROKEN_GAP = 0.05
"""Mean |log ratio| of one step, in nats per latent dimension, above which the engine computes something else."""
WIDEST = 1e-2
"""A recommended limit is not wider: beyond it clipping no longer limits the policy's own movement."""

ENGINE, CLIP, REJECTED, ZEROED = "engine", "clip", "rejected", "zeroed"
"""The figures that have a limit."""


@dataclass(frozen=True)
class StepGap:
    """The gap ``l = log pi_actor - log pi_engine`` at one timestep, same weights; or over all of them."""

    timestep: float | None
    """None: all steps together."""
    count: int
    mean: float
    abs_mean: float
    abs_median: float
    abs_q90: float
    abs_q99: float
    abs_max: float
    clip_q90: float
    """90 % quantile of what the objective holds against its limit: ``abs_q90``, or with ``grpo_guard`` that of its own
    log ratio, with ``flow_dppo`` of the KL per latent dimension."""
    clipped: float
    """Share of the samples in use that lie beyond the objective's limit."""
    rejected: float
    """Share of samples that the configured rejection removes for the gap alone;"""
    zeroed: float
    """and that it keeps, with an importance weight of 0 in the loss."""
    nats: float
    """Mean ``|l|`` of the whole step, in nats."""
    kl_nats: float
    """Closed-form KL of the step's Gaussian, engine to actor, in nats."""
    images: int
    """Independent images among the ``count`` samples."""
    clipped_interval: Interval
    """Of ``clipped``: where the share lies among all images that could be drawn."""
    rejected_interval: Interval
    """Of ``rejected``."""
    zeroed_interval: Interval
    """Of ``zeroed``."""
    nats_interval: Interval
    """Of ``nats``."""


@dataclass(frozen=True)
class Advice:
    """What the gap means for this configuration."""

    verdict: str
    """``verdict.SAFE``, ``NOT_SHOWN_SAFE`` or ``NOT_SAFE``: the worst of ``judged``, or what a failed update says."""
    because: str
    """What decided it, in one phrase."""
    judged: tuple[Judged, ...]
    """Each figure that has a limit, with its interval and its own verdict."""
    mode: str
    """``bypass`` or ``decoupled``."""
    clip_ratio: float | str | None
    """Three times the 90 % quantile of what is clipped, at least the narrower side of the configured band; ``auto``
    where that is configured; None where the objective has no such band. For both sides: ``clip_ratio_low`` and
    ``_high`` are to be null."""
    kl_mask_threshold: float | None
    """The same of ``flow_dppo``."""
    rejection_band: str
    """For ``rollout_rs=seq_mean_k1``: holds 99 % of the images for the gap alone, within ``rollout_rs_auto_min`` and
    ``rollout_rs_auto_max``."""
    reasons: tuple[str, ...]

    @property
    def safe(self) -> bool:
        """Whether it has been shown to be safe."""
        return self.verdict == SAFE


def advise(
    config: FlowGRPOConfig,
    overall: StepGap,
    gap: Float[Tensor, "B W"],
    dimensions: int,
    steps: Sequence[StepGap] = (),
    failure: str = "",
    *,
    images: int = 0,
    confidence: float = CONFIDENCE,
) -> Advice:
    """The verdict on this configuration, with its reasons in words.

    Args:
        config: what is judged.
        overall, steps: the gap over all timesteps, and at each.
        gap: ``l`` of every step.
        dimensions: of a latent.
        failure: why the actor could not take an optimizer step; that is never safe.
        images: measured at every place of the window, to say how many would be enough; 0 where that is not known.
        confidence: of the intervals in ``overall`` and ``steps``.
    """
    rc, loss = config.rollout_correction, config.actor_rollout_ref.actor.diffusion_loss
    clips, dppo = rc.loss_type == "ppo_clip", loss.loss_mode == "flow_dppo"
    judged = judge_all(config, overall, dimensions)
    deciding = decisive(list(judged.values()))
    engine, clip = judged[ENGINE], judged.get(CLIP)
    needed, narrow = _round_up(3 * overall.clip_q90), _narrowest(config)
    broken = overall.nats / dimensions > BROKEN_GAP
    fits = not broken and (needed <= WIDEST or (rc.bypass_mode and not clips))
    mode = "bypass" if fits else "decoupled"
    wanted = max(narrow, needed) if fits else narrow
    auto = loss.clip_ratio == "auto" and fits and overall.clipped <= CLIPPED_LIMIT
    reasons = [failure] if failure else []
    if engine.verdict != SAFE:
        reasons.append(_of_the_engine(engine))
    reasons.append(_of_the_clip(config, overall, clip))
    if clip is not None and clip.verdict != NOT_SAFE:
        reasons += [_of_a_timestep(config, step) for step in steps if step.clipped > CLIPPED_LIMIT]
    reasons += _of_the_lag(config, mode) + _of_what_is_removed(config, overall, judged)
    effective = {CLIP: overall.clipped_interval, REJECTED: overall.rejected_interval, ZEROED: overall.zeroed_interval}
    for name, one in judged.items():
        if one.verdict == NOT_SHOWN_SAFE and name in effective and effective[name].effective:
            reasons.append(_of_more_images(one, effective[name].effective, images, confidence))
    if clip is not None and clip.verdict != SAFE:
        knob = "kl_mask_threshold" if dppo else "clip_ratio"
        holds = f"{knob}={wanted:g} holds the gap; " if fits and wanted > narrow and not auto else ""
        if holds or clip.verdict == NOT_SHOWN_SAFE:
            reasons.append(f"{holds}decoupled mode does without")
    return Advice(
        verdict=NOT_SAFE if failure else deciding.verdict,
        because=failure or str(deciding),
        judged=tuple(judged.values()),
        mode=mode,
        clip_ratio=None if not clips or dppo else ("auto" if auto else wanted),
        kl_mask_threshold=wanted if clips and dppo else None,
        rejection_band=_rejection_band(config, gap),
        reasons=tuple(reasons),
    )


def judge_all(config: FlowGRPOConfig, overall: StepGap, dimensions: int) -> dict[str, Judged]:
    """Every figure that this configuration is judged by, held against its limit.

    The clip counts where it is centred at the engine's log-probs; rejection and weights of 0 where the configuration
    can make them, since a share that is 0 by construction needs no samples to show it.
    """
    rc, loss = config.rollout_correction, config.actor_rollout_ref.actor.diffusion_loss
    plan, removed = rc.plan(), float(rc.guard_rejected_fraction)
    nats = overall.nats_interval
    scaled = Interval(nats.low / dimensions, nats.high / dimensions, nats.effective)
    what = "mean |log ratio| per latent dimension"
    judged = {ENGINE: judge(what, overall.nats / dimensions, scaled, BROKEN_GAP, is_share=False)}
    if rc.bypass_mode and rc.loss_type == "ppo_clip":
        what = f"{_where(config)} {limit_words(loss)}"
        judged[CLIP] = judge(what, overall.clipped, overall.clipped_interval, CLIPPED_LIMIT)
    if plan.can_reject or overall.rejected > 0:
        judged[REJECTED] = judge("rejected", overall.rejected, overall.rejected_interval, removed)
    zeroes = rc.weights_act and plan.importance is not None and plan.importance.mode == "zero"
    if zeroes or overall.zeroed > 0:
        judged[ZEROED] = judge("importance weights of 0", overall.zeroed, overall.zeroed_interval, removed)
    return judged


def _narrowest(config: FlowGRPOConfig) -> float:
    """The narrower side of the objective's configured limit."""
    loss = config.actor_rollout_ref.actor.diffusion_loss
    if loss.loss_mode == "flow_dppo":
        return float(loss.kl_mask_threshold)
    width = float(loss.auto_clip_min if loss.clip_ratio == "auto" else loss.clip_ratio)
    return min(width if side is None else float(side) for side in (loss.clip_ratio_low, loss.clip_ratio_high))


def _where(config: FlowGRPOConfig) -> str:
    return "beyond" if config.actor_rollout_ref.actor.diffusion_loss.loss_mode == "flow_dppo" else "outside"


def _of_the_engine(engine: Judged) -> str:
    """What an engine does whose gap is too wide, or may be."""
    measured = (
        f"the mean |log ratio| is {engine.value:.2g} ({engine.low:.2g} to {engine.high:.2g}) per latent dimension"
    )
    if engine.verdict == NOT_SAFE:
        return (
            f"{measured}: the engine computes something else than the actor (schedule, guidance, adapter or latents), "
            "which no correction repairs"
        )
    return (
        f"{measured}, and the limit of {engine.limit:g}, above which an engine computes something else than the actor, "
        "lies within that interval: more images would show it"
    )


def _of_the_clip(config: FlowGRPOConfig, overall: StepGap, clip: Judged | None) -> str:
    """What the gap does to the configured objective's clip."""
    rc, loss = config.rollout_correction, config.actor_rollout_ref.actor.diffusion_loss
    if not rc.bypass_mode:
        return "decoupled mode centres the clip on the actor's own log-probs, so the gap is not clipped"
    if clip is None:
        return "reinforce does not clip, so the gap cannot empty the band"
    if not overall.clipped_interval.effective:
        return "rejection and weights of 0 leave no sample of which the clip could be measured"
    share = f"{overall.clipped:.0%} of the samples lie {_where(config)} {limit_words(loss)}"
    text = f"{share} before anything is learned ({span(clip.low, clip.high)}; limit {clip.limit:.0%})"
    if clip.verdict == NOT_SAFE:
        return f"bypass mode clips around the engine's policy, and {text}; what is left is chosen by the engine's error"
    if clip.verdict == NOT_SHOWN_SAFE:
        return f"{text}: the limit lies within that interval, so they may be too many"
    costs = overall.clipped > CLIPPED_MUCH
    return f"{text}: runs like that learned, but less than with a wider band" if costs else text


def _of_a_timestep(config: FlowGRPOConfig, step: StepGap) -> str:
    """What the clip leaves of one timestep where it leaves out too much, or seems to."""
    loss = config.actor_rollout_ref.actor.diffusion_loss
    own = ""
    if loss.clip_ratio == "auto":
        own = ", a higher auto_clip_max hold it"
    elif loss.takes_auto:
        own = ", clip_ratio=auto give every timestep a band of its own"
    ends = step.clipped_interval
    follows = "and what is learned there chosen by that error"
    if ends.low <= CLIPPED_LIMIT:
        follows = "which may be too much there"
    says = f"at timestep {step.timestep:g} it is {step.clipped:.0%} ({span(ends.low, ends.high)}), {follows}"
    return f"{says}; rollout.algo.sde_window_range can leave it out{own}"


def _of_more_images(judged: Judged, effective: float, images: int, confidence: float) -> str:
    """How many images would show on which side of its limit a share lies."""
    on_which = f"on which side of its limit the share lies ({judged.what})"
    if not images:
        return f"more images would show {on_which}"
    seems = f"if it is what it seems, {judged.value:.0%}"
    enough = images_to_settle(judged.value, effective, images, judged.limit, most=MOST_IMAGES, confidence=confidence)
    if enough is None:
        return f"not even --images {MOST_IMAGES} would show {on_which}, {seems}: take it for too much"
    return f"{images} images a place do not show {on_which}; --images {enough} would, {seems}"


def _of_the_lag(config: FlowGRPOConfig, mode: str) -> list[str]:
    """Where the run clips around the engine, or is told to."""
    rc, lag = config.rollout_correction, config.actor_rollout_ref.rollout.adapter_lag
    loss = config.actor_rollout_ref.actor.diffusion_loss
    if not lag or rc.loss_type != "ppo_clip" or not (rc.bypass_mode or mode == "bypass"):
        return []
    follows = "clip_ratio=auto follows it, " if loss.takes_auto else ""
    return [
        f"adapter_lag={lag} adds the policy's own movement to this gap wherever the clip is centred at the engine, "
        f"most in the first batches, which cannot be measured before training; {follows}guard=fallback watches it, "
        "decoupled mode does without"
    ]


def _of_what_is_removed(config: FlowGRPOConfig, overall: StepGap, judged: Mapping[str, Judged]) -> list[str]:
    rc, found = config.rollout_correction, []
    for share, name, what, knob in (
        (overall.rejected, REJECTED, "rejection removes", rc.rejection_limit_key),
        (overall.zeroed, ZEROED, "importance weights are 0 for", "rollout_is_threshold"),
    ):
        one = judged.get(name)
        if one is None or (not share and one.verdict == SAFE):
            continue
        remedy = f": widen {knob}" if share and one.verdict != SAFE else ""
        limit = f"; limit {one.limit:.0%}" if one.verdict != SAFE else ""
        found.append(f"{what} {share:.0%} of the samples for the gap alone ({span(one.low, one.high)}{limit}){remedy}")
    return found


def _rejection_band(config: FlowGRPOConfig, gap: Float[Tensor, "B W"]) -> str:
    rc = config.rollout_correction
    half = float(torch.quantile(gap.mean(1).abs(), 0.99))
    half = min(max(half, float(rc.rollout_rs_auto_min)), float(rc.rollout_rs_auto_max))
    digits = 6 if half >= 1e-4 else 12
    return f"{math.exp(-half):.{digits}g}_{math.exp(half):.{digits}g}"


def _round_up(value: float) -> float:
    """To the next of 1, 2, 5 times a power of ten."""
    if value <= 0:
        return 0.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if value <= step * power * (1 + 1e-9))
