"""Plots of a run, drawn from its ``metrics.jsonl``."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flowgrpo_rc.run_folder import RunFolder, write_whole

Row = dict[str, Any]
GAP = ("rollout_corr/logprob_abs_diff_mean", "actor/log_ratio_abs_mean_first")
"""Rollout against training with the same adapter: decoupled mode compares ``pi_old``; in bypass mode the first
mini-step does, before the adapter has moved."""
GAP_MAX = ("rollout_corr/logprob_abs_diff_max", "actor/ratio_deviation_first")
REJECTED = ("actor/rollout_corr/rollout_rs_masked_fraction", "rollout_corr/rollout_rs_masked_fraction")


def series(rows: Sequence[Row], *names: str) -> tuple[list[int], list[float]]:
    """Steps and values of the first of ``names`` that a row holds; rows with none are left out."""
    points = [(row["step"], row[n]) for row in rows for n in names if n in row]
    return [s for s, _ in points], [v for _, v in points]


def write_plots(folder: RunFolder, clip_ratio: float | str) -> list[Path]:
    """``reward.png``, ``clip_fraction.png``, ``log_prob_gap.png``, ``rejected_fraction.png``, ``overview.png``."""
    import matplotlib

    matplotlib.use("Agg", force=False)
    from matplotlib import pyplot as plt

    rows = folder.rows()
    panels: dict[str, Callable[[Any], None]] = {
        "reward": lambda axes: _reward(axes, rows),
        "clip_fraction": lambda axes: _clip(axes, rows),
        "log_prob_gap": lambda axes: _gap(axes, rows, clip_ratio),
        "rejected_fraction": lambda axes: _rejected(axes, rows),
    }
    folder.plots.mkdir(parents=True, exist_ok=True)
    written = []
    for name, draw in panels.items():
        figure, axes = plt.subplots(figsize=(6.4, 4), layout="constrained")
        draw(axes)
        written.append(_save(figure, folder.plots / f"{name}.png"))
    figure, grid = plt.subplots(2, 2, figsize=(10.5, 6.6), layout="constrained")
    for axes, draw in zip(grid.flat, panels.values(), strict=True):
        draw(axes)
    written.append(_save(figure, folder.plots / "overview.png"))
    return written


def _save(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot as plt

    try:
        write_whole(path, lambda temporary: figure.savefig(temporary, dpi=120, format="png"))
    finally:
        plt.close(figure)
    return path


def _reward(axes: Any, rows: Sequence[Row]) -> None:
    steps, values = series(rows, "reward/mean")
    axes.plot(steps, values, color="#9ecae1", linewidth=1, label="training rollouts (SDE)")
    axes.plot(steps, _running_mean(values), color="#08519c", linewidth=2, label="the same, mean of 10 steps")
    steps, values = series(rows, "val/reward/mean")
    axes.plot(steps, values, "o-", color="#d94801", linewidth=2, label="held-out prompts (ODE, fixed noise)")
    _finish(axes, "Reward", "reward")


def _clip(axes: Any, rows: Sequence[Row]) -> None:
    for name, label in (
        ("actor/pg_clipfrac", "all mini-steps"),
        ("actor/pg_clipfrac_first", "first mini-step"),
    ):
        axes.plot(*series(rows, name), label=label)
    axes.set_ylim(-0.02, 1.02)
    _finish(axes, "Share of ratios outside the clip band", "fraction")


def _gap(axes: Any, rows: Sequence[Row], clip_ratio: float | str) -> None:
    steps, values = series(rows, *GAP)
    axes.plot(steps, values, label="mean |log pi_train - log pi_rollout|")
    axes.plot(*series(rows, *GAP_MAX), label="largest")
    if isinstance(clip_ratio, str):
        axes.plot(
            *series(rows, "actor/clip_ratio_auto_mean"),
            color="black",
            linestyle="--",
            linewidth=1,
            label="clip_ratio (auto)",
        )
    else:
        axes.axhline(clip_ratio, color="black", linestyle="--", linewidth=1, label=f"clip_ratio = {clip_ratio:g}")
    if any(v > 0 for v in values):
        axes.set_yscale("log")
    axes.margins(y=0.4)  # room for the legend
    _finish(axes, "Log-prob gap between rollout and training", "nats per latent dimension")


def _rejected(axes: Any, rows: Sequence[Row]) -> None:
    steps, values = series(rows, *REJECTED)
    if steps:
        axes.plot(steps, values, label="rejected SDE steps")
    axes.plot(*series(rows, "reward/zero_std_fraction"), label="prompt groups with equal rewards")
    axes.set_ylim(-0.02, 1.02)
    _finish(axes, "Samples that teach nothing", "fraction")


def _finish(axes: Any, title: str, ylabel: str) -> None:
    axes.set(title=title, xlabel="step", ylabel=ylabel)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)


def _running_mean(values: Sequence[float], window: int = 10) -> list[float]:
    """Mean of the last ``window`` values at each point."""
    return [sum(values[max(0, i - window + 1) : i + 1]) / min(i + 1, window) for i in range(len(values))]
