"""The probe's advice before training: is this configuration safe, why, and what would be.

The limits stand in ``limits``, the rule from a measured figure, its interval and its limit to a verdict in
``verdict``, and what to do about a figure in ``remedies``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from flowgrpo_rc.actor.mode import ModeInForce
from flowgrpo_rc.correction import RolloutCorrectionConfig
from flowgrpo_rc.gap.drift import Drift
from flowgrpo_rc.gap.intervals import CONFIDENCE, MOST_IMAGES, Interval, images_to_settle
from flowgrpo_rc.gap.limits import (
    CLIP,
    CLIP_FACTOR,
    DRIFT,
    DRIFT_NOT_SAFE,
    DRIFT_SAFE,
    ENGINE_GAP,
    LIMITS,
    REJECTED,
    WIDEST_CLIP,
    ZEROED,
    clip_not_safe,
)
from flowgrpo_rc.gap.remedies import CLIP_AT_TIMESTEP, RunSetup, remedy
from flowgrpo_rc.gap.verdict import NOT_SAFE, NOT_SHOWN_SAFE, SAFE, JudgedFigure, decisive, interval_words, judge


@dataclass(frozen=True)
class StepGap:
    """The gap ``l = log pi_actor - log pi_engine`` with equal weights, at one timestep or over all of them."""

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
    """90 % quantile of what the objective holds against its limit, in its own unit; ``abs_q90`` where that is the log
    ratio itself."""
    clipped: float
    """Share of the samples in use that lie beyond the objective's limit. Like the next two it is expected over the
    noise that these images might have had, not counted."""
    rejected: float
    """Share of samples that the configured rejection removes for the gap alone."""
    zeroed: float
    """Share of samples that are kept, but with an importance weight of 0 in the loss."""
    nats: float
    """Mean ``|l|`` of the whole step, in nats."""
    kl_nats: float
    """Closed-form KL of the step's Gaussian, engine to actor, in nats."""
    images: int
    """Independent images among the ``count`` samples."""
    clipped_interval: Interval
    """Where the share ``clipped`` lies among all images that could be drawn."""
    rejected_interval: Interval
    """The interval of ``rejected``."""
    zeroed_interval: Interval
    """The interval of ``zeroed``."""
    nats_interval: Interval
    """The interval of ``nats``."""


@dataclass(frozen=True)
class Advice:
    """What the gap means for this configuration."""

    verdict: str
    """``verdict.SAFE``, ``NOT_SHOWN_SAFE`` or ``NOT_SAFE``: the worst of ``judged``, or what a failed update says."""
    because: str
    """What decided it, in one phrase."""
    judged: tuple[JudgedFigure, ...]
    """Each figure that has a limit, with its interval and its own verdict."""
    mode: str
    """The recommended mode, ``bypass`` or ``decoupled``."""
    limit_key: str | None
    """Field of ``DiffusionLossConfig`` that sets the objective's limit, such as ``clip_ratio``; None where no limit
    acts."""
    limit: float | str | None
    """The recommended value of that field: three times the 90 % quantile of what is held against the limit, at least
    the configured one (of a clip band with two sides the narrower, and the recommended one is for both); ``auto`` where
    that is configured."""
    rejection_band: str
    """For ``rollout_rs=seq_mean_k1``: holds 99 % of the images for the gap alone, within ``rollout_rs_auto_min`` and
    ``rollout_rs_auto_max``."""
    reasons: tuple[str, ...]

    @property
    def safe(self) -> bool:
        """Whether it has been shown to be safe."""
        return self.verdict == SAFE


