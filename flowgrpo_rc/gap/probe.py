"""The probe: measure the gap between rollout engine and actor before training, and judge the configured mode.

The engine samples every step that the configuration trains, with the SDE window at each of its places, and the actor
rescores them under the same weights. In bypass mode the clip is centred at the engine's log-probs: the part of the gap
outside the clip band is clipped before anything is learned, and the engine's error chooses the samples that remain.

Images come in batches, so that the probe can continue until it is sure. Every image has its own noise, and each batch
continues in the training prompts where the last one ended. ``flowgrpo_rc.gap.rescoring`` measures during training.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import torch
from tensordict import TensorDict
from torch import Tensor

from flowgrpo_rc.actor import DiffusionActor
from flowgrpo_rc.actor.actor import NonFiniteUpdateError, on_any_process
from flowgrpo_rc.actor.mode import ModeInForce
from flowgrpo_rc.batch import Key, MiniBatch, OldPolicy
from flowgrpo_rc.gap.bands import ClipBands, RejectionBands
from flowgrpo_rc.gap.intervals import looks
from flowgrpo_rc.gap.research.drift import Drift, DriftMeter, resample
from flowgrpo_rc.gap.safety import Advice, StepGap, advise, decisive, judge_all
from flowgrpo_rc.gap.statistics import GapSample, apply_limits, row_gap_quantile, step_gap
from flowgrpo_rc.loss.objectives import OBJECTIVES
from flowgrpo_rc.models.base import Conditioning
from flowgrpo_rc.models.config import ModelConfig
from flowgrpo_rc.rollout import RolloutError, RolloutRequest, Trajectories
from flowgrpo_rc.rollout.config import RolloutConfig
from flowgrpo_rc.rollout.seeds import PROBE, seed_for

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class ProbedRun:
    """The parts of a run that the probe uses, before its first step; resumed, if a checkpoint is probed."""

    model: ModelConfig
    rollout: RolloutConfig
    mode: ModeInForce
    actor: DiffusionActor
    prompts: Sequence[Any]  # The training prompts
    condition: Callable[[list[Any]], Conditioning]  # Embeds prompts for the rollout pipeline
    generate: Callable[[RolloutRequest], Trajectories]
    """Samples; raises ``RolloutError`` if the engine violates the request."""
    device: torch.device
    seed: int
    scored_share: float  # Share of a batch that decoupled mode, as configured, scores


@dataclass(frozen=True)
class ProbeBatch:
    """A batch of rescored images with the inputs of an update."""

    trajectories: TensorDict
    scored: dict[str, Tensor]  # The actor's ``rescore`` of them
    conditioning: Conditioning
    sample: GapSample
    prompts: Tensor  # For each image its prompt's place in the data
    seconds: dict[str, float]  # Of ``rollout`` and ``score``


def sample_and_rescore(run: ProbedRun, images: int, before: int = 0) -> ProbeBatch:
    """Sample ``images`` at every place of the window, after the first ``before``, and rescore them.

    Raises:
        RolloutError: the engine violated the request, or the actor cannot score its samples.
    """
    rollout = run.rollout
    taken = rollout.window_places
    # All images of a place together, so that each place has the same prompts.
    places = torch.tensor(taken).repeat_interleave(images)
    # Prompts repeat if there are fewer than images; every image still has its own noise.
    known = len(run.prompts)
    count = min(images, known)
    earlier = before * len(taken)
    request = RolloutRequest(
        conditioning=run.condition([run.prompts[(before + i) % known] for i in range(count)]),
        prompt_index=torch.arange(len(places)) % count,
        seeds=[seed_for(run.seed, PROBE, 0, earlier + i) for i in range(len(places))],
        window_starts=places,
        record_means=True,
        **rollout.request_fields(clean=False),
    )
    trajectories, rollout_seconds = timed(run.device, lambda: run.generate(request))
    batch = trajectories.batch
    assert batch is not None
    scored, score_seconds = timed(run.device, lambda: run.actor.rescore(batch, request.conditioning))
    # Both rescorings are the same one: before training nothing is stale.
    sample = GapSample.of(batch, scored, scored, rollout.algo.sde_type)
    assert sample.kl is not None
    for what, values in (
        ("log-prob", scored["log_probs"]),
        ("log ratio to the engine's", sample.engine),
        ("KL from the engine's transition", sample.kl),
    ):
        if bad := int((~torch.isfinite(values)).sum()):
            raise RolloutError(
                f"the actor gives {bad} of {values.numel()} steps that the engine sampled a NaN or infinite {what}; "
                "check actor_rollout_ref.model.dtype and the model's weights"
            )
    prompts = (before + request.prompt_index) % known
    seconds = {"rollout": rollout_seconds, "score": score_seconds}
    return ProbeBatch(batch, scored, request.conditioning, sample, prompts, seconds)


def timed(device: torch.device, call: Callable[[], Result]) -> tuple[Result, float]:
    """Return the result of the call, and its seconds on the device."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()  # else the time would be that of queueing the work
        return time.perf_counter()

    start = now()
    return call(), now() - start


