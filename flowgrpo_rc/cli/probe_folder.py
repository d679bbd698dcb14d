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
_COLOURS = {"safe": "#2f855a", "not shown safe": "#b7791f", "not safe": "#c53030"}
_LIMIT = {"color": "#c53030", "linewidth": 1}


def make_folder(root: Path) -> None:
    """Create the folder of ``--out``, before anything is measured.

    Raises:
        ValueError: ``root`` cannot be a folder, or cannot be written to.
    """
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


def write_result(root: Path, result: Any) -> list[str]:
    """Write both files; returns lines to print. A different earlier result is kept under a free number.

    Raises:
        OSError: the disk is full, or the folder is gone; earlier files stay as they are.
    """
    values = result.to_dict()
    lines = []
    # Renamed when both are whole, in the same file system, so that a full disk costs no earlier result.
    with tempfile.TemporaryDirectory(dir=root, prefix=".probe-") as name:
        new = Path(name)
        (new / RESULT).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        draw(result, new / PICTURE)
        if _measured(root / RESULT) != _measured(new / RESULT) and _present(root, RESULT, PICTURE):
            number = next(n for n in count(1) if not _present(root, f"probe.{n}.json", f"probe.{n}.png"))
            RunFolder(root).set_aside((RESULT, PICTURE), number)
            kept = ", ".join(_present(root, f"probe.{number}.json", f"probe.{number}.png"))
            lines.append(f"The earlier result there says something else; kept as {kept}")
        for file in (RESULT, PICTURE):
            os.replace(new / file, root / file)
    return [*lines, f"Written: {root / RESULT}, {root / PICTURE}"]


def _present(root: Path, *names: str) -> list[str]:
    return [str(root / name) for name in names if (root / name).exists()]


def _measured(path: Path) -> Any:
    """A result without the timings, which differ from one call to the next; None if there is none to read."""
    try:
        return {**json.loads(path.read_text(encoding="utf-8")), "seconds": None, "saved": None}
    except (OSError, ValueError, TypeError):
        return None


def draw(result: Any, path: Path) -> None:
    """The gap against the clip band, the share clipped and the drift with their intervals and limits, by timestep."""
    from matplotlib.figure import Figure

    steps = result.steps
    drift = result.drift
    verdict = result.advice.verdict
    names = [f"{step.timestep:.0f}" for step in steps]
    panels = 2 if drift is None else 3
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
            left.axhline(width, linestyle=style, label=f"clip band {width:.3g}", **_LIMIT)
    left.set(yscale="log", xlabel="timestep, from noise to image", ylabel="|log pi_actor - log pi_engine|")
    left.set_title("Gap with equal weights")
    left.legend()
    _bars(right, names, [(step.clipped, step.clipped_interval) for step in (*steps, result.overall)])
    # Only bypass mode's PPO has a limit of that share.
    if result.setting["bypass_mode"] and result.setting["loss_type"] == "ppo_clip":
        limit = clip_not_safe(drift_known=drift is not None)
        right.axhline(limit, label=f"limit for all together, {limit:.0%}", **_LIMIT)
        right.legend()
    right.set(ylim=(0, 1), ylabel="share of samples, 95 % interval")
    right.set_title("Left out before anything is learned")
    if drift is not None:
        (axes,) = third
        _bars(axes, names, [(one.value, one.interval) for one in (*drift.timesteps, drift)])
        axes.axhline(DRIFT_NOT_SAFE, label=f"not safe above {DRIFT_NOT_SAFE:g}", **_LIMIT)
        axes.axhline(DRIFT_SAFE, label=f"safe below {DRIFT_SAFE:g}", **_LIMIT | {"color": "#2f855a"})
        # The noisiest timesteps have the lowest bars and are on the left.
        axes.legend(title="all together", loc="upper left")
        axes.set(ylabel="gradients of one step, 95 % interval")
        axes.set_title("Drift: learned whatever is rewarded")
    figure.suptitle(f"{verdict.capitalize()}: {result.advice.because}", color=_COLOURS[verdict], fontsize=10, wrap=True)
    figure.savefig(path, dpi=120)


def _bars(axes: Any, names: list[str], shown: list[Any]) -> None:
    """Values with their intervals, by timestep and for all together."""
    values = [value for value, _ in shown]
    below = [max(value - interval.low, 0.0) for value, interval in shown]
    above = [max(interval.high - value, 0.0) for value, interval in shown]
    colours = ["#2b6cb0"] * len(names) + ["#4a5568"]
    axes.bar([*names, "all"], values, yerr=[below, above], color=colours, ecolor="#1a202c", capsize=4)
    axes.set(xlabel="timestep, from noise to image")