def advise(
    mode: ModeInForce,
    overall: StepGap,
    gap: Float[Tensor, "B W"],
    dimensions: int,
    steps: Sequence[StepGap] = (),
    failure: str = "",
    *,
    drift: Drift | None = None,
    adapter_lag: int = 0,
    ahead: int = 0,
    images: int = 0,
    confidence: float = CONFIDENCE,
) -> Advice:
    """The verdict on this configuration, with its reasons in words.

    Args:
        mode: the configured mode, which is judged.
        overall, steps: the gap over all timesteps, and at each.
        gap: ``l`` of every step.
        dimensions: number of latent dimensions.
        drift: what an update would learn from the gap alone; None where that is nothing, or not known.
        failure: why the actor could not take an optimizer step; that is never safe.
        adapter_lag: batches by which the engine's adapter is configured to be behind.
        ahead: batches by which rollouts are configured to be ahead of the actor, with as old an adapter.
        images: measured at every place of the window, to say how many would be enough; 0 where that is not known.
        confidence: of the intervals in ``overall`` and ``steps``.
    """
    judged = judge_all(mode, overall, dimensions, drift)
    engine = judged[ENGINE_GAP]
    clip = judged.get(CLIP)
    limit = mode.objective.limit
    needed = _round_up(CLIP_FACTOR * overall.clip_q90)
    configured = min(limit.ends(mode.diffusion_loss))
    broken = engine.value > engine.limit
    # No limit repairs an engine that computes something else, and REINFORCE has none that the gap could exceed.
    fits = not broken and (needed <= WIDEST_CLIP or (mode.bypasses and not mode.has_limit))
    # A limit wider than the gap needs was chosen for the policy's own movement, so it is not narrowed.
    wanted = max(configured, needed) if fits else configured
    # Where auto_clip_max cuts the gap off, a fixed clip band that holds it is recommended instead.
    unsettled = [name for name in (CLIP, DRIFT) if name in judged and judged[name].verdict != SAFE]
    holds = overall.clipped <= LIMITS[CLIP].not_safe and DRIFT not in unsettled
    calibrated = fits and mode.diffusion_loss.clip_ratio == "auto" and holds
    holding = f"{limit.key}={wanted:g}" if wanted > configured and not calibrated else ""
    reasons = [failure] if failure else []
    reasons += _engine_reasons(mode, engine)
    reasons += _clip_reasons(mode, overall, clip, steps, drifts=DRIFT in unsettled)
    if drift is not None and not judged[DRIFT].high < DRIFT_SAFE / 5:  # which is too little to speak of
        reasons.append(_drift_reason(judged[DRIFT]))
    if (adapter_lag or ahead) and mode.has_limit and (mode.bypasses or fits):
        reasons.append(_lag_reason(mode, f"ahead={ahead}" if ahead >= adapter_lag else f"adapter_lag={adapter_lag}"))
    reasons += _removal_reasons(mode, judged)
    reasons += _image_reasons(overall, judged, images, confidence)
    # Of a clip that is not safe the recommendation says it already, unless a limit was measured to hold the gap.
    if unsettled and (holding or all(judged[name].verdict == NOT_SHOWN_SAFE for name in unsettled)):
        reasons.append(remedy(CLIP, RunSetup.of(mode), holding=holding))
    worst = decisive(list(judged.values()))
    verdict = NOT_SAFE if failure else worst.verdict
    limit_key = None
    recommended = None
    if mode.has_limit:
        limit_key = limit.key
        recommended = "auto" if calibrated else wanted
    return Advice(
        verdict=verdict,
        because=failure or str(worst),
        judged=tuple(judged.values()),
        mode="bypass" if fits else "decoupled",
        limit_key=limit_key,
        limit=recommended,
        rejection_band=_rejection_band(mode.rollout_correction, gap),
        reasons=tuple(reasons),
    )


