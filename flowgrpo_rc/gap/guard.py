"""The guard: watches every update, and moves a run that its gap is wrecking from bypass to decoupled mode.

In bypass mode the clip is centred at the engine's log-probs. Where the gap empties the band, what is left of a batch is
chosen by the engine's error, and the run may unlearn. The first mini-step shows it before anything is lost: its ratios
hold the gap alone (and, with a stale adapter, the policy's movement since).
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from accelerate import PartialState

from flowgrpo_rc.actor import DiffusionActor, DiffusionActorConfig
from flowgrpo_rc.trainer.config import FlowGRPOConfig

CLIP, REJECTED, ZEROED, GAP = "clip", "rejected", "zeroed", "engine_gap"
ENGINE_GAP = "rollout_sync/engine_gap_per_dimension"
ZERO_WEIGHTS = ("rollout_corr/rollout_is_oob_ratio", "actor/rollout_corr/rollout_is_oob_ratio")
"""Share of importance weights set to 0."""

_DIAGNOSIS = {
    CLIP: "{value:.0%} of the samples lay outside {band} before anything was learned (limit {limit:.0%}), so the "
    "engine's error has a say in what is learned. {remedy}, or set rollout_correction.bypass_mode=false",
    REJECTED: "{value:.0%} of the samples were rejected (limit {limit:.0%}). {remedy}, or bring the engine's precision "
    "closer to the actor's",
    ZEROED: "{value:.0%} of the importance weights were 0 (limit {limit:.0%}). Widen rollout_is_threshold, or bring "
    "the engine's precision closer to the actor's",
    GAP: "engine and actor differ by {value:.2g} in mean |log ratio| per latent dimension with equal weights (limit "
    "{limit:g}), so the engine computes something else. Compare dtype, quantization, attention kernels and schedule",
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
        self._over = dict.fromkeys(_DIAGNOSIS, 0)
        self._said: set[str] = set()
        self._causes: set[str] = set()
        self._safe = self._returns = 0
        self.say: Callable[[str], None] = lambda _text: None
        """Where a change of mode is told."""

    @property
    def fallen_back(self) -> bool:
        """Whether the run is configured for bypass mode and in decoupled mode now."""
        return self._rc.bypass_mode and not self._actor.config.rollout_correction.bypass_mode

    def __call__(self, metrics: dict[str, float], step: int) -> dict[str, float]:
        """Takes an update's metrics, the same on every process; returns ``guard/...``; empty when off.

        ``guard/alarms`` counts the figures in alarm; ``guard/alarm_<figure>`` is 1 for each of them, and after a
        fallback for what caused it; ``guard/fallback`` is 1 in decoupled mode by its doing.
        """
        if self._rc.guard == "off":
            return {}
        signals = self._signals(metrics)
        for name, (value, limit) in signals.items():
            self._over[name] = self._over[name] + 1 if value > limit else 0
        alarms = [name for name in signals if self._over[name] >= self._rc.guard_patience]
        if self._may_fall_back and alarms:
            self._fall_back({name: signals[name] for name in alarms}, step)
        elif new := [name for name in alarms if name not in self._said]:
            self._said |= set(new)
            if PartialState().is_main_process:
                warnings.warn(f"guard: {self._text({name: signals[name] for name in new}, step)}", stacklevel=3)
        elif self.fallen_back:
            self._consider_return(metrics, signals, step)
        causes = {*alarms, *(self._causes if self.fallen_back else ())}
        return {
            "guard/alarms": float(len(alarms)),
            **{f"guard/alarm_{name}": float(name in causes) for name in _DIAGNOSIS},
            "guard/fallback": float(self.fallen_back),
        }

    @property
    def _may_fall_back(self) -> bool:
        return self._rc.guard == "fallback" and self._actor.config.rollout_correction.bypass_mode

    def _signals(self, metrics: dict[str, float]) -> dict[str, tuple[float, float]]:
        """Value and limit of what there is to watch; ``reinforce`` does not clip.

        ``flow_dppo`` leaves out one half of what lies beyond its threshold: what would move further away.
        """
        rc, config, found = self._rc, self._actor.config, {}
        if config.rollout_correction.loss_type == "ppo_clip":
            outside = 2 * metrics["actor/pg_clipfrac_inert_first"] if self._dppo else metrics["actor/pg_clipfrac_first"]
            found[CLIP] = (min(outside, 1.0), float(rc.guard_clip_fraction))
        found[REJECTED] = (1 - metrics["actor/kept_fraction"], float(rc.guard_rejected_fraction))
        if config.rollout_correction.weights_act:
            zeroed = max(metrics.get(name, 0.0) for name in ZERO_WEIGHTS)
            found[ZEROED] = (zeroed, float(rc.guard_rejected_fraction))
        if ENGINE_GAP in metrics:
            found[GAP] = (metrics[ENGINE_GAP], float(rc.guard_engine_gap))
        return found

    def _text(self, causes: dict[str, tuple[float, float]], step: int) -> str:
        remedies = {CLIP: self._clip_remedy(), REJECTED: self._rejection_remedy()}
        band = "the trust region" if self._dppo else "the clip band"
        parts = (
            _DIAGNOSIS[name].format(value=value, limit=limit, remedy=remedies.get(name), band=band)
            for name, (value, limit) in causes.items()
        )
        return f"step {step}: for {self._rc.guard_patience} updates in a row, {'; '.join(parts)}"

    @property
    def _dppo(self) -> bool:
        return self._configured.diffusion_loss.loss_mode == "flow_dppo"

    def _clip_remedy(self) -> str:
        loss = self._configured.diffusion_loss
        if self._dppo:
            return "Raise diffusion_loss.kl_mask_threshold beyond the gap's KL"
        if loss.clip_ratio == "auto":
            return "Raise diffusion_loss.auto_clip_max"
        if loss.has_sides:
            return "Widen diffusion_loss.clip_ratio_low and clip_ratio_high beyond the gap"
        calibrates = self._rc.bypass_mode and loss.takes_auto
        return "Widen diffusion_loss.clip_ratio beyond the gap" + (" or set it to auto" if calibrates else "")

    def _rejection_remedy(self) -> str:
        knob, option = self._rc.rejection_limit_key, str(self._rc.rollout_rs)
        calibrates = knob == "rollout_rs_threshold" and option.startswith("seq_") and "," not in option
        return f"{'Raise' if knob.endswith('max') else 'Widen'} {knob}{' or set it to auto' if calibrates else ''}"

    def _fall_back(self, causes: dict[str, tuple[float, float]], step: int) -> None:
        self._actor.config = decoupled(self._configured)
        self._over, self._safe, self._causes = dict.fromkeys(self._over, 0), 0, set(causes)
        self.say(f"guard: {self._text(causes, step)}. Falling back to decoupled mode")

    def _consider_return(self, metrics: dict[str, float], signals: dict[str, tuple[float, float]], step: int) -> None:
        """Back to bypass mode when all has been at most half of its limit for long enough.

        What bypass mode would clip is the probe's to say: without one, or with an objective whose ratio it does not
        measure, the run stays in decoupled mode. Weights of 0 do nothing in bypass mode.
        """
        outside = metrics.get("rollout_sync/outside_clip")
        if outside is None:
            return
        halves = [value <= limit / 2 for name, (value, limit) in signals.items() if name not in (CLIP, ZEROED)]
        safe = outside <= float(self._rc.guard_clip_fraction) / 2 and all(halves)
        self._safe = self._safe + 1 if safe else 0
        wait = self._rc.guard_return_after * 2**self._returns
        if self._safe < wait:
            return
        self._actor.config = self._configured
        self._over, self._safe, self._returns = dict.fromkeys(self._over, 0), 0, self._returns + 1
        self.say(f"guard: step {step}: the gap has been safe for {wait} updates in a row. Back to bypass mode")

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        counters = {"over": dict(self._over), "safe": self._safe, "returns": self._returns}
        return {"fallen_back": self.fallen_back, "causes": sorted(self._causes), **counters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what ``state_dict`` gave, as far as the present configuration allows it; limits are its own."""
        self._over |= state["over"]
        self._safe, self._returns, self._causes = state["safe"], state["returns"], set(state.get("causes", ()))
        if not (state["fallen_back"] and self._rc.bypass_mode):
            return
        if self._rc.guard == "fallback":
            self._actor.config = decoupled(self._configured)
            self.say("guard: this run had fallen back to decoupled mode, and goes on there")
        else:
            self.say(
                f"guard: this run had fallen back to decoupled mode; guard={self._rc.guard} takes it back to bypass"
            )


def decoupled(config: DiffusionActorConfig) -> DiffusionActorConfig:
    """The same actor in decoupled mode; a calibrated clip becomes its lower bound, since there is no gap to hold."""
    loss = config.diffusion_loss
    if loss.clip_ratio == "auto":
        loss = replace(loss, clip_ratio=loss.auto_clip_min)
    correction = replace(config.rollout_correction, bypass_mode=False)
    return replace(config, diffusion_loss=loss, rollout_correction=correction)
