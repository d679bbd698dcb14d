"""Metrics rows as time series, and the few settings that checks need."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

WINDOW = 10
"""Training steps that "now" means: enough that one unlucky batch raises no alarm."""

TIMESTEP = re.compile(r"^(?P<metric>.+?)[/_](?:ts|timestep|t)_?(?P<t>\d+(?:\.\d+)?(?:e[+-]?\d+)?)$")
"""A metric of one timestep: ``rollout_corr/logprob_abs_diff/ts_666.667``, ``.../t500``, ``..._t500``."""

CORRECTION = "rollout_corr/"
REWARD = ("reward/mean", "critic/rewards/mean", "critic/score/mean")
"""Training reward: here, and in verl."""


@dataclass(frozen=True)
class Series:
    """One metric over the steps that logged it; finite values only."""

    metric: str
    steps: tuple[int, ...]
    values: tuple[float, ...]

    def recent(self, count: int = WINDOW) -> "Series":
        """The last ``count`` points."""
        return Series(self.metric, self.steps[-count:], self.values[-count:])

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
    """What a run logged, with what is known of its configuration.

    Args:
        rows: a mapping a step, as in ``metrics.jsonl``; without a ``step`` they are counted from 1.
        config: the resolved configuration as nested mappings, or None.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]], config: Mapping[str, Any] | None = None) -> None:
        self.rows, self.config = rows, config
        self.steps = [_step(row, position) for position, row in enumerate(rows, 1)]
        self.names = list(dict.fromkeys(name for row in rows for name in row if name != "step"))

    def series(self, *names: str) -> Series | None:
        """The first of ``names`` that any row logged; a ``rollout_corr/`` name also as the actor logs it."""
        for name in names:
            for full in (name, f"actor/{name}") if name.startswith(CORRECTION) else (name,):
                points = [(s, row[full]) for s, row in zip(self.steps, self.rows, strict=True) if _finite(row, full)]
                if points:
                    return Series(full, tuple(s for s, _ in points), tuple(float(v) for _, v in points))
        return None

    def recent(self, *names: str) -> Series | None:
        """The last ``WINDOW`` points of ``series``."""
        series = self.series(*names)
        return None if series is None else series.recent()

    def by_timestep(self) -> dict[str, dict[float, Series]]:
        """``{metric: {timestep: series}}`` of everything that ``TIMESTEP`` matches; noisy timesteps first."""
        found: dict[str, dict[float, Series]] = {}
        for name in self.names:
            match = TIMESTEP.match(name)
            series = self.series(name) if match else None
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
        """Whether PPO's clip is centred at the engine's log-probs now: bypass mode, from which no guard has fled."""
        fled = self.series("guard/fallback")
        if fled is not None and fled.values[-1] > 0:
            return False
        bypass = bool(self.correction("bypass_mode", False)) and self.correction("loss_type", "ppo_clip") == "ppo_clip"
        return bypass and self.setting(f"{LOSS}.loss_mode", "flow_grpo") not in ("grpo_guard", "flow_dppo")

    @property
    def clips(self) -> bool:
        """Whether the objective clips at all."""
        return self.correction("loss_type", "ppo_clip") == "ppo_clip"

    @property
    def clip_width(self) -> float | None:
        """Half width of the clip band: the narrower side, or the recent mean of a calibrated band; None: unknown."""
        ratio = self.setting(f"{LOSS}.clip_ratio")
        if ratio == "auto":
            width = self.recent("actor/clip_ratio_auto_mean")
            return None if width is None else width.mean
        sides = [self.setting(f"{LOSS}.clip_ratio_{side}") for side in ("low", "high")]
        known = [float(ratio if side is None else side) for side in sides if side is not None or ratio is not None]
        return min(known, default=None)


LOSS = "actor_rollout_ref.actor.diffusion_loss"


def _step(row: Mapping[str, Any], position: int) -> int:
    step = row.get("step", row.get("training/global_step", position))
    return int(step) if isinstance(step, (int, float)) and math.isfinite(step) else position


def _finite(row: Mapping[str, Any], name: str) -> bool:
    value = row.get(name)
    return isinstance(value, (int, float)) and math.isfinite(value)
