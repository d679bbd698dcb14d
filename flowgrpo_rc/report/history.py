"""Metrics rows as time series, and the few settings that checks need."""

import functools
import itertools
import math
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from flowgrpo_rc.gap.remedies import RunSetup
from flowgrpo_rc.loss.objectives import DEFAULT, OBJECTIVES, Objective
from flowgrpo_rc.sde.types import SDE_TYPES

WINDOW = 10
"""Training steps that "now" means: enough that one unlucky batch raises no alarm."""

TIMESTEP = re.compile(
    r"^(?P<metric>(?:actor|rollout_corr|rollout_sync)/.+?)[/_](?:ts|timestep|t)_?(?P<t>\d+(?:\.\d+)?(?:e[+-]?\d+)?)$"
)
"""A metric of one timestep: ``rollout_corr/logprob_abs_diff/ts_666.667``, ``.../t500``, ``..._t500``."""

LARGEST = 1e150
"""Beyond this a value counts as infinite: its square is. Below its inverse one counts as 0, for the same reason."""
CORRECTION = "rollout_corr/"
REWARD = ("reward/mean", "critic/rewards/mean", "critic/score/mean")
"""Training reward: here, and in verl."""


@dataclass(frozen=True)
class Series:
    """One metric over the steps that logged it; finite values only."""

    metric: str
    steps: tuple[int, ...]
    values: tuple[float, ...]
    now_from: int | None = None
    """Index of the first point of the run's last ``WINDOW`` training steps; None where it ended before them."""

    def part(self, start: int, stop: int) -> "Series":
        """Points ``start`` to ``stop``, as a slice."""
        return Series(self.metric, self.steps[start:stop], self.values[start:stop])

    @property
    def now(self) -> "Series | None":
        """The points of the run's last ``WINDOW`` training steps; None where the metric is no longer logged."""
        return None if self.now_from is None else self.part(self.now_from, len(self))

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
    """What a run logged, with what is known of its configuration.

    Args:
        rows: a mapping a step, as in ``metrics.jsonl``, in any order; one without a ``step`` comes after the row
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
        trained_at = [step for step, row in zip(steps, rows, strict=True) if _trained(row)]
        highest = itertools.accumulate(trained_at, max)
        self.repeated = [step for step, before in zip(trained_at[1:], highest, strict=False) if step <= before]
        """Training steps that were logged after the same or a later one, as where two runs wrote one log."""
        in_order = sorted(zip(steps, rows, strict=True), key=lambda pair: pair[0])
        self.rows = [row for _, row in in_order]
        self.steps = sorted(steps)
        self.trained = sorted(set(trained_at))
        """The steps that logged more than a validation."""
        self._place = {step: i for i, step in enumerate(self.trained)}
        self.names: list[str] = []
        """Every metric that was logged, in order of its first row."""
        self.numeric: set[str] = set()
        """Those that were a number at least once, NaN and infinity among them."""
        self.not_finite: list[tuple[int, str, Any]] = []
        """Step, metric and value of everything logged that is no finite number."""
        self._columns: dict[str, dict[int, float]] = {}
        self._read_columns()
        self._series = functools.cache(self._read)

    def _read_columns(self) -> None:
        """Sort the finite values by metric, as ``{row: value}``, in the only pass over all rows.

        Checks and panels look up some hundred names, most of which a run does not log.
        """
        for number, row in enumerate(self.rows):
            for name, logged in row.items():
                column = self._columns.setdefault(name, {})
                value = finite(logged)
                if value is None:
                    self.not_finite.append((self.steps[number], name, logged))
                else:
                    column[number] = value
        self.numeric = {name for name, column in self._columns.items() if column}
        self.numeric |= {name for _, name, logged in self.not_finite if isinstance(logged, (int, float))}
        self.names = [name for name in self._columns if name != "step"]

    def series(self, *names: str) -> Series | None:
        """The first of ``names`` that is still logged, or else that ever was."""
        there = [series for series in map(self._series, names) if series is not None]
        return next((series for series in there if series.now_from is not None), there[0] if there else None)

    def _read(self, name: str) -> Series | None:
        """One metric; a ``rollout_corr/`` name also from the rows where the actor logged it, as in bypass mode."""
        column = self._columns.get(name, {})
        metric = name
        by_actor = self._columns.get(f"actor/{name}", {}) if name.startswith(CORRECTION) else {}
        if by_actor:
            column = dict(sorted({**by_actor, **column}.items()))
        if not column:
            return None
        if next(reversed(column)) not in self._columns.get(name, {}):
            metric = f"actor/{name}"
        steps = tuple(self.steps[number] for number in column)
        return Series(metric, steps, tuple(column.values()), self._now_from(steps))

    def _now_from(self, steps: tuple[int, ...]) -> int | None:
        """Where the recent points of a metric that was logged at ``steps`` begin; None where there are none.

        What is logged only now and then gets a window of twice its own spacing.
        """
        places = [self._place[step] for step in steps if step in self._place]
        spacing = median(b - a for a, b in itertools.pairwise(places)) if len(places) > 1 else 1
        window = max(WINDOW, math.ceil(2 * spacing)) if spacing > 1 else WINDOW
        start = self.trained[-window:][0] if self.trained else self.steps[0]
        first = bisect_left(steps, start)
        return first if first < len(steps) else None

    def recent(self, *names: str) -> Series | None:
        """``series(...).now``."""
        series = self.series(*names)
        return None if series is None else series.now

    def is_raised(self, name: str) -> bool:
        """Whether a metric that is 0 while all is well, as the guard's are, is above it now."""
        series = self.recent(name)
        return series is not None and series.values[-1] > 0

    def by_timestep(self) -> dict[str, dict[float, Series]]:
        """``recent`` as ``{metric: {timestep: series}}`` of all that ``TIMESTEP`` matches; noisy timesteps first."""
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
        """How many batches older than the actor's the adapter is that draws, by the settings."""
        return max(self.setting(f"actor_rollout_ref.rollout.{name}", 0) or 0 for name in ("adapter_lag", "ahead"))

    def correction(self, key: str, default: Any = None) -> Any:
        """A key of the rollout correction: resolved in the actor's section, else as it was written."""
        value = self.setting(f"actor_rollout_ref.actor.rollout_correction.{key}")
        return self.setting(f"algorithm.rollout_correction.{key}", default) if value is None else value

    @property
    def sde(self) -> bool:
        """Whether log-probs are those of SDE steps (means over latent dimensions), not of tokens."""
        return self.setting("actor_rollout_ref.rollout.algo.sde_type") is not None or any(
            name.startswith("rollout_sync/") or TIMESTEP.match(name) for name in self.names
        )

    @property
    def clips_at_the_engine(self) -> bool:
        """Whether PPO's clip of the plain ratio is centred at the engine's log-probs now."""
        return self.bypasses and self.clips_the_ratio

    @property
    def fallen_back(self) -> bool:
        """Whether the guard has the run in decoupled mode now."""
        return self.is_raised("guard/fallback")

    @property
    def bypasses(self) -> bool:
        """Whether the run is in bypass mode now: so configured, and no guard has left it."""
        return bool(self.correction("bypass_mode", False)) and not self.fallen_back

    @property
    def cps(self) -> bool:
        """Whether log-probs leave out ``1/(2 std^2)``, and so have a unit of their own."""
        sde_type = SDE_TYPES.get(str(self.setting("actor_rollout_ref.rollout.algo.sde_type")))
        return sde_type is not None and not sde_type.log_prob_is_density

    @property
    def objective(self) -> Objective:
        """The run's objective; the usual one where the configuration names none that is known."""
        return OBJECTIVES.get(str(self.setting(f"{LOSS}.loss_mode")), OBJECTIVES[DEFAULT])

    @property
    def has_limit(self) -> bool:
        """Whether the objective's limit acts: REINFORCE in bypass mode has none."""
        return self.correction("loss_type", "ppo_clip") == "ppo_clip"

    @property
    def clips(self) -> bool:
        """Whether a ratio is clipped at all; an objective may bound a divergence instead."""
        return self.has_limit and self.objective.clips

    @property
    def clips_the_ratio(self) -> bool:
        """Whether the plain ratio is clipped, and not one that the objective has normalised."""
        return self.has_limit and self.objective.clips_plain_ratio

    @property
    def setup(self) -> RunSetup:
        """What remedies depend on; the usual run's where nothing is known."""
        if self.config is None:
            return RunSetup()
        criteria = self.correction("rollout_rs")
        only_weights_reject = criteria is None and self.correction("rollout_is_mode") == "mask"
        return RunSetup(
            objective=self.objective,
            calibrates_clip=self.setting(f"{LOSS}.clip_ratio") == "auto",
            clip_sides=any(self.setting(f"{LOSS}.clip_ratio_{side}") is not None for side in ("low", "high")),
            limits_the_gap=self.bypasses and self.has_limit,
            fallen_back=self.fallen_back,
            rejection=None if only_weights_reject else str(criteria or RunSetup().rejection),
            calibrates_rejection=self.correction("rollout_rs_threshold") == "auto",
        )

    @property
    def weights_act(self) -> bool:
        """Whether importance weights are in the loss, or reject; in bypass mode with PPO they only diagnose."""
        return not (self.bypasses and self.has_limit) or self.correction("rollout_is_mode") == "mask"

    @property
    def clip_width(self) -> float | None:
        """Half width of the clip band: the narrower side, or the recent mean of a calibrated band; None: unknown.

        A run that has fallen back from a calibrated band has its lower bound.
        """
        ratio = self.setting(f"{LOSS}.clip_ratio")
        if ratio == "auto":
            if self.fallen_back:
                return as_number(self.setting(f"{LOSS}.auto_clip_min"))
            width = self.recent("actor/clip_ratio_auto_mean")
            return None if width is None else width.mean
        sides = [self.setting(f"{LOSS}.clip_ratio_{side}") for side in ("low", "high")]
        known = [as_number(ratio if side is None else side) for side in sides]
        return min((side for side in known if side is not None), default=None)


LOSS = "actor_rollout_ref.actor.diffusion_loss"


def finite(value: Any) -> float | None:
    """A number as a float; None for anything else, and for one that is NaN, infinite or too large to compute with."""
    if not isinstance(value, (int, float)) or not -LARGEST < value < LARGEST:
        return None
    return float(value) if abs(value) > 1 / LARGEST else 0.0


def as_number(value: Any) -> float | None:
    """``finite``, also of text: YAML reads ``1e-3`` as such."""
    try:
        return finite(float(value) if isinstance(value, str) else value)
    except (ValueError, OverflowError):
        return None


def _steps(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """The step of every row; one that names none comes after the row before it."""
    steps: list[int] = []
    for row in rows:
        step = finite(row.get("step", row.get("training/global_step")))
        if step is None or abs(step) >= 2**53:
            step = steps[-1] + 1 if steps else 1
        steps.append(int(step))
    return steps


def _trained(row: Mapping[str, Any]) -> bool:
    return any(name != "step" and not name.startswith(("val/", "timing_s/")) for name in row)
