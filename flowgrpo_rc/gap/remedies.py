"""From a finding on the gap to what to do about it. The probe, the guard and the health report all ask here.

A remedy depends on how the run is set up: it must be neither in force already nor refused by the configuration.
Importing this loads no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from flowgrpo_rc.actor.mode import ModeInForce
from flowgrpo_rc.gap.limits import CLIP, ENGINE_GAP, REJECTED, ZEROED
from flowgrpo_rc.loss.objectives import DEFAULT, OBJECTIVES, Objective

CLIP_AT_TIMESTEP = "clip_at_timestep"
"""A finding of its own beside those of ``limits``: one timestep lies beyond the objective's limit, not the batch."""

_LOSS = "diffusion_loss"
_CLOSER = "bring the engine's precision closer to the actor's"


@dataclass(frozen=True, kw_only=True)
class RunSetup:
    """What a remedy depends on. The defaults are the usual run: ``flow_grpo`` with a plain clip band in bypass mode."""

    objective: Objective = OBJECTIVES[DEFAULT]
    calibrates_clip: bool = False
    """Whether ``clip_ratio=auto`` is configured."""
    clip_sides: bool = False
    """Whether the clip band has a width of its own on a side."""
    limits_the_gap: bool = True
    """Whether the objective's limit is centred at the engine's log-probs now."""
    fallen_back: bool = False
    """Whether the guard has the run in decoupled mode now."""
    rejection: str | None = "seq_mean_k1"
    """The criteria of ``rollout_rs``; None where only the weights' mask mode rejects."""
    calibrates_rejection: bool = False
    """Whether ``rollout_rs_threshold=auto`` is configured."""

    @classmethod
    def of(cls, mode: ModeInForce) -> RunSetup:
        """The setup of a run in this mode."""
        correction = mode.rollout_correction
        return cls(
            objective=mode.objective,
            calibrates_clip=mode.diffusion_loss.clip_ratio == "auto",
            clip_sides=mode.diffusion_loss.has_sides,
            limits_the_gap=mode.limits_the_gap,
            rejection=correction.rollout_rs,
            calibrates_rejection=correction.rollout_rs_threshold == "auto",
        )

    @property
    def may_calibrate_clip(self) -> bool:
        """Whether ``clip_ratio=auto`` would be accepted and is not configured."""
        fits = self.objective.clips_plain_ratio and not self.clip_sides
        return fits and self.limits_the_gap and not self.calibrates_clip


def remedy(finding: str, setup: RunSetup, *, holding: str | None = None) -> str:
    """What to do about a figure beyond its limit, as a sentence without its full stop.

    Args:
        finding: a figure of ``limits``, or ``CLIP_AT_TIMESTEP``.
        setup: the run that it was found in.
        holding: for ``CLIP``: the setting that was measured to hold the gap, such as ``clip_ratio=0.005``, or empty
            where none does; None where that has not been measured.

    Raises:
        KeyError: no such finding.
    """
    if finding == CLIP and holding is not None:
        return f"{holding} holds the gap; decoupled mode does without" if holding else "decoupled mode does without"
    if finding == CLIP:
        return _clip_less(setup)
    if finding == CLIP_AT_TIMESTEP:
        return _clip_less_at_a_timestep(setup)
    return {
        REJECTED: f"{_reject_less(setup)}, or {_CLOSER}",
        ZEROED: f"Widen rollout_is_threshold, or {_CLOSER}",
        ENGINE_GAP: "Compare dtype, timestep_dtype, quantization, attention kernel and schedule of engine and actor",
    }[finding]


def widen_limit(setup: RunSetup) -> str:
    """How the objective's limit, as it is configured, is given more room: ``Widen diffusion_loss.clip_ratio``."""
    limit = setup.objective.limit
    if setup.objective.clips and setup.calibrates_clip:
        # After a fallback the lower bound of the calibrated band is in force.
        return f"Raise {_LOSS}.auto_clip_{'min' if setup.fallen_back else 'max'}"
    if setup.objective.clips and setup.clip_sides:
        return f"{limit.enlarge} {_LOSS}.{limit.key}_low and {limit.key}_high"
    return f"{limit.enlarge} {_LOSS}.{limit.key}"


def _clip_less(setup: RunSetup) -> str:
    text = widen_limit(setup)
    if setup.limits_the_gap and not setup.calibrates_clip:
        text += f" beyond {setup.objective.limit.holds}"
    if setup.may_calibrate_clip:
        text += " or set it to auto"
    if setup.limits_the_gap:
        text += ", or set rollout_correction.bypass_mode=false"
    return text


def _clip_less_at_a_timestep(setup: RunSetup) -> str:
    elsewhere = "move rollout.algo.sde_window_range"
    if setup.may_calibrate_clip:
        return f"Set clip_ratio=auto, whose clip band follows each timestep, or {elsewhere}"
    return f"{widen_limit(setup)}, or {elsewhere}"


def _reject_less(setup: RunSetup) -> str:
    if setup.rejection is None:
        return "Widen rollout_is_threshold"
    if setup.calibrates_rejection:
        return "Raise rollout_rs_auto_max"
    one_criterion_of_rows = setup.rejection.startswith("seq_") and "," not in setup.rejection
    return "Widen rollout_rs_threshold" + (" or set it to auto" if one_criterion_of_rows else "")
