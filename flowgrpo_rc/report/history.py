"""Metrics rows as time series, with the mode that the run is in."""

import functools
import itertools
import math
import re
import warnings
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import fmean, median
from typing import Any

from flowgrpo_rc.actor.config import DiffusionLossConfig
from flowgrpo_rc.actor.mode import ModeInForce
from flowgrpo_rc.correction.options.config import RolloutCorrectionConfig
from flowgrpo_rc.gap.safety import USUAL_MODE, remedy
from flowgrpo_rc.loss.objectives import averages_old_policy
from flowgrpo_rc.sde.types import SDE_TYPES

# Training steps that count as recent: enough that one unlucky batch raises no alarm.
WINDOW = 10

# A metric of one timestep: rollout_corr/logprob_abs_diff/ts_666.667, .../t500, ..._t500.
TIMESTEP = re.compile(
    r"^(?P<metric>(?:actor|rollout_corr|rollout_sync)/.+?)[/_](?:ts|timestep|t)_?(?P<t>\d+(?:\.\d+)?(?:e[+-]?\d+)?)$"
)

# Training reward: here, and in verl.
REWARD = ("reward/mean", "critic/rewards/mean", "critic/score/mean")
LOSS = "actor_rollout_ref.actor.diffusion_loss"
ROLLOUT = "actor_rollout_ref.rollout"
# In force for a run whose mode is not known: the objective's limit acts, and no gap uses it up.
UNKNOWN_MODE = ModeInForce(RolloutCorrectionConfig(bypass_mode=False), DiffusionLossConfig())


class NothingMeasuredError(LookupError):
    """A run logged too little of a metric to measure something on it."""


@dataclass(frozen=True)
class Series:
    """One metric over the steps that logged it; finite values only."""

    metric: str
    steps: tuple[int, ...]
    values: tuple[float, ...]
    now_from: int | None = None
    """Index of the first point of the run's last ``WINDOW`` training steps; None if the metric ended before them."""

    def part(self, start: int, stop: int) -> "Series":
        """Points ``start`` to ``stop``, as a slice."""
        return Series(self.metric, self.steps[start:stop], self.values[start:stop])

    @property
    def mean(self) -> float:
        """Mean over the points."""
        return fmean(self.values)

    @property
    def span(self) -> tuple[int, int]:
        """First and last step."""
        return self.steps[0], self.steps[-1]

    def __len__(self) -> int:
        return len(self.values)


