"""Is bypass mode safe? The limits of the off-policy gap, the verdict on a measured one, and the remedies.

In bypass mode the objective's limit (a clip band or a trust region) is centred at the rollout engine's log-probs. The
gap alone can then exceed it before anything is learned, and the engine's error chooses the samples that remain. Probe,
guard and health report read limits and remedies here; ``docs/gap.md`` has the tables. Importing this loads no torch.

Above ``costs`` learning is slower; above ``not_safe`` runs were lost, or most of a batch is wasted. One of the two is a
setting of ``algorithm.rollout_correction``, which is also the guard's alarm, and its default is read from there. The
probe compares a figure's confidence interval with the limit: ``safe`` if the whole interval lies below, ``not safe`` if
all of it lies above, else ``not shown safe``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowgrpo_rc.actor.config import DiffusionLossConfig
from flowgrpo_rc.actor.mode import ModeInForce
from flowgrpo_rc.correction.options.config import RolloutCorrectionConfig
from flowgrpo_rc.gap.intervals import CONFIDENCE, MOST_IMAGES, Interval, images_to_settle

if TYPE_CHECKING:
    from flowgrpo_rc.gap.research.drift import Drift

# ---------------------------------------------------------------------- limits

CLIP = "clip"
"""Share of the used samples that the gap alone puts beyond the objective's limit, before anything is learned."""
REJECTED = "rejected"
"""Share of the samples that rejection removes."""
ZEROED = "zeroed"
"""Share of the importance weights in the loss that are 0."""
ENGINE_GAP = "engine_gap"
"""Mean ``|log ratio|`` of actor and engine with equal weights, in nats per latent dimension."""
DRIFT = "drift"
"""Gradient that the gap alone produces, in units of a single step's policy gradient (``gap.research.drift``)."""
CLIP_AT_TIMESTEP = "clip_at_timestep"
"""The same as ``CLIP`` at one timestep. It has a remedy and no limit of its own."""

REPLAY_TEACHES = 0.1
"""Least share of the steps from the replay buffer that should have a gradient: below it a buffer costs time for
nothing."""

GAP_QUANTILE = 0.9
"""Quantile that measures the size of a gap; single outliers do not move it."""
CLIP_FACTOR = 3.0
"""A clip band or KL threshold holds the gap if it is this many times that quantile."""
WIDEST_CLIP = 1e-2
"""Widest clip band that the probe recommends; a wider one no longer limits the policy's own movement. A clip band of
1e-2 matched decoupled mode in every precision (``docs/gap_study.md``)."""


@dataclass(frozen=True, kw_only=True)
class GapLimit:
    """The limits of one figure."""

    costs: float
    """Learning suffers above this."""
    not_safe: float
    """A run is not safe above this."""
    setting: str
    """Key of ``algorithm.rollout_correction`` that sets one of the two, and with it the guard's alarm."""
    guards_costs: bool = False
    """``setting`` is for ``costs`` instead of ``not_safe``."""

    def alarm(self, correction: RolloutCorrectionConfig) -> float:
        """Value above which the guard raises an alarm."""
        return float(getattr(correction, self.setting))

    def not_safe_for(self, correction: RolloutCorrectionConfig) -> float:
        """Value above which the probe judges the configuration not safe."""
        return self.not_safe if self.guards_costs else self.alarm(correction)


_DEFAULTS = RolloutCorrectionConfig()

# The evidence is the runs of docs/learning.md and docs/gap_study.md.
LIMITS: dict[str, GapLimit] = {
    # At .29 to .33 three of five runs unlearned, at .2 none.
    CLIP: GapLimit(
        costs=float(_DEFAULTS.guard_clip_fraction),
        not_safe=0.25,
        setting="guard_clip_fraction",
        # The guard warns early, since a wider clip band costs a running job little. A probe that refused at the same
        # share would refuse runs that learn.
        guards_costs=True,
    ),
    # A fifth rejected did not hurt; half is half of the rollouts for nothing.
    REJECTED: GapLimit(costs=0.1, not_safe=float(_DEFAULTS.guard_rejected_fraction), setting="guard_rejected_fraction"),
    ZEROED: GapLimit(costs=0.05, not_safe=float(_DEFAULTS.guard_rejected_fraction), setting="guard_rejected_fraction"),
    # bfloat16 gave 2.4e-4, fp8 weights 9e-4; at .05 the engine computes something else.
    ENGINE_GAP: GapLimit(costs=5e-3, not_safe=float(_DEFAULTS.guard_engine_gap), setting="guard_engine_gap"),
}

