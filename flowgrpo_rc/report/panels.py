"""The panels of a run: the metrics of each, their unit and limits, and a hint what to look for.

To show a new metric, add a ``Line`` to a panel of ``PANELS``, or a panel.
"""

from itertools import product
from typing import Any

from flowgrpo_rc.report.checks_correction import CORRECTION_CHECKS
from flowgrpo_rc.report.checks_gap import GAP
from flowgrpo_rc.report.checks_images import (
    HACKING_LIMITS,
    PROMPT_SHARE,
    SCALES,
    factors,
    functions,
    observers,
)
from flowgrpo_rc.report.finding import number
from flowgrpo_rc.report.history import REWARD, WINDOW, History, Series
from flowgrpo_rc.report.panel import BLUE, GREEN, LIMIT_STYLE, ORANGE, RED, SOFT, Level, Line, Panel, TimestepPanel
from flowgrpo_rc.report.timeline import TimelinePanel

THIN: dict[str, Any] = {"linewidth": 1}
DASHED: dict[str, Any] = {"linewidth": 1, "linestyle": "--"}
FAINT: dict[str, Any] = {"linewidth": 1, "alpha": 0.4}
POINTS: dict[str, Any] = {"marker": "o", "markersize": 4}
# Line styles of the rewards that a total is made of; of more than so many, the later ones are left out.
PART_STYLES = ("-", "--", ":", "-.", (0, (1, 3)), (0, (6, 3, 1, 3)))


CLIP_LINES = (
    Line(("actor/pg_clipfrac_first",), "before learning", RED, name="clipped before learning", key=True),
    Line(("actor/pg_clipfrac",), "all mini-steps", name="clipped over all mini-steps", key=True),
    Line(("actor/pg_clipfrac_inert",), "no gradient", SOFT, name="clipped without a gradient"),
)


def _reward_lines(history: History) -> list[Line]:
    """Training reward with its running mean, its parts if there are several, and the held-out reward."""
    parts = functions(history, "reward/")
    lines = [
        Line(REWARD, "training", name="training reward", key=True, style=FAINT),
        Line(REWARD, "running mean", name="", smooth=True),
    ]
    if len(parts) > 1:
        for part, dashes in zip(parts, PART_STYLES, strict=False):
            style = {**THIN, "linestyle": dashes}
            lines.append(Line((part,), part.removeprefix("reward/"), GREEN, style=style, smooth=True))
    held_out = Line(("val/reward/mean",), "held out", ORANGE, name="held-out reward", key=True, style=POINTS)
    return [*lines, held_out]


def _observer_lines(history: History) -> list[Line]:
    """Held-out scores of rewards that the run was not trained on."""
    return [
        Line((name,), name.removeprefix("val/reward/"), ORANGE, key=True, style={**POINTS, "linestyle": dashes})
        for name, dashes in zip(observers(history), PART_STYLES, strict=False)
    ]


class FactorLine(Line):
    """A statistic of the images as a multiple of its start."""

    def series(self, history: History) -> Series | None:
        series = super().series(history)
        return None if series is None else factors(series)


IMAGE_LINES = tuple(
    FactorLine((metric,), metric.removeprefix("images/").replace("_", " "), color, style=style)
    for metric, (color, style) in zip(SCALES, product((BLUE, ORANGE, GREEN, SOFT), (THIN, DASHED)), strict=True)
)


def _drift_levels(_: History) -> list[Level]:
    high = HACKING_LIMITS["image_drift"].high or 1.0
    sides = {"above": high, "below": 1 / high}
    return [Level(value, f"watch {side} {number(value)}", ":") for side, value in sides.items()]


def _gap_lines(history: History) -> list[Line]:
    """The gap of training, that with equal weights, and the staleness."""
    # The gap before an update if the clip is centred at the engine, else the one that is corrected.
    mean = GAP[1:]
    largest = ("actor/ratio_deviation_first", "rollout_corr/logprob_abs_diff_max")
    lines = [
        Line(GAP[:1], "probe, equal weights", GREEN, name="gap with equal weights", style=THIN),
        Line(("rollout_sync/staleness_abs_mean",), "staleness", ORANGE),
    ]
    if history.clips_at_the_engine:
        lines.append(Line(("actor/clip_ratio_auto_mean",), "clip band (auto)", RED, style=LIMIT_STYLE))
    else:
        # In decoupled mode the gap before an update is that of the actor with itself.
        mean = mean[::-1]
        largest = largest[::-1]
    usual = Line(mean, "mean", name="gap", key=True)
    return [usual, Line(largest, "largest", name="largest gap", key=True, style=FAINT), *lines]