class History:
    """The metrics of a run, with its configuration as far as it is known.

    Args:
        rows: one mapping per step, as in ``metrics.jsonl``, in any order; a row without ``step`` follows the row
            before it, the first is step 1.
        config: the resolved configuration as nested mappings, or None.
        broken_lines: lines of the log that could not be read.
        timeline: the lines of ``timeline.jsonl``.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        config: Mapping[str, Any] | None = None,
        broken_lines: int = 0,
        timeline: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.config = config
        self.timeline = timeline
        self.broken_lines = broken_lines
        steps = _steps(rows)
        # A row of "step", "val/..." and "timing_s/..." alone is a validation's.
        of_training = [any(name.partition("/")[0] not in ("step", "val", "timing_s") for name in row) for row in rows]
        trained_at = list(itertools.compress(steps, of_training))
        highest = itertools.accumulate(trained_at, max)
        self.repeated = [step for step, before in zip(trained_at[1:], highest, strict=False) if step <= before]
        """Training steps that were logged after the same or a later one, for example by two runs in one folder."""
        # Two runs in one folder, or a restored log, may leave rows out of order.
        in_order = sorted(zip(steps, rows, strict=True), key=lambda pair: pair[0])
        self.rows = [row for _, row in in_order]
        self.steps = sorted(steps)
        self.trained = sorted(set(trained_at))
        """The steps that logged more than a validation."""
        self.not_finite: list[tuple[int, str, Any]] = []
        """Step, metric and value of everything logged that is no finite number."""
        # Finite values as ``{metric: {row: value}}``, since most of the metrics that checks look up are not there.
        self._columns: dict[str, dict[int, float]] = {}
        for number, (step, row) in enumerate(in_order):
            for name, logged in row.items():
                column = self._columns.setdefault(name, {})
                value = finite(logged)
                if value is None:
                    self.not_finite.append((step, name, logged))
                else:
                    column[number] = value
        self.names = [name for name in self._columns if name != "step"]
        """Every metric that was logged, in order of its first row."""
        self._place = {step: i for i, step in enumerate(self.trained)}
        # Checks and panels read the same metrics.
        self._series = functools.cache(self._read)

    def series(self, *names: str) -> Series | None:
        """The first of ``names`` that is still logged, else the first that ever was."""
        there = [series for series in map(self._series, names) if series is not None]
        return next((series for series in there if series.now_from is not None), there[0] if there else None)

    def _read(self, name: str) -> Series | None:
        """One metric; a ``rollout_corr/`` name also from rows where the actor logged it, as in bypass mode."""
        own = self._columns.get(name, {})
        # The guard changes the mode during a run, and with it the name.
        by_actor = self._columns.get(f"actor/{name}", {}) if name.startswith("rollout_corr/") else {}
        column = dict(sorted({**by_actor, **own}.items()))
        if not column:
            return None
        metric = name if max(column) in own else f"actor/{name}"
        steps = tuple(self.steps[number] for number in column)
        return Series(metric, steps, tuple(column.values()), self._now_from(steps))

    def _now_from(self, steps: tuple[int, ...]) -> int | None:
        """Index of the first recent point of a metric that was logged at ``steps``; None if there is none. A metric
        that is logged at intervals gets a window of twice its own spacing."""
        places = [self._place[step] for step in steps if step in self._place]
        # The median ignores a single long pause, as after a resume.
        spacing = median(b - a for a, b in itertools.pairwise(places)) if len(places) > 1 else 1
        window = max(WINDOW, math.ceil(2 * spacing)) if spacing > 1 else WINDOW
        start = self.trained[-window:][0] if self.trained else self.steps[0]
        first = bisect_left(steps, start)
        return first if first < len(steps) else None

    def recent(self, *names: str) -> Series | None:
        """Points of ``series`` in the run's last ``WINDOW`` training steps; None if it is no longer logged."""
        series = self.series(*names)
        return None if series is None or series.now_from is None else series.part(series.now_from, len(series))

    def require(self, *names: str) -> Series:
        """``recent``, of a metric that a measurement cannot do without.

        Raises:
            NothingMeasuredError: the metric is not logged.
        """
        series = self.recent(*names)
        if series is None:
            raise NothingMeasuredError(f"{', '.join(names)}: not logged")
        return series

    def whole(self, *names: str, least: int) -> Series:
        """``series``, with at least so many points.

        Raises:
            NothingMeasuredError: there are fewer.
        """
        series = self.series(*names)
        if series is None or len(series) < least:
            raise NothingMeasuredError(f"{', '.join(names)}: logged less than {least} times")
        return series

    def is_raised(self, name: str) -> bool:
        """Return true if a metric that is 0 while all is well, such as the guard's, is above 0 now."""
        series = self.recent(name)
        return series is not None and series.values[-1] > 0

    def by_timestep(self) -> dict[str, dict[float, Series]]:
        """``recent`` as ``{metric: {timestep: series}}`` of everything ``TIMESTEP`` matches, from noise to image."""
        found: dict[str, dict[float, Series]] = {}
        for name in self.names:
            match = TIMESTEP.match(name)
            series = self.recent(name) if match else None
            if match and series is not None:
                found.setdefault(match["metric"], {})[float(match["t"])] = series
        return {metric: dict(sorted(steps.items(), reverse=True)) for metric, steps in found.items()}

    def setting(self, path: str, default: Any = None) -> Any:
        """A setting by its dotted name."""
        node: Any = self.config
        for key in path.split("."):
            if not isinstance(node, Mapping) or key not in node:
                return default
            node = node[key]
        return node

    @property
    def staleness(self) -> int:
        """Batches by which the engine's adapter is configured to be older than the actor's."""
        return max(self.setting(f"{ROLLOUT}.{name}", 0) or 0 for name in ("adapter_lag", "ahead"))

    @property
    def sde(self) -> bool:
        """Log-probs are those of SDE steps (means over latent dimensions), not of tokens."""
        # verl's rows of tokens have neither of the two.
        return self.setting(f"{ROLLOUT}.algo.sde_type") is not None or any(
            name.startswith("rollout_sync/") or TIMESTEP.match(name) for name in self.names
        )

    @property
    def densities(self) -> bool:
        """Log-probs are those of densities: not ``cps``'s, which omit ``1/(2 std^2)``, and no matching errors."""
        sde_type = SDE_TYPES.get(str(self.setting(f"{ROLLOUT}.algo.sde_type")))
        return (sde_type is None or sde_type.log_prob_is_density) and not self.mode.objective.clean

    @property
    def averages_old_policy(self) -> bool:
        """The old policy is an average of the actor, which may be far away on purpose."""
        names = ("decay_schedule", "decay", "update_interval")
        return averages_old_policy(*(self.setting(f"algorithm.old_policy_{name}") for name in names))

    @property
    def learns_from_preferences(self) -> bool:
        """The rewards of the training are 1 and 0 for the images of a file's pairs."""
        return bool(self.setting("data.preferences"))

    # ------------------------------------------------------------------ the mode in force

    @functools.cached_property
    def configured_mode(self) -> ModeInForce | None:
        """The configured mode; None without a configuration, or with one that this version does not accept."""
        if self.config is None:
            return None
        correction = self.setting("algorithm.rollout_correction")
        resolved = self.setting("actor_rollout_ref.actor.rollout_correction")
        known = {field.name for field in fields(DiffusionLossConfig)}
        options = {key: value for key, value in (self.setting(LOSS) or {}).items() if key in known}
        try:
            # Warnings about a dialect were given when the run started.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return ModeInForce(
                    RolloutCorrectionConfig.from_dict(resolved if isinstance(resolved, Mapping) else correction),
                    DiffusionLossConfig(**options),
                )
        # The report must also serve runs of other versions, whose options this one does not know.
        except (AttributeError, TypeError, ValueError):
            return None

    @property
    def fallen_back(self) -> bool:
        """The guard has moved the run to decoupled mode."""
        return self.is_raised("guard/fallback")

    @functools.cached_property
    def mode(self) -> ModeInForce:
        """The mode in force: the configured one, or decoupled mode after a fallback; ``UNKNOWN_MODE`` without one."""
        mode = self.configured_mode or UNKNOWN_MODE
        return mode.decoupled() if mode.has_limit and self.fallen_back else mode

    @property
    def mode_for_remedies(self) -> ModeInForce:
        """The configured mode; the usual one if it is unknown, and the usual criterion if none is configured."""
        mode = self.configured_mode or USUAL_MODE
        correction = mode.rollout_correction
        # Rejected samples without a criterion come from rows of another trainer, which rejects in its own way.
        if correction.rollout_rs is None and correction.rollout_is_mode != "mask":
            usual = USUAL_MODE.rollout_correction
            threshold = correction.rollout_rs_threshold or usual.rollout_rs_threshold
            correction = replace(correction, rollout_rs=usual.rollout_rs, rollout_rs_threshold=threshold)
        return replace(mode, rollout_correction=correction)

    def remedy(self, figure: str) -> str:
        """The remedy for a figure of ``gap.safety`` in this run."""
        return remedy(figure, self.mode_for_remedies, fallen_back=self.fallen_back)

    @property
    def clips(self) -> bool:
        """A ratio is clipped; an objective may bound a divergence instead."""
        return self.mode.has_limit and self.mode.objective.clips

    @property
    def clips_the_ratio(self) -> bool:
        """The plain ratio is clipped, not one that the objective has normalised."""
        return self.mode.has_limit and self.mode.objective.clips_plain_ratio

    @property
    def clips_at_the_engine(self) -> bool:
        """PPO's clip of the plain ratio is centred at the engine's log-probs now."""
        return self.mode.bypasses and self.clips_the_ratio

    @property
    def clip_width(self) -> float | None:
        """Half width of the clip band: the narrower side, or the recent mean of a calibrated band; None if unknown."""
        if self.configured_mode is None or not any(key.startswith("clip_ratio") for key in self.setting(LOSS) or ()):
            return None
        # After a fallback a calibrated band is its lower bound, which is in the mode already.
        loss = self.mode.diffusion_loss
        if loss.clip_ratio == "auto":
            width = self.recent("actor/clip_ratio_auto_mean")
            return None if width is None else width.mean
        sides = (loss.clip_ratio_low, loss.clip_ratio_high)
        return min(float(loss.clip_ratio if side is None else side) for side in sides)


def finite(value: Any) -> float | None:
    """A number as a float; None for anything else, and for NaN and infinity."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _steps(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    steps: list[int] = []
    for row in rows:
        step = finite(row.get("step", row.get("training/global_step")))
        after = steps[-1] + 1 if steps else 1
        steps.append(after if step is None else int(step))
    return steps