DRIFT_SAFE = 0.006
"""Below this drift a configuration is safe. Above it learning suffers, by how much depends on the learning rate: at
.0064 a run lost .02 of held-out reward, and one at four times its rate .11 (``docs/gap_study.md``)."""
DRIFT_NOT_SAFE = 0.0075
"""Above this drift a configuration is not safe. Of the settings that both limits were chosen on, those that lost more
than .08 of held-out reward have .0077 and more, and those that lost less than .03 have .0052 and less."""
CLIP_BESIDE_DRIFT = 0.5
"""Limit of the clipped share if the drift is known: above it, more than a quarter of the samples teach nothing. Below
it the drift decides: of two settings with .41 and .45 clipped, one lost .41 of held-out reward and the other .03, and
only their drift differed."""


TOKEN_GAP_NOT_SAFE = 1.0
"""Mean ``|log ratio|`` of a token in nats above which a language model's engine computes something else; customary."""


def clip_not_safe(*, drift_known: bool) -> float:
    """Clipped share above which the probe judges a configuration not safe."""
    return CLIP_BESIDE_DRIFT if drift_known else LIMITS[CLIP].not_safe


# ---------------------------------------------------------------------- remedies

USUAL_MODE = ModeInForce(
    RolloutCorrectionConfig(bypass_mode=True, rollout_rs="seq_mean_k1", rollout_rs_threshold="0.999_1.001"),
    DiffusionLossConfig(clip_ratio=1e-3),
)
"""The usual run, for remedies on metrics that come without a configuration."""


def remedy(finding: str, mode: ModeInForce, *, fallen_back: bool = False, of_tokens: bool = False) -> str:
    """Return what to do about a figure beyond its limit, as a sentence without its full stop.

    The remedy is neither in force already nor refused by the configuration.

    Args:
        finding: a figure of ``LIMITS``, or ``CLIP_AT_TIMESTEP``.
        mode: the configured mode.
        fallen_back: the guard has moved the run to decoupled mode.
        of_tokens: the mode is the prompt writer's, whose settings are in ``algorithm.prompt_writer.actor``.

    Raises:
        KeyError: no such finding.
    """
    widen = widen_limit(mode, fallen_back=fallen_back)
    if of_tokens:
        widen = widen.replace("diffusion_loss", "token_loss")
    clip_less = widen
    at_a_timestep = widen
    limits_the_gap = mode.limits_the_gap and not fallen_back
    if limits_the_gap and mode.diffusion_loss.clip_ratio != "auto":
        clip_less += " beyond the gap"
    # Nothing of tokens is calibrated.
    if not of_tokens and may_calibrate_clip(mode, fallen_back=fallen_back):
        clip_less += " or set it to auto"
        at_a_timestep = "Set clip_ratio=auto, whose clip band follows each timestep"
    if limits_the_gap:
        clip_less += ", or set rollout_correction.bypass_mode=false"
    closer = "or bring the engine's precision closer to the actor's"
    return {
        CLIP: clip_less,
        CLIP_AT_TIMESTEP: f"{at_a_timestep}, or move rollout.algo.sde_window_range",
        REJECTED: f"{_reject_less(mode.rollout_correction, calibrates=not of_tokens)}, {closer}",
        ZEROED: f"Widen rollout_is_threshold, {closer}",
        ENGINE_GAP: "Compare dtype, timestep_dtype, quantization, attention kernel and schedule of engine and actor",
    }[finding]


def may_calibrate_clip(mode: ModeInForce, *, fallen_back: bool = False) -> bool:
    """Return true if ``clip_ratio=auto`` is accepted and not configured."""
    loss = mode.diffusion_loss
    return loss.takes_auto and mode.limits_the_gap and not fallen_back and loss.clip_ratio != "auto"