@dataclass(frozen=True)
class ProbeResult:
    """The measurement and the advice."""

    setting: dict[str, Any]  # The settings that shape the gap, for the table's heading
    steps: tuple[StepGap, ...]
    overall: StepGap
    drift: Drift | None
    """Gradient of the gap alone; None if the objective's limit is not centred at the engine's log-probs."""
    advice: Advice
    images: int  # Images measured at every place of the SDE window
    confidence: float
    """Confidence of every interval in ``steps`` and ``overall``: that of the last look, chosen so that all looks
    together have ``intervals.CONFIDENCE``."""
    seconds: dict[str, float]  # Seconds of ``rollout``, ``score`` and ``update``, for the images of the first look
    saved: float | None
    """Share of rollout, score and update that bypass mode saves against decoupled mode; None if the update failed."""

    def to_dict(self) -> dict[str, Any]:
        """Plain, for JSON: also with the recommended limit under its own key, and null under those of other limits."""
        values = asdict(self)
        values["advice"]["safe"] = self.advice.safe
        for key in {objective.limit.key for objective in OBJECTIVES.values()}:
            values["advice"][key] = self.advice.limit if key == self.advice.limit_key else None
        return values


def run_probe(run: ProbedRun, images: int, max_images: int | None = None) -> ProbeResult:
    """Measure at every place of the SDE window. The run is used up: its adapter moves.

    With several processes all of them measure the same images, so that all call the transformer alike.

    Args:
        run: a run before its first step; resumed, if a checkpoint is to be probed.
        images: at every place, to start with; at least 2.
        max_images: the same to end with. The number doubles up to this one until every figure is settled; None: no
            more than ``images``.

    Raises:
        RolloutError: the engine violated the request, or the actor cannot score its samples.
    """
    most = max_images or images
    batches = [sample_and_rescore(run, images)]
    meter = None
    metered = 0
    upcoming = iter(looks(images, most))
    # Bands, quantiles and intervals are of all images so far, so every look computes them anew; gradients add up.
    while True:
        count, confidence = next(upcoming)
        while len(batches) * images < count:
            before = len(batches) * images
            batches.append(sample_and_rescore(run, min(images, count - before), before))
        sample = GapSample.concatenate([batch.sample for batch in batches])
        limits = _calibrated_limits(run.mode, sample)
        drift = None
        failure = ""
        if run.mode.limits_the_gap:
            # More images change the bands, and under other bands the gradients of these images differ: measure again.
            if meter is None or limits:
                meter = DriftMeter(run.mode, run.rollout.algo.sde_type, run.seed)
                metered = 0
            try:
                _add_gradients(run, meter, batches[metered:], limits, repeats=most > len(run.prompts))
                drift = meter.result(confidence)
            except NonFiniteUpdateError as error:
                failure = _in_words(error)
            metered = len(batches)
        steps, overall = _step_gaps(run, sample, limits, confidence)
        worst = decisive(list(judge_all(run.mode, overall, sample.dimensions, drift).values()))
        # All processes must agree: one that measured on would sample alone.
        if failure or count == most or on_any_process(worst.settled):
            break
    # The update is timed on the images of the first look.
    seconds = dict(batches[0].seconds)
    saved = None
    try:
        if not failure:
            _, seconds["update"] = timed(run.device, lambda: _update(run, batches[0], limits))
            # Bypass mode leaves out the pass that scores ``scored_share`` of a batch in decoupled mode.
            score = seconds["score"] * run.scored_share
            saved = score / (seconds["rollout"] + score + seconds["update"])
    except NonFiniteUpdateError as error:
        failure = _in_words(error)
    advice = advise(
        run.mode,
        overall,
        row_gap_quantile(sample.engine),
        sample.dimensions,
        steps,
        failure,
        drift=drift,
        adapter_lag=run.rollout.adapter_lag,
        ahead=run.rollout.ahead,
        images=count,
        confidence=confidence,
    )
    return ProbeResult(_setting(run, sample, limits), steps, overall, drift, advice, count, confidence, seconds, saved)