def _clip_level(history: History) -> list[Level]:
    """Half width of a clip band that is centred at the engine, which the gap uses up."""
    width = history.clip_width if history.clips_at_the_engine else None
    return [Level(width, f"clip band {number(width)}")] if width else []


def _sample_size_levels(history: History) -> list[Level]:
    limits = _limits(history, "ess")
    watch = Level(limits.low, f"watch below {limits.low:g}", ":")
    return [watch, Level(limits.problem_low, f"problem below {limits.problem_low:g}")]


def _veto_levels(history: History) -> list[Level]:
    """The limit of vetoed rows, if there are any."""
    vetoed = history.series("rollout_corr/rollout_is_veto_fraction")
    limit = _limits(history, "veto").problem_high
    return [Level(limit, f"vetoed rows, limit {limit:g}")] if vetoed is not None and max(vetoed.values) > 0 else []


def _limits(history: History, check: str) -> Any:
    return next(c for c in CORRECTION_CHECKS if c.name == check).limits_for(history)


def _log_ratio(history: History) -> str:
    # Log-probs of SDE steps are means over latent dimensions; those of ``cps`` and of tokens have a unit of their own.
    return "|log ratio| per dimension" if history.sde and history.densities else "|log ratio|"


# In the page's order.
PANELS: tuple[Panel, ...] = (
    Panel(
        title="Reward",
        unit="reward",
        file="reward",
        lines=_reward_lines,
        caption="Both should climb; only held out falling: the reward is being gamed.",
    ),
    Panel(
        title="Scorers that only look",
        unit="held-out score",
        lines=_observer_lines,
        caption="Falling while the reward climbs: the reward is being gamed.",
    ),
    Panel(
        title="Images against their start",
        unit="factor since the start",
        scale="log",
        lines=IMAGE_LINES,
        levels=_drift_levels,
        caption="Around 1; one that leaves the band while the reward climbs: the reward is being gamed.",
    ),
    Panel(
        title="Images depend on their prompts",
        unit="share of the variance",
        lines=(Line((PROMPT_SHARE,), "explained by the prompt"),),
        levels=(Level(0),),
        caption="Climbs with honest learning; falling while the reward climbs: prompts are being ignored.",
    ),
    Panel(
        title="Clipped samples",
        unit="share of samples",
        file="clip_fraction",
        scale="share",
        # Another objective has no clip band that samples could lie outside of.
        lines=lambda history: CLIP_LINES if history.clips else (),
        caption="Before learning: what the gap alone puts outside the clip band.",
    ),
    Panel(
        title="Gap between engine and actor",
        unit=_log_ratio,
        file="log_prob_gap",
        scale="log",
        lines=_gap_lines,
        # A calibrated clip band is a line, as it moves from step to step.
        levels=lambda history: () if history.series("actor/clip_ratio_auto_mean") else _clip_level(history),
        caption="Steady; where the clip band is drawn, well below it.",
    ),
    TimestepPanel(
        title="Gap by timestep",
        unit=_log_ratio,
        levels=_clip_level,
        caption=f"Last {WINDOW} steps; smooth, and where the clip band is drawn, below it.",
    ),
    Panel(
        title="Effective sample size",
        unit="share of the batch",
        scale="share",
        lines=(Line(("rollout_corr/rollout_is_eff_sample_size",), "effective sample size"),),
        levels=_sample_size_levels,
        caption="1: every sample counts alike; below .3 a few carry all.",
    ),
    Panel(
        title="KL of rollout from training",
        unit="in units of the log-probs",
        lines=(
            Line(("rollout_corr/kl",), "KL, either sign"),
            Line(("rollout_corr/k3_kl",), "k3, non-negative", ORANGE),
        ),
        levels=(Level(0),),
        caption="Around 0; a steady offset is not rounding.",
    ),
    Panel(
        title="Samples that teach nothing",
        unit="share of samples",
        file="rejected_fraction",
        scale="share",
        lines=(
            Line(("rollout_corr/rollout_rs_masked_fraction",), "rejected steps", key=True),
            Line(("rollout_corr/rollout_rs_seq_masked_fraction",), "rejected rows", style={"linestyle": ":"}),
            Line(("rollout_corr/rollout_is_veto_fraction",), "vetoed rows", RED),
            Line(("reward/zero_std_fraction",), "groups with equal rewards", ORANGE),
        ),
        levels=_veto_levels,
        caption="Low; rejection should be for outliers.",
    ),
    Panel(
        title="Shift of the policy within a batch",
        unit="mean log ratio, old over new",
        lines=(Line(("actor/ppo_kl",), "KL from the old policy", key=True),),
        levels=(Level(0),),
        caption="Small against the clip band; a jump is a step that was too large.",
    ),
    Panel(
        title="Where the time goes",
        unit="seconds",
        lines=(
            Line(("timing_s/step",), "the whole step", SOFT, name="seconds a step", key=True),
            Line(("timing_s/rollout",), "rollout"),
            Line(("timing_s/reward",), "reward", GREEN),
            Line(("timing_s/reward_work",), "reward, also beside other stages", GREEN, style={"linestyle": ":"}),
            Line(("timing_s/update",), "update", ORANGE),
        ),
        caption="The rest is mostly validation and saving, which happen in some steps only.",
    ),
    Panel(
        title="Learned from again",
        unit="share",
        scale="share",
        lines=(
            Line(("replay/teaching_fraction",), "steps with a gradient", key=True),
            Line(("replay/kept_fraction",), "steps that rejection kept", SOFT),
            Line(("replay/eff_sample_size",), "effective sample size", GREEN),
        ),
        caption="Of mini-batches from the replay buffer; the rest of the steps are clipped.",
    ),
    Panel(
        title="The prompt writer",
        unit="share",
        scale="share",
        lines=(
            Line(("writer/score",), "score of a rewrite", key=True),
            Line(("writer/distinct_fraction",), "different rewrites of a request", SOFT),
            Line(("writer/unfit_fraction",), "empty or unended", ORANGE),
            Line(("writer/read_fraction",), "read to the end by the image model", GREEN),
        ),
        caption="A score is the mean reward of a rewrite's images.",
    ),
    Panel(
        title="Gap of the prompt writer",
        unit="nats a token",
        lines=(
            Line(("writer/rollout_corr/logprob_abs_diff_mean",), "its actor against its engine", key=True),
            Line(("writer/log_ratio_abs_mean",), "moved by the update", SOFT),
        ),
        caption="Of the log-probs of tokens, before correction.",
    ),
    Panel(
        title="Forwards that draw an image",
        unit="forwards",
        lines=(
            Line(("rollout/forwards_per_image",), "all", SOFT),
            Line(("rollout/forwards_before_window",), "before the window"),
            Line(("rollout/forwards_in_window",), "in the window", ORANGE),
            Line(("rollout/forwards_after_window",), "after the window", GREEN),
        ),
        caption="Of a cheaper rollout; without one every denoising step is a forward.",
    ),
    Panel(
        title="Waiting for each other",
        unit="share of the time",
        file="waiting",
        scale="share",
        lines=(
            Line(("perf/engines_busy",), "engines busy", key=True),
            Line(("perf/trainer_waits",), "trainer waits for images", ORANGE, key=True),
        ),
        caption="Engines always busy and a trainer that never waits: no GPU is idle.",
    ),
    TimelinePanel(
        title="Trainer and engines over time",
        unit="seconds",
        file="timeline",
        engines_elsewhere=True,
        caption="Dotted: a step ends. Gaps: an engine waits. Numbers: the version of the adapter that draws.",
    ),
    TimelinePanel(
        title="The last steps over time",
        unit="seconds",
        caption="By the host's clock; a GPU may still be at work on what a stage has queued.",
    ),
)


def logged_panels(history: History) -> list[Panel]:
    """The panels that the run logged something for."""
    return [panel for panel in PANELS if panel.words(history)]