def widen_limit(mode: ModeInForce, *, fallen_back: bool = False) -> str:
    """Return the remedy that gives the objective's limit more room: ``Widen diffusion_loss.clip_ratio``."""
    loss = mode.diffusion_loss
    key = mode.objective.limit.key
    if not mode.objective.clips:
        return f"Raise diffusion_loss.{key}"
    if loss.clip_ratio == "auto":
        # After a fallback the lower bound of the calibrated band is in force.
        return f"Raise diffusion_loss.auto_clip_{'min' if fallen_back else 'max'}"
    return f"Widen diffusion_loss.{f'{key}_low and {key}_high' if loss.has_sides else key}"


def _reject_less(correction: RolloutCorrectionConfig, *, calibrates: bool) -> str:
    criteria = correction.rollout_rs
    # Without criteria only the mask mode of the weights rejects.
    if criteria is None:
        return "Widen rollout_is_threshold"
    if correction.rollout_rs_threshold == "auto":
        return "Raise rollout_rs_auto_max"
    takes_auto = calibrates and criteria.startswith("seq_") and "," not in criteria
    return "Widen rollout_rs_threshold" + (" or set it to auto" if takes_auto else "")


# ---------------------------------------------------------------------- verdicts

SAFE = "safe"
NOT_SHOWN_SAFE = "not shown safe"
NOT_SAFE = "not safe"
VERDICTS = (SAFE, NOT_SHOWN_SAFE, NOT_SAFE)
"""From best to worst."""


@dataclass(frozen=True)
class JudgedFigure:
    """One measured value against its limit."""

    what: str
    value: float
    low: float
    high: float
    limit: float
    """The value is not safe above this."""
    safe_below: float
    """The value is safe below this; equal to ``limit`` unless what happens between the two depends on the run."""
    is_share: bool
    verdict: str

    @property
    def settled(self) -> bool:
        """No limit lies within the interval, so more images would change nothing."""
        return self.verdict != NOT_SHOWN_SAFE or (self.safe_below < self.low and self.high < self.limit)

    @property
    def interval(self) -> str:
        """The interval in words: ``1.5% to 12.0%``."""
        if self.is_share:
            return f"{self.low:.1%} to {self.high:.1%}"
        return f"{self.low:.2g} to {self.high:.2g}"

    def __str__(self) -> str:
        if self.is_share:
            return f"{self.what}: {self.value:.0%} ({self.interval}), limit {self.limit:.0%}"
        limit = f"limit {self.limit:g}"
        if self.safe_below < self.limit:
            limit = f"safe below {self.safe_below:g}, not safe above {self.limit:g}"
        return f"{self.what}: {self.value:.2g} ({self.interval}), {limit}"


def decisive(judged: Sequence[JudgedFigure]) -> JudgedFigure:
    """Return the worst figure, which decides; among equals the one that is highest relative to its limit."""
    return max(judged, key=lambda one: (VERDICTS.index(one.verdict), one.high / one.limit))


# ---------------------------------------------------------------------- judging a measured gap


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
    """90 % quantile of the objective's measure, in the unit of its limit; equals ``abs_q90`` if the measure is the log
    ratio itself."""
    clipped: float
    """Share of the used samples beyond the objective's limit. This share and the next two are expectations over the
    noise that these images might have had, not counts."""
    rejected: float
    """Share of samples that the configured rejection removes for the gap alone."""
    zeroed: float
    """Share of samples that are kept with an importance weight of 0 in the loss."""
    nats: float
    """Mean ``|l|`` of the whole step, in nats."""
    kl_nats: float
    """Closed-form KL of the step's Gaussian, engine to actor, in nats."""
    images: int
    """Independent images among the ``count`` samples."""
    clipped_interval: Interval
    """Confidence interval of ``clipped`` over all images that could be drawn."""
    rejected_interval: Interval
    """The same of ``rejected``."""
    zeroed_interval: Interval
    """The same of ``zeroed``."""
    nats_interval: Interval
    """The same of ``nats``."""


