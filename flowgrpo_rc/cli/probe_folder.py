"""Files of a probe's result, ``probe.json`` and ``probe.png``; the result of another probe is kept under a number."""

import json
import os
import tempfile
from itertools import count
from pathlib import Path
from typing import Any

from flowgrpo_rc.gap.safety import DRIFT_NOT_SAFE, DRIFT_SAFE, clip_not_safe
from flowgrpo_rc.loss.objectives import OBJECTIVES
from flowgrpo_rc.run_folder import RunFolder

RESULT = "probe.json"
PICTURE = "probe.png"
_TIMINGS = ("seconds", "saved")
"""Keys of a result that differ from one call to the next."""
_COLOURS = {"safe": "#2f855a", "not shown safe": "#b7791f", "not safe": "#c53030"}


class ProbeFolder:
    """The folder of ``--out``, created and tested before anything is measured."""

    def __init__(self, root: Path) -> None:
        """Create the folder.

        Raises:
            ValueError: ``root`` cannot be a folder, or cannot be written to.
        """
        self.root = root
        if root.exists() and not root.is_dir():
            raise ValueError(f"--out: {root} is not a folder; give one, or a name that is free")
        try:
            root.mkdir(parents=True, exist_ok=True)
            # The mode does not bind root, nor describe some network disks, so that writing is tried.
            with tempfile.TemporaryFile(dir=root):
                pass
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ValueError(f"--out: cannot write to {root} ({reason}); give another folder") from error
        for name in (RESULT, PICTURE):
            if (root / name).is_dir():
                raise ValueError(f"--out: {root / name} is a folder, where the result goes; give another folder")

    def write(self, result: Any) -> list[str]:
        """Write both files; returns lines to print. A different earlier result is kept under a free number.

        Raises:
            OSError: the disk is full, or the folder is gone; earlier files stay as they are.
        """
        values = result.to_dict()
        # Renamed when both are whole, in the same file system, so that a full disk costs no earlier result.
        with tempfile.TemporaryDirectory(dir=self.root, prefix=".probe-") as name:
            new = Path(name)
            (new / RESULT).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
            draw(result, new / PICTURE)
            lines = [] if self._is_repeated(values) else [self._keep()]
            for file in (RESULT, PICTURE):
                os.replace(new / file, self.root / file)
        return [*lines, f"Written: {self.root / RESULT}, {self.root / PICTURE}"]

    def _is_repeated(self, values: dict[str, Any]) -> bool:
        """True if there is no earlier result, or only its timings differ."""
        try:
            old = json.loads((self.root / RESULT).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return not (self.root / PICTURE).exists()
        except (OSError, ValueError, RecursionError):
            return False
        return isinstance(old, dict) and _without_timings(old) == _without_timings(json.loads(json.dumps(values)))

    def _keep(self) -> str:
        """Move the earlier files to the first free number; returns a line about it."""
        number = next(n for n in count(1) if not any(path.exists() for path in self._numbered(n)))
        RunFolder(self.root).set_aside((RESULT, PICTURE), number)
        kept = ", ".join(str(path) for path in self._numbered(number) if path.exists())
        return f"The earlier result there says something else; kept as {kept}"

    def _numbered(self, number: int) -> list[Path]:
        return [self.root / f"{Path(name).stem}.{number}{Path(name).suffix}" for name in (RESULT, PICTURE)]


def _without_timings(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in _TIMINGS}


def draw(result: Any, path: Path) -> None:
    """The gap against the clip band, the share clipped and the drift with their intervals and limits, by timestep."""
    from matplotlib.figure import Figure

    steps = result.steps
    verdict = result.advice.verdict
    limit = clip_not_safe(drift_known=result.drift is not None)
    names = [f"{step.timestep:.0f}" for step in steps]
    panels = 2 if result.drift is None else 3
    figure = Figure(figsize=(5 * panels, 4), layout="constrained")
    left, right, *third = figure.subplots(1, panels)
    for values, label, style in (
        ([s.abs_max for s in steps], "largest", ":"),
        ([s.abs_q90 for s in steps], "90 %", "--"),
        ([s.abs_mean for s in steps], "mean", "-"),
    ):
        left.plot(names, [max(value, 1e-9) for value in values], style, marker="o", color="#2b6cb0", label=label)
    if OBJECTIVES[result.setting["loss_mode"]].clips_plain_ratio:
        # Other objectives compare another quantity than the log ratio drawn here with their limit.
        for width, style in zip(sorted(set(result.setting["clip_band"])), ("-", "--"), strict=False):
            left.axhline(width, color="#c53030", linewidth=1, linestyle=style, label=f"clip band {width:.3g}")
    left.set(yscale="log", xlabel="timestep, from noise to image", ylabel="|log pi_actor - log pi_engine|")
    left.set_title("Gap with equal weights")
    left.legend()
    shown = [*steps, result.overall]
    below = [max(step.clipped - step.clipped_interval.low, 0.0) for step in shown]
    above = [max(step.clipped_interval.high - step.clipped, 0.0) for step in shown]
    colours = ["#2b6cb0"] * len(steps) + ["#4a5568"]
    shares = [step.clipped for step in shown]
    right.bar([*names, "all"], shares, yerr=[below, above], color=colours, ecolor="#1a202c", capsize=4)
    # Only bypass mode's PPO has a limit of that share.
    if result.setting["bypass_mode"] and result.setting["loss_type"] == "ppo_clip":
        right.axhline(limit, color="#c53030", linewidth=1, label=f"limit for all together, {limit:.0%}")
        right.legend()
    right.set(ylim=(0, 1), xlabel="timestep, from noise to image", ylabel="share of samples, 95 % interval")
    right.set_title("Left out before anything is learned")
    for axes in third:
        _draw_drift(axes, result.drift, names, colours)
    figure.suptitle(f"{verdict.capitalize()}: {result.advice.because}", color=_COLOURS[verdict], fontsize=10, wrap=True)
    figure.savefig(path, dpi=120)


def _draw_drift(axes: Any, drift: Any, names: list[str], colours: list[str]) -> None:
    """The drift with its interval, by timestep and for the whole window."""
    shown = [*drift.timesteps, drift]
    values = [one.value for one in shown]
    below = [one.value - one.interval.low for one in shown]
    above = [one.interval.high - one.value for one in shown]
    axes.bar([*names, "all"], values, yerr=[below, above], color=colours, ecolor="#1a202c", capsize=4)
    axes.axhline(DRIFT_NOT_SAFE, color="#c53030", linewidth=1, label=f"not safe above {DRIFT_NOT_SAFE:g}")
    axes.axhline(DRIFT_SAFE, color="#2f855a", linewidth=1, label=f"safe below {DRIFT_SAFE:g}")
    # The noisiest timesteps have the lowest bars and are on the left.
    axes.legend(title="all together", loc="upper left")
    axes.set(xlabel="timestep, from noise to image", ylabel="gradients of one step, 95 % interval")
    axes.set_title("Drift: learned whatever is rewarded")