def _in_words(error: NonFiniteUpdateError) -> str:
    return f"an optimizer step on these samples fails: {str(error).partition(';')[0]}"


def _add_gradients(
    run: ProbedRun, meter: DriftMeter, batches: list[ProbeBatch], limits: dict[str, Tensor], *, repeats: bool
) -> None:
    """Give the meter these images, with their calibrated limits; ``repeats``: a prompt may be in several batches."""
    start = 0
    for batch in batches:
        trajectories = batch.trajectories
        own = slice(start, start + len(trajectories))
        for name, values in limits.items():
            trajectories[name] = values[own]
        meter.add(run.actor, trajectories, batch.scored, batch.conditioning, batch.prompts if repeats else None)
        start = own.stop


def _calibrated_limits(mode: ModeInForce, sample: GapSample) -> dict[str, Tensor]:
    """Each limit that ``auto`` derives from this gap, by its key in a batch."""
    # Bands of a checkpoint hold staleness and the gaps of other engines, so calibrated ones are made anew.
    clip_bands = ClipBands.configured(mode.diffusion_loss)
    rejection_bands = RejectionBands.configured(mode.rollout_correction)
    limits = {}
    if clip_bands is not None:
        clip_bands.observe(sample.timesteps, sample.engine)
        limits[Key.CLIP_WIDTHS] = clip_bands.widths(sample.timesteps)
    if rejection_bands is not None:
        rejection_bands.observe(sample.timesteps, sample.engine)
        limits[Key.ROLLOUT_RS_BOUNDS] = rejection_bands.bounds(sample.timesteps)
    return limits


def _step_gaps(
    run: ProbedRun, sample: GapSample, limits: dict[str, Tensor], confidence: float
) -> tuple[tuple[StepGap, ...], StepGap]:
    """The gap at each timestep, and over all of them."""
    steps = apply_limits(run.mode, sample, limits)
    resampled = resample(sample, run.seed)
    draws = len(resampled.engine) // len(sample.engine)
    repeated = {name: values.repeat(draws, *[1] * (values.dim() - 1)) for name, values in limits.items()}
    expected = apply_limits(run.mode, resampled, repeated)
    # The intervals must count all draws of an image as one.
    expected = replace(expected, image=expected.image % len(sample.engine))

    def gap_at(timestep: float | None) -> StepGap:
        chosen, drawn = (
            torch.ones_like(one, dtype=torch.bool) if timestep is None else one == timestep
            for one in (sample.timesteps, resampled.timesteps)
        )
        return step_gap(steps.part(chosen), timestep, confidence, expected.part(drawn))

    timesteps = sorted(set(sample.timesteps.flatten().tolist()), reverse=True)
    return tuple(gap_at(timestep) for timestep in timesteps), gap_at(None)


def _update(run: ProbedRun, first: ProbeBatch, limits: dict[str, Tensor]) -> None:
    """Time one optimizer step on the first images, with made-up advantages."""
    batch = first.trajectories
    # Even signs, so that samples clipped on one side alone show as in training.
    signs = torch.ones(len(batch))
    signs[::2] = -1
    batch[Key.ADVANTAGES] = signs
    ones = torch.ones_like(batch[Key.ROLLOUT_LOG_PROBS])
    old = replace(OldPolicy.of_rollout(batch), weights=ones, keep=ones.bool())
    for name, values in limits.items():
        batch[name] = values[: len(batch)]
    # The update also shows a gradient that is not finite before a long run does.
    run.actor.update(batch, first.conditioning, [MiniBatch(torch.arange(len(batch)), old)], run.mode)


def _setting(run: ProbedRun, sample: GapSample, limits: dict[str, Tensor]) -> dict[str, Any]:
    correction = run.mode.rollout_correction
    loss = run.mode.diffusion_loss
    return {
        "model": run.model.path,
        "engine": run.rollout.name,
        "rollout_dtype": run.rollout.dtype,
        "quantization": run.rollout.quantization,
        "actor_dtype": run.model.dtype,
        "sde_type": run.rollout.algo.sde_type,
        "bypass_mode": correction.bypass_mode,
        "loss_type": correction.loss_type,
        "loss_mode": loss.loss_mode,
        "clip_ratio": loss.clip_ratio,
        "clip_band": run.mode.objective.limit.ends(loss, limits.get(Key.CLIP_WIDTHS)),
        "clip_sides": loss.has_sides,
        "latent_dimensions": sample.dimensions,
        "images": len(sample.engine),
    }