def judge_all(
    mode: ModeInForce, overall: StepGap, dimensions: int, drift: Drift | None = None
) -> dict[str, JudgedFigure]:
    """Every figure that this configuration is judged by, held against its limit; by its name in ``limits``.

    The clip counts where it is centred at the engine's log-probs, and less where a drift tells what the samples beyond
    it teach; rejection and weights of 0 count where the configuration can make them, since a share that is 0 by
    construction needs no samples to show it.
    """
    correction = mode.rollout_correction
    plan = correction.plan()
    nats = overall.nats_interval
    # The limit holds for every latent size, so it is per dimension.
    scaled = Interval(nats.low / dimensions, nats.high / dimensions, nats.effective)
    figures = {ENGINE_GAP: ("mean |log ratio| per latent dimension", overall.nats / dimensions, scaled)}
    if mode.limits_the_gap:
        figures[CLIP] = (_limit_words(mode), overall.clipped, overall.clipped_interval)
    if plan.can_reject or overall.rejected > 0:
        figures[REJECTED] = ("rejected", overall.rejected, overall.rejected_interval)
    zeroes = correction.weights_act and plan.importance is not None and plan.importance.mode == "zero"
    if zeroes or overall.zeroed > 0:
        figures[ZEROED] = ("importance weights of 0", overall.zeroed, overall.zeroed_interval)
    limits = {name: LIMITS[name].not_safe_for(correction) for name in figures}
    limits[CLIP] = clip_not_safe(drift_known=drift is not None)
    judged = {
        name: judge(what, value, interval, limits[name], is_share=name != ENGINE_GAP)
        for name, (what, value, interval) in figures.items()
    }
    if drift is not None:
        judged[DRIFT] = judge(
            "drift", drift.value, drift.interval, DRIFT_NOT_SAFE, safe_below=DRIFT_SAFE, is_share=False
        )
    return judged


def _limit_words(mode: ModeInForce) -> str:
    """``outside clip_ratio=0.001``: what a sample does that exceeds the objective's limit, as it is configured."""
    limit = mode.objective.limit
    return f"{limit.preposition} {limit.setting(mode.diffusion_loss)}"


def _engine_reasons(mode: ModeInForce, engine: JudgedFigure) -> list[str]:
    """What an engine does whose gap is too wide, or may be."""
    if engine.verdict == SAFE:
        return []
    measured = (
        f"the mean |log ratio| is {engine.value:.2g} ({engine.low:.2g} to {engine.high:.2g}) per latent dimension"
    )
    if engine.verdict == NOT_SAFE:
        return [
            f"{measured}: the engine computes something else than the actor (schedule, guidance, adapter or latents), "
            f"which no correction repairs: {_remedy_clause(ENGINE_GAP, mode)}"
        ]
    return [
        f"{measured}, and the limit of {engine.limit:g}, above which an engine computes something else than the actor, "
        "lies within that interval: more images would show it"
    ]


def _clip_reasons(
    mode: ModeInForce, overall: StepGap, clip: JudgedFigure | None, steps: Sequence[StepGap], *, drifts: bool
) -> list[str]:
    """What the gap does to the configured objective's clip, and at which timesteps that is too much.

    ``drifts`` says that what the samples outside teach is too much, or may be, however few they are.
    """
    if not mode.bypasses:
        reason = "decoupled mode centres the clip on the actor's own log-probs, so the gap is not clipped"
    elif clip is None:
        reason = "reinforce does not clip, so the gap cannot empty the clip band"
    elif not overall.clipped_interval.effective:
        reason = "rejection and weights of 0 leave no sample of which the clip could be measured"
    else:
        reason = _clipped_share(mode, overall, clip, drifts=drifts)
    if clip is None or clip.verdict == NOT_SAFE:
        return [reason]
    return [reason, *(_timestep_reason(mode, step) for step in steps if step.clipped > LIMITS[CLIP].not_safe)]


def _clipped_share(mode: ModeInForce, overall: StepGap, clip: JudgedFigure, *, drifts: bool) -> str:
    share = f"{overall.clipped:.0%} of the samples lie {_limit_words(mode)}"
    text = f"{share} before anything is learned ({interval_words(clip.low, clip.high)}; limit {clip.limit:.0%})"
    if clip.verdict == NOT_SAFE:
        return f"bypass mode clips around the engine's policy, and {text}; what is left is chosen by the engine's error"
    if clip.verdict == NOT_SHOWN_SAFE:
        return f"{text}: the limit lies within that interval, so they may be too many"
    costs = overall.clipped > LIMITS[CLIP].costs and not drifts
    return f"{text}: runs like that learned, but less than with a wider clip band" if costs else text


def _timestep_reason(mode: ModeInForce, step: StepGap) -> str:
    """What the clip leaves of one timestep where it leaves out too much, or seems to."""
    ends = step.clipped_interval
    follows = "and what is learned there chosen by that error"
    if ends.low <= LIMITS[CLIP].not_safe:
        follows = "which may be too much there"
    says = f"at timestep {step.timestep:g} it is {step.clipped:.0%} ({interval_words(ends.low, ends.high)}), {follows}"
    return f"{says}: {_remedy_clause(CLIP_AT_TIMESTEP, mode)}"