@dataclass(frozen=True)
class Advice:
    """The verdict on a configuration, with its reasons."""

    verdict: str
    """``SAFE``, ``NOT_SHOWN_SAFE`` or ``NOT_SAFE``: the worst of ``judged``, or ``NOT_SAFE`` after a failed update."""
    because: str
    """The deciding figure, in one phrase."""
    judged: tuple[JudgedFigure, ...]
    """Each figure that has a limit, with its interval and its own verdict."""
    mode: str
    """The recommended mode, ``bypass`` or ``decoupled``."""
    limit_key: str | None
    """Field of ``DiffusionLossConfig`` that sets the objective's limit, such as ``clip_ratio``; None if none acts."""
    limit: float | str | None
    """The recommended value of that field: three times the 90 % quantile of the objective's measure, and at least the
    configured value (the narrower side of a clip band with two); ``auto`` if that is configured."""
    rejection_band: str
    """For ``rollout_rs=seq_mean_k1``: holds 99 % of the images for the gap alone, within ``rollout_rs_auto_min`` and
    ``rollout_rs_auto_max``."""
    reasons: tuple[str, ...]

    @property
    def safe(self) -> bool:
        """The configuration has been shown to be safe."""
        return self.verdict == SAFE


def advise(
    mode: ModeInForce,
    overall: StepGap,
    row_gap: float,
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
    """Judge this configuration, with reasons in words.

    Args:
        mode: the configured mode.
        overall, steps: the gap over all timesteps, and at each.
        row_gap: 99 % quantile over the images of the absolute mean log ratio.
        dimensions: number of latent dimensions.
        drift: None if there is none, or it is not known.
        failure: why the actor could not take an optimizer step; that is never safe.
        adapter_lag: batches by which the engine's adapter is configured to be behind.
        ahead: batches by which rollouts are configured to be ahead of the actor, with as old an adapter.
        images: number measured at every place of the window, from which the number needed follows; 0 if unknown.
        confidence: of the intervals in ``overall`` and ``steps``.
    """
    judged = judge_all(mode, overall, dimensions, drift)
    engine = judged[ENGINE_GAP]
    limit = mode.objective.limit
    needed = _round_up(CLIP_FACTOR * overall.clip_q90)
    configured = min(limit.ends(mode.diffusion_loss))
    broken = engine.value > engine.limit
    # No limit repairs an engine that computes something else, and REINFORCE has none that the gap could exceed.
    fits = not broken and (needed <= WIDEST_CLIP or (mode.bypasses and not mode.has_limit))
    # A limit wider than the gap needs was chosen for the policy's own movement, so it is not narrowed.
    wanted = max(configured, needed) if fits else configured
    # The clip and the drift measure one thing, a limit too narrow for the gap, and share its remedy.
    unsettled = [name for name in (CLIP, DRIFT) if name in judged and judged[name].verdict != SAFE]
    holds = overall.clipped <= LIMITS[CLIP].not_safe and DRIFT not in unsettled
    # A fixed clip band is recommended if auto_clip_max cuts the gap off.
    calibrated = fits and mode.diffusion_loss.clip_ratio == "auto" and holds
    holding = f"{limit.key}={wanted:g} holds the gap; " if wanted > configured and not calibrated else ""
    reasons = [failure] if failure else []
    reasons += _engine_reasons(mode, engine)
    reasons += _clip_reasons(mode, overall, judged, steps)
    # A fifth of the limit is too little to mention.
    if drift is not None and not judged[DRIFT].high < DRIFT_SAFE / 5:
        reasons.append(_drift_reason(judged[DRIFT]))
    if (adapter_lag or ahead) and mode.has_limit and (mode.bypasses or fits):
        setting = f"ahead={ahead}" if ahead >= adapter_lag else f"adapter_lag={adapter_lag}"
        follows = "clip_ratio=auto follows it, " if mode.diffusion_loss.takes_auto else ""
        reasons.append(
            f"{setting} adds the policy's own movement to this gap wherever the clip is centred at the engine, most in "
            f"the first batches, which cannot be measured before training; {follows}guard=fallback watches it, "
            "decoupled mode does without"
        )
    reasons += _removal_reasons(mode, judged)
    reasons += _image_reasons(overall, judged, images, confidence)
    # The recommendation already covers a clip that is not safe, unless a limit was measured to hold the gap.
    if unsettled and (holding or all(judged[name].verdict == NOT_SHOWN_SAFE for name in unsettled)):
        reasons.append(f"{holding}decoupled mode does without")
    worst = decisive(list(judged.values()))
    recommended = None
    if mode.has_limit:
        recommended = "auto" if calibrated else wanted
    return Advice(
        verdict=NOT_SAFE if failure else worst.verdict,
        because=failure or str(worst),
        judged=tuple(judged.values()),
        mode="bypass" if fits else "decoupled",
        limit_key=limit.key if mode.has_limit else None,
        limit=recommended,
        rejection_band=_rejection_band(mode.rollout_correction, row_gap),
        reasons=tuple(reasons),
    )


def judge_all(
    mode: ModeInForce, overall: StepGap, dimensions: int, drift: Drift | None = None, *, of_tokens: bool = False
) -> dict[str, JudgedFigure]:
    """Judge every figure that applies to this configuration; ``{figure: judged}``.

    The clip counts if it is centred at the engine's log-probs. Rejection and weights of 0 count if the configuration
    can produce them: a share that is 0 by construction needs no samples.
    """
    correction = mode.rollout_correction
    plan = correction.plan()
    nats = overall.nats_interval
    # The limit holds for every latent size, so it is per dimension.
    scaled = Interval(nats.low / dimensions, nats.high / dimensions, nats.effective)
    unit = "token" if of_tokens else "latent dimension"
    figures = {ENGINE_GAP: (f"mean |log ratio| per {unit}", overall.nats / dimensions, scaled)}
    if mode.limits_the_gap:
        figures[CLIP] = (_outside(mode), overall.clipped, overall.clipped_interval)
    if plan.can_reject or overall.rejected > 0:
        figures[REJECTED] = ("rejected", overall.rejected, overall.rejected_interval)
    zeroes = correction.weights_act and plan.importance is not None and plan.importance.mode == "zero"
    if zeroes or overall.zeroed > 0:
        figures[ZEROED] = ("importance weights of 0", overall.zeroed, overall.zeroed_interval)
    limits = {name: LIMITS[name].not_safe_for(correction) for name in figures}
    limits[CLIP] = clip_not_safe(drift_known=drift is not None)
    if of_tokens:
        limits[ENGINE_GAP] = TOKEN_GAP_NOT_SAFE
    safe_below = dict(limits)
    if drift is not None:
        figures[DRIFT] = ("drift", drift.value, drift.interval)
        limits[DRIFT] = DRIFT_NOT_SAFE
        safe_below[DRIFT] = DRIFT_SAFE
    judged = {}
    for name, (what, value, interval) in figures.items():
        # NaN in a value or in its interval is never safe.
        verdict = NOT_SHOWN_SAFE
        if interval.high < safe_below[name]:
            verdict = SAFE
        elif interval.low > limits[name]:
            verdict = NOT_SAFE
        is_share = name not in (ENGINE_GAP, DRIFT)
        ends = (interval.low, interval.high)
        judged[name] = JudgedFigure(what, value, *ends, limits[name], safe_below[name], is_share, verdict)
    return judged


def _outside(mode: ModeInForce) -> str:
    """``outside clip_ratio=0.001``, or ``beyond kl_mask_threshold=1e-05``."""
    return f"{'outside' if mode.objective.clips else 'beyond'} {mode.objective.limit.setting(mode.diffusion_loss)}"


def _engine_reasons(mode: ModeInForce, engine: JudgedFigure) -> Iterator[str]:
    measured = f"the mean |log ratio| is {engine.value:.2g} ({engine.interval}) per latent dimension"
    if engine.verdict == NOT_SAFE:
        yield (
            f"{measured}: the engine computes something else than the actor (schedule, guidance, adapter or latents), "
            f"which no correction repairs: {_clause(remedy(ENGINE_GAP, mode))}"
        )
    elif engine.verdict == NOT_SHOWN_SAFE:
        yield (
            f"{measured}, and the limit of {engine.limit:g}, above which an engine computes something else than the "
            "actor, lies within that interval: more images would show it"
        )


def _clip_reasons(
    mode: ModeInForce, overall: StepGap, judged: dict[str, JudgedFigure], steps: Sequence[StepGap]
) -> Iterator[str]:
    """Effect of the gap on the objective's limit, overall and at the timesteps that exceed it."""
    clip = judged.get(CLIP)
    if clip is None:
        yield (
            "reinforce does not clip, so the gap cannot empty the clip band"
            if mode.bypasses
            else "decoupled mode centres the clip on the actor's own log-probs, so the gap is not clipped"
        )
        return
    share = f"{overall.clipped:.0%} of the samples lie {_outside(mode)}"
    text = f"{share} before anything is learned ({clip.interval}; limit {clip.limit:.0%})"
    drifts = DRIFT in judged and judged[DRIFT].verdict != SAFE
    too_much = LIMITS[CLIP].not_safe
    if not overall.clipped_interval.effective:
        text = "rejection and weights of 0 leave no sample of which the clip could be measured"
    elif clip.verdict == NOT_SAFE:
        text = f"bypass mode clips around the engine's policy, and {text}; what is left is chosen by the engine's error"
    elif clip.verdict == NOT_SHOWN_SAFE:
        text += ": the limit lies within that interval, so they may be too many"
    elif overall.clipped > LIMITS[CLIP].costs and not drifts:
        text += ": runs like that learned, but less than with a wider clip band"
    yield text
    for step in steps:
        if clip.verdict == NOT_SAFE or not step.clipped > too_much:
            continue
        low, high = step.clipped_interval.low, step.clipped_interval.high
        follows = "which may be too much there" if low <= too_much else "and what is learned there chosen by that error"
        yield (
            f"at timestep {step.timestep:g} it is {step.clipped:.0%} ({low:.1%} to {high:.1%}), {follows}: "
            f"{_clause(remedy(CLIP_AT_TIMESTEP, mode))}"
        )


def _drift_reason(drift: JudgedFigure) -> str:
    size = f"{drift.value:.2g} ({drift.interval}) of one step's gradient"
    limits = f"safe below {drift.safe_below:g}, not safe above {drift.limit:g}"
    follows = ": a limit lies within that interval, and more images would show on which side it is"
    if drift.verdict == SAFE:
        follows = ""
    elif drift.verdict == NOT_SAFE:
        follows = ": runs like that lost what they had learned"
    elif drift.settled:
        follows = ": runs like that learned less, and with a high learning rate they lost what they had learned"
    return f"whatever is rewarded, an update moves toward the engine's error, by {size} ({limits}){follows}"


def _removal_reasons(mode: ModeInForce, judged: dict[str, JudgedFigure]) -> Iterator[str]:
    """Samples that rejection and weights of 0 remove for the gap alone."""
    for name, what in ((REJECTED, "rejection removes"), (ZEROED, "importance weights are 0 for")):
        one = judged.get(name)
        if one is None or (not one.value and one.verdict == SAFE):
            continue
        limit = "" if one.verdict == SAFE else f"; limit {one.limit:.0%}"
        reason = f"{what} {one.value:.0%} of the samples for the gap alone ({one.interval}{limit})"
        yield f"{reason}: {_clause(remedy(name, mode))}" if one.value and limit else reason


def _image_reasons(overall: StepGap, judged: dict[str, JudgedFigure], images: int, confidence: float) -> Iterator[str]:
    """Number of images that would settle each share that is not settled."""
    intervals = {CLIP: overall.clipped_interval, REJECTED: overall.rejected_interval, ZEROED: overall.zeroed_interval}
    for name, interval in intervals.items():
        one = judged.get(name)
        if one is None or one.verdict != NOT_SHOWN_SAFE or not interval.effective:
            continue
        on_which = f"on which side of its limit the share lies ({one.what})"
        seems = f"if it is what it seems, {one.value:.0%}"
        if not images:
            yield f"more images would show {on_which}"
        elif enough := images_to_settle(
            one.value, interval.effective, images, one.limit, most=MOST_IMAGES, confidence=confidence
        ):
            yield f"{images} images a place do not show {on_which}; --images {enough} would, {seems}"
        else:
            yield f"not even --images {MOST_IMAGES} would show {on_which}, {seems}: take it for too much"


def _clause(sentence: str) -> str:
    return sentence[0].lower() + sentence[1:]


def _rejection_band(correction: RolloutCorrectionConfig, row_gap: float) -> str:
    half = min(max(row_gap, float(correction.rollout_rs_auto_min)), float(correction.rollout_rs_auto_max))
    # Six digits would round the ends of a narrow band onto 1.
    digits = 6 if half >= 1e-4 else 12
    return f"{math.exp(-half):.{digits}g}_{math.exp(half):.{digits}g}"


def _round_up(value: float) -> float:
    """Round up to 1, 2 or 5 times a power of ten."""
    if value <= 0:
        return 0.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if value <= step * power * (1 + 1e-9))
