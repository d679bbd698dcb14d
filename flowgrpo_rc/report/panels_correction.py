"""Figures of the correction: weights, effective sample size, rejection, and the divergences that it answers to."""

from typing import Any

from flowgrpo_rc.report.checks_correction import CORRECTION_CHECKS, is_bound
from flowgrpo_rc.report.finding import number
from flowgrpo_rc.report.history import History
from flowgrpo_rc.report.panel import Panel, Theme, ends, line, logarithmic, several, share_axis

REJECTION_LINES = (
    ("rollout_corr/rollout_rs_masked_fraction", "rejected steps"),
    ("rollout_corr/rollout_rs_seq_masked_fraction", "rejected rows"),
    ("rollout_corr/rollout_is_veto_fraction", "vetoed rows"),
    ("reward/zero_std_fraction", "groups with equal rewards"),
)


def _band(history: History, name: str) -> Any:
    """The limits of a check, for this kind of log-prob."""
    return next(check for check in CORRECTION_CHECKS if check.name == name).limits_for(history)


def draw_rejection(history: History, axes: Any, theme: Theme) -> None:
    """Shares that teach nothing."""
    styles = ((theme.blue, "-"), (theme.blue, ":"), (theme.red, "-"), (theme.orange, "-"))
    drawn: list[tuple[float, ...]] = []
    for (name, label), (color, style) in zip(REJECTION_LINES, styles, strict=True):
        series = history.series(name)
        if series is not None and (series.values not in drawn or name.startswith("reward/")):
            drawn.append(series.values)
            line(axes, series, label, color, linestyle=style)
    veto = history.series("rollout_corr/rollout_is_veto_fraction")
    if veto is not None and max(veto.values) > 0:
        limit = _band(history, "veto").problem_high
        axes.axhline(limit, color=theme.red, linestyle="--", linewidth=1.2, label=f"vetoed rows, limit {limit:g}")
    share_axis(axes)


def describe_rejection(history: History) -> str | None:
    """In words."""
    return several(*(ends(history.series(name), label) for name, label in REJECTION_LINES))


def draw_weights(history: History, axes: Any, theme: Theme) -> None:
    """Mean weight in the range from smallest to largest, and the upper bound where it is near."""
    mean, low, high = (history.series(f"rollout_corr/rollout_is_{kind}") for kind in ("mean", "min", "max"))
    if low is not None and high is not None and low.steps == high.steps:
        band = {"color": theme.blue, "alpha": 0.2, "linewidth": 0, "label": "smallest to largest"}
        axes.fill_between(low.steps, low.values, high.values, **band)
    line(axes, mean, "mean", theme.blue)
    axes.axhline(1, color=theme.soft, linewidth=0.8)
    bound = is_bound(history)
    if bound is not None and high is not None and max(high.values) > 0.5 * (1 + bound):
        axes.axhline(bound, color=theme.red, linestyle="--", linewidth=1.2, label=f"bound {number(bound)}")
    axes.ticklabel_format(axis="y", useOffset=False)
    axes.set(xlabel="step", ylabel="importance weight")


def describe_weights(history: History) -> str | None:
    """In words."""
    return several(
        *(ends(history.series(f"rollout_corr/rollout_is_{k}"), f"weight, {k},") for k in ("mean", "min", "max"))
    )


def draw_ess(history: History, axes: Any, theme: Theme) -> None:
    """Effective sample size."""
    line(axes, history.series("rollout_corr/rollout_is_eff_sample_size"), "effective sample size", theme.blue)
    band = _band(history, "ess")
    for name, limit, style in (("watch", band.low, ":"), ("problem", band.problem_low, "--")):
        axes.axhline(limit, color=theme.red, linestyle=style, linewidth=1.2, label=f"{name} below {limit:g}")
    axes.set_ylim(-0.02, 1.05)
    axes.set(xlabel="step", ylabel="share of the batch")


def describe_ess(history: History) -> str | None:
    """In words."""
    return ends(history.series("rollout_corr/rollout_is_eff_sample_size"), "effective sample size")


KL_LINES = (("rollout_corr/kl", "KL, either sign"), ("rollout_corr/k3_kl", "k3, non-negative"))


def draw_kl(history: History, axes: Any, theme: Theme) -> None:
    """Both estimates of KL(rollout || training), around 0."""
    for (name, label), color in zip(KL_LINES, (theme.blue, theme.orange), strict=True):
        line(axes, history.series(name), label, color)
    axes.axhline(0, color=theme.soft, linewidth=0.8)
    axes.set(xlabel="step", ylabel="in units of the log-probs")


def describe_kl(history: History) -> str | None:
    """In words."""
    return several(*(ends(history.series(name), label) for name, label in KL_LINES))


def draw_perplexity(history: History, axes: Any, theme: Theme) -> None:
    """Perplexity of training over that of rollout, around 1."""
    line(axes, history.series("rollout_corr/ppl_ratio"), "training over rollout", theme.blue)
    axes.axhline(1, color=theme.soft, linewidth=0.8)
    axes.ticklabel_format(axis="y", useOffset=False)
    axes.set(xlabel="step", ylabel="ratio of perplexities")


def describe_perplexity(history: History) -> str | None:
    """In words."""
    return ends(history.series("rollout_corr/ppl_ratio"), "perplexity, training over rollout,")


CHI2_LINES = (("rollout_corr/chi2_token", "single ratios"), ("rollout_corr/chi2_seq", "whole rows"))


def draw_chi2(history: History, axes: Any, theme: Theme) -> None:
    """Both chi-squared divergences, with 1, where unbounded weights have a spread of 1."""
    for (name, label), color in zip(CHI2_LINES, (theme.blue, theme.orange), strict=True):
        line(axes, history.series(name), label, color)
    axes.axhline(1, color=theme.red, linestyle="--", linewidth=1.2, label="1")
    if all(value > 0 for drawn in axes.get_lines() for value in drawn.get_ydata()):
        logarithmic(axes)
    axes.set(xlabel="step", ylabel="chi-squared")


def describe_chi2(history: History) -> str | None:
    """In words."""
    return several(*(ends(history.series(name), f"chi-squared of {label}") for name, label in CHI2_LINES))


CORRECTION_PANELS = (
    Panel("Importance weights", describe_weights, draw_weights, "Around 1; far from the bound."),
    Panel("Effective sample size", describe_ess, draw_ess, "1: every sample counts alike; below .3 a few carry all."),
    Panel("KL of rollout from training", describe_kl, draw_kl, "Around 0; a steady offset is not rounding."),
    Panel("Perplexity ratio", describe_perplexity, draw_perplexity, "Around 1."),
    Panel("Chi-squared divergence", describe_chi2, draw_chi2, "Well below 1."),
)
REJECTION_PANEL = Panel(
    "Samples that teach nothing", describe_rejection, draw_rejection, "Low; rejection should be for outliers."
)