def _drift_reason(drift: JudgedFigure) -> str:
    """What an update learns from the gap whatever is rewarded, and what that has done to runs."""
    size = f"{drift.value:.2g} ({drift.low:.2g} to {drift.high:.2g}) of one step's gradient"
    limits = f"safe below {drift.safe_below:g}, not safe above {drift.limit:g}"
    text = f"whatever is rewarded, an update moves toward the engine's error, by {size} ({limits})"
    if drift.verdict == NOT_SAFE:
        return f"{text}: runs like that lost what they had learned"
    if drift.verdict == SAFE:
        return text
    if drift.settled:
        return f"{text}: runs like that learned less, and with a high learning rate they lost what they had learned"
    return f"{text}: a limit lies within that interval, and more images would show on which side it is"


def _lag_reason(mode: ModeInForce, setting: str) -> str:
    """What an old adapter adds, by this setting, where the run clips around the engine, or is told to."""
    follows = "clip_ratio=auto follows it, " if mode.diffusion_loss.takes_auto else ""
    return (
        f"{setting} adds the policy's own movement to this gap wherever the clip is centred at the "
        f"engine, most in the first batches, which cannot be measured before training; {follows}guard=fallback watches "
        "it, decoupled mode does without"
    )


def _removal_reasons(mode: ModeInForce, judged: dict[str, JudgedFigure]) -> list[str]:
    """What rejection and weights of 0 take away for the gap alone."""
    found = []
    for name, what in ((REJECTED, "rejection removes"), (ZEROED, "importance weights are 0 for")):
        one = judged.get(name)
        if one is None or (not one.value and one.verdict == SAFE):
            continue
        limit = "" if one.verdict == SAFE else f"; limit {one.limit:.0%}"
        interval = interval_words(one.low, one.high)
        reason = f"{what} {one.value:.0%} of the samples for the gap alone ({interval}{limit})"
        if one.value and limit:
            reason += f": {_remedy_clause(name, mode)}"
        found.append(reason)
    return found


def _image_reasons(overall: StepGap, judged: dict[str, JudgedFigure], images: int, confidence: float) -> list[str]:
    """How many images would show on which side of its limit a share lies, for each that is not settled."""
    intervals = {CLIP: overall.clipped_interval, REJECTED: overall.rejected_interval, ZEROED: overall.zeroed_interval}
    found = []
    for name, interval in intervals.items():
        one = judged.get(name)
        if one is None or one.verdict != NOT_SHOWN_SAFE or not interval.effective:
            continue
        on_which = f"on which side of its limit the share lies ({one.what})"
        if not images:
            found.append(f"more images would show {on_which}")
            continue
        seems = f"if it is what it seems, {one.value:.0%}"
        enough = images_to_settle(
            one.value, interval.effective, images, one.limit, most=MOST_IMAGES, confidence=confidence
        )
        if enough is None:
            found.append(f"not even --images {MOST_IMAGES} would show {on_which}, {seems}: take it for too much")
        else:
            found.append(f"{images} images a place do not show {on_which}; --images {enough} would, {seems}")
    return found


def _remedy_clause(finding: str, mode: ModeInForce) -> str:
    """The remedy as it stands after a colon."""
    sentence = remedy(finding, RunSetup.of(mode))
    return sentence[0].lower() + sentence[1:]


def _rejection_band(correction: RolloutCorrectionConfig, gap: Float[Tensor, "B W"]) -> str:
    half = float(torch.quantile(gap.mean(1).abs(), 0.99))
    half = min(max(half, float(correction.rollout_rs_auto_min)), float(correction.rollout_rs_auto_max))
    digits = 6 if half >= 1e-4 else 12  # of which 6 would round the band's ends onto 1
    return f"{math.exp(-half):.{digits}g}_{math.exp(half):.{digits}g}"


def _round_up(value: float) -> float:
    """To the next of 1, 2, 5 times a power of ten."""
    if value <= 0:
        return 0.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if value <= step * power * (1 + 1e-9))
