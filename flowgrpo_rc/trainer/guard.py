"""The guard: watches every update, and moves a run that its gap is wrecking from bypass to decoupled mode.

In bypass mode the clip is centred at the engine's log-probs. Where the gap empties the band, what is left of a batch is
chosen by the engine's error, and the run unlearns. The first mini-step shows it before anything is lost: its ratios
hold the gap alone (and, with a stale adapter, the policy's movement since).
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from flowgrpo_rc.actor import DiffusionActor, DiffusionActorConfig
from flowgrpo_rc.trainer.config import FlowGRPOConfig

CLIP, REJECTED, GAP = "clip", "rejected", "engine_gap"

_DIAGNOSIS = {
    CLIP: "{value:.0%} of the samples lay outside the clip band before anything was learned (limit {limit:.0%}), so "
    "the engine's error chooses what is learned. Widen diffusion_loss.clip_ratio beyond the gap or set it to auto, or "
    "set rollout_correction.bypass_mode=false",
    REJECTED: "{value:.0%} of the samples were rejected (limit {limit:.0%}). Widen rollout_rs_threshold or set it to "
    "auto, or bring the engine's precision closer to the actor's",
    GAP: "engine and actor differ by {value:.2g} in mean |log ratio| with equal weights (limit {limit:g}), so the "
    "engine computes something else. Compare dtype, quantization, attention kernels and schedule",
}


class Guard:
    """Called once an update with its metrics; says, and with ``guard=fallback`` does, what follows.

    Args:
        config: limits and what to do, in ``algorithm.rollout_correction.guard...``.
        actor: whose objective it replaces; its ``config`` is the configuration in force.
    """

    def __init__(self, config: FlowGRPOConfig, actor: DiffusionActor) -> None:
        self._actor, self._configured = actor, config.actor_rollout_ref.actor
        self._rc = config.rollout_correction
        self._over = {CLIP: 0, REJECTED: 0, GAP: 0}
        self._safe, self._wait = 0, self._rc.guard_return_after
        self.say: Callable[[str], None] = lambda _text: None
        """Where a change of mode is told."""

    @property
    def fallen_back(self) -> bool:
        """Whether the run is configured for bypass mode and in decoupled mode now."""
        return self._rc.bypass_mode and not self._actor.config.rollout_correction.bypass_mode

    def __call__(self, metrics: dict[str, float], step: int) -> dict[str, float]:
        """Takes an update's metrics, the same on every process; returns ``guard/...``; empty when off."""
        if self._rc.guard == "off":
            return {}
        signals = self._signals(metrics)
        for name, (value, limit) in signals.items():
            self._over[name] = self._over[name] + 1 if value > limit else 0
        alarms = [name for name in signals if self._over[name] >= self._rc.guard_patience]
        new = [name for name in alarms if self._over[name] == self._rc.guard_patience]
        if new:
            self._raise_alarm({name: signals[name] for name in new}, step)
        elif self.fallen_back:
            self._consider_return(metrics, step)
        return {"guard/alarms": float(len(alarms)), "guard/fallback": float(self.fallen_back)}

    def _signals(self, metrics: dict[str, float]) -> dict[str, tuple[float, float]]:
        """Value and limit of what there is to watch."""
        rc, found = self._rc, {}
        if self._actor.config.rollout_correction.loss_type == "ppo_clip":
            found[CLIP] = (metrics["actor/pg_clipfrac_first"], rc.guard_clip_fraction)
        found[REJECTED] = (1 - metrics["actor/kept_fraction"], rc.guard_rejected_fraction)
        if "rollout_sync/engine_gap_abs_mean" in metrics:
            found[GAP] = (metrics["rollout_sync/engine_gap_abs_mean"], rc.guard_engine_gap)
        return found

    def _raise_alarm(self, causes: dict[str, tuple[float, float]], step: int) -> None:
        reasons = "; ".join(_DIAGNOSIS[name].format(value=v, limit=limit) for name, (v, limit) in causes.items())
        text = f"step {step}: for {self._rc.guard_patience} updates in a row, {reasons}"
        if self._rc.guard == "fallback" and self._actor.config.rollout_correction.bypass_mode:
            self._actor.config = decoupled(self._configured)
            self._over, self._safe = dict.fromkeys(self._over, 0), 0
            self.say(f"guard: {text}. Falling back to decoupled mode")
        else:
            warnings.warn(f"guard: {text}", stacklevel=4)

    def _consider_return(self, metrics: dict[str, float], step: int) -> None:
        """Back to bypass mode when the probe has called it safe for long enough; without a probe, never."""
        outside, gap = (metrics.get(f"rollout_sync/{name}") for name in ("outside_clip", "engine_gap_abs_mean"))
        if outside is None or gap is None:
            return
        safe = outside <= self._rc.guard_clip_fraction / 2 and gap <= self._rc.guard_engine_gap / 2
        self._safe = self._safe + 1 if safe else 0
        if self._safe < self._wait:
            return
        self._actor.config = self._configured
        self._over, self._safe, waited = dict.fromkeys(self._over, 0), 0, self._wait
        self._wait *= 2
        self.say(f"guard: step {step}: the gap has been safe for {waited} updates in a row. Back to bypass mode")

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"fallen_back": self.fallen_back, "over": dict(self._over), "safe": self._safe, "wait": self._wait}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what ``state_dict`` gave, as far as the present configuration allows it."""
        self._over |= state["over"]
        self._safe, self._wait = state["safe"], state["wait"]
        if state["fallen_back"] and self._rc.guard == "fallback" and self._rc.bypass_mode:
            self._actor.config = decoupled(self._configured)


def decoupled(config: DiffusionActorConfig) -> DiffusionActorConfig:
    """The same actor in decoupled mode; a calibrated clip becomes its lower bound, since there is no gap to hold."""
    loss = config.diffusion_loss
    if loss.clip_ratio == "auto":
        loss = replace(loss, clip_ratio=loss.auto_clip_min)
    correction = replace(config.rollout_correction, bypass_mode=False)
    return replace(config, diffusion_loss=loss, rollout_correction=correction)
