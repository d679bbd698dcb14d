"""The guard watches every update, and moves a run that its gap would ruin from bypass to decoupled mode.

The first mini-step of an update shows the danger before anything is lost: its ratios hold the gap alone, and with a
stale adapter the policy's movement since. Limits and remedies are those of ``safety``.
"""

import warnings
from collections.abc import Callable
from typing import Any

from accelerate import PartialState

from flowgrpo_rc.actor.mode import ModeInForce
from flowgrpo_rc.gap.safety import CLIP, ENGINE_GAP, LIMITS, REJECTED, REPLAY_TEACHES, ZEROED, remedy

# Share of importance weights set to 0.
ZERO_WEIGHTS = ("rollout_corr/rollout_is_oob_ratio", "actor/rollout_corr/rollout_is_oob_ratio")
ENGINE_GAP_METRIC = "rollout_sync/engine_gap_per_dimension"
OUTSIDE_CLIP_METRIC = "rollout_sync/outside_clip"
TEACHING_METRIC = "replay/teaching_fraction"
_REPLAY = "replay"
"""Its count and warning, beside those of ``LIMITS``."""


class Guard:
    """Called once per update with its metrics; warns, and with ``guard=fallback`` changes the mode.

    It changes nothing but its own counts: the trainer puts ``mode`` in force.

    Args:
        configured: the mode of the configuration; ``guard...`` of its correction are limits and reaction.
        of_tokens: the update is the prompt writer's.
    """

    def __init__(self, configured: ModeInForce, *, of_tokens: bool = False) -> None:
        self._configured = configured
        self._of_tokens = of_tokens
        self._name = "guard of the prompt writer" if of_tokens else "guard"
        self._correction = configured.rollout_correction
        self._limits = {figure: limit.alarm(self._correction) for figure, limit in LIMITS.items()}
        self._over_limit = dict.fromkeys(LIMITS, 0)
        self._warned_of: set[str] = set()
        self._causes: set[str] = set()
        self._safe_updates = 0
        self._returns = 0
        self.fallen_back = False
        """The run is configured for bypass mode and now in decoupled mode."""
        self.say: Callable[[str], None] = lambda _text: None
        """Receives a line about every change of the mode."""

    @property
    def mode(self) -> ModeInForce:
        """The mode of the next update."""
        return self._configured.decoupled() if self.fallen_back else self._configured

    def __call__(self, metrics: dict[str, float], step: int) -> dict[str, float]:
        """Take an update's metrics, the same on every process; return the guard's own.

        ``guard/alarms`` counts the figures in alarm; ``guard/alarm_<figure>`` is 1 for each of them, and after a
        fallback for its causes; ``guard/fallback`` is 1 after a fallback. Empty if the guard is off.
        """
        if self._correction.guard == "off":
            return {}
        self._watch_replay(metrics, step)
        readings = self._readings(metrics)
        # A single batch may be unlucky; only updates in a row make an alarm.
        for figure, value in readings.items():
            self._over_limit[figure] = self._over_limit[figure] + 1 if value > self._limits[figure] else 0
        alarms = [figure for figure in readings if self._over_limit[figure] >= self._correction.guard_patience]
        if alarms and self._correction.guard == "fallback" and self.mode.bypasses:
            # The remedy must fit the mode in which the alarm was raised, so the message comes before the change.
            self.say(f"{self._name}: {self._diagnosis(alarms, readings, step)}. Falling back to decoupled mode")
            self._change_mode(fallen_back=True)
            self._causes = set(alarms)
        # Once per run: the metrics keep counting, and a log full of one warning hides the others.
        elif new := [figure for figure in alarms if figure not in self._warned_of]:
            self._warned_of |= set(new)
            self._safe_updates = 0
            if PartialState().is_main_process:
                warnings.warn(f"{self._name}: {self._diagnosis(new, readings, step)}", stacklevel=3)
        elif self.fallen_back:
            self._consider_return(metrics, readings, step)
        causes = {*alarms, *(self._causes if self.fallen_back else ())}
        counts = {"guard/alarms": float(len(alarms)), "guard/fallback": float(self.fallen_back)}
        return counts | {f"guard/alarm_{figure}": float(figure in causes) for figure in LIMITS}

    def _watch_replay(self, metrics: dict[str, float], step: int) -> None:
        """Warn of a replay buffer that teaches nothing; no mode would change that."""
        if TEACHING_METRIC not in metrics:
            return
        share = metrics[TEACHING_METRIC]
        self._over_limit[_REPLAY] = self._over_limit.get(_REPLAY, 0) + 1 if share < REPLAY_TEACHES else 0
        if self._over_limit[_REPLAY] >= self._correction.guard_patience and _REPLAY not in self._warned_of:
            self._warned_of.add(_REPLAY)
            self.say(
                f"guard: step {step}: for {self._correction.guard_patience} updates in a row, {1 - share:.0%} of the "
                "steps from the replay buffer had no gradient, since they were rejected, had a weight of 0 or lay "
                "outside the clip band; set algorithm.replay.batches or max_staleness lower"
            )

    def _readings(self, metrics: dict[str, float]) -> dict[str, float]:
        found: dict[str, float] = {}
        # On clean images no engine's log-prob enters a ratio; an averaged old policy may be far away on purpose.
        if self.mode.has_limit and not self.mode.objective.clean:
            limit = self.mode.objective.limit
            found[CLIP] = limit.share_beyond(metrics[limit.share_metric])
        found[REJECTED] = 1 - metrics["actor/kept_fraction"]
        if self.mode.rollout_correction.weights_act:
            found[ZEROED] = max(metrics.get(name, 0.0) for name in ZERO_WEIGHTS)
        if ENGINE_GAP_METRIC in metrics:
            found[ENGINE_GAP] = metrics[ENGINE_GAP_METRIC]
        return found

    def _diagnosis(self, causes: list[str], readings: dict[str, float], step: int) -> str:
        parts = []
        samples = "tokens" if self._of_tokens else "samples"
        for figure in causes:
            value, limit = readings[figure], self._limits[figure]
            what = {
                CLIP: f"{value:.0%} of the {samples} lay outside the {self._configured.objective.limit.name} before "
                f"anything was learned (limit {limit:.0%}), so the engine's error has a say in what is learned",
                REJECTED: f"{value:.0%} of the {samples} were rejected (limit {limit:.0%})",
                ZEROED: f"{value:.0%} of the importance weights were 0 (limit {limit:.0%})",
                ENGINE_GAP: f"engine and actor differ by {value:.2g} in mean |log ratio| per latent dimension with "
                f"equal weights (limit {limit:g}), so the engine computes something else",
            }[figure]
            advice = remedy(figure, self._configured, fallen_back=self.fallen_back, of_tokens=self._of_tokens)
            parts.append(f"{what}. {advice}")
        return f"step {step}: for {self._correction.guard_patience} updates in a row, {'; '.join(parts)}"

    def _consider_return(self, metrics: dict[str, float], readings: dict[str, float], step: int) -> None:
        """Return to bypass mode after every figure has long been at most half of its limit.

        Only the rescored images show what bypass mode would clip: without them, or with an objective whose measure is
        not taken on them, the run stays in decoupled mode. Weights of 0 have no effect in bypass mode.
        """
        if OUTSIDE_CLIP_METRIC not in metrics:
            return
        expected = {**readings, CLIP: metrics[OUTSIDE_CLIP_METRIC], ZEROED: 0.0}
        # Half of each limit, since a gap just below its limit would send the run back and forth.
        safe = all(value <= self._limits[figure] / 2 for figure, value in expected.items())
        self._safe_updates = self._safe_updates + 1 if safe else 0
        # The wait doubles with every return that did not last, so that a run cannot swing between the modes for ever.
        wait = self._correction.guard_return_after * 2**self._returns
        if self._safe_updates < wait:
            return
        self._change_mode(fallen_back=False)
        self._returns += 1
        self.say(f"guard: step {step}: the gap has been safe for {wait} updates in a row. Back to bypass mode")

    def _change_mode(self, *, fallen_back: bool) -> None:
        # Counts of one mode mean nothing in the other.
        self.fallen_back = fallen_back
        self._over_limit = dict.fromkeys(LIMITS, 0)
        self._safe_updates = 0

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        counters = {"over": dict(self._over_limit), "safe": self._safe_updates, "returns": self._returns}
        return {"fallen_back": self.fallen_back, "causes": sorted(self._causes), **counters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore ``state_dict``, as far as the present configuration allows; limits are the configured ones."""
        # The counts go on: a resume must not delay an alarm.
        self._over_limit |= state["over"]
        self._safe_updates = state["safe"]
        self._returns = state["returns"]
        self._causes = set(state.get("causes", ()))
        if state["fallen_back"] and self._configured.bypasses:
            self.fallen_back = self._correction.guard == "fallback"
            back = f"; guard={self._correction.guard} takes it back to bypass"
            follows = ", and goes on there" if self.fallen_back else back
            self.say(f"{self._name}: this run had fallen back to decoupled mode{follows}")
