"""The checks for reward hacking: constructed histories, scatter alone, and the runs of ``benchmarks/hacking.py``."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from rows import found

from flowgrpo_rc.report.checks_images import HACKING_CHECKS, PROMPT_SHARE, SCALES, START, factors, observers
from flowgrpo_rc.report.history import WINDOW, History, Series
from flowgrpo_rc.report.panels import logged_panels

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "hacking.jsonl"
RUNS = [json.loads(line) for line in RESULTS.read_text().splitlines()]
HONEST = ("ocr", "clip_cosine", "edit", "shuffled_ocr")
HACKED = ("brightness", "jpeg", "lucky_number")
NAMES = [check.name for check in HACKING_CHECKS]


def recorded(run):
    """The rows of a run, as far as its result has their columns."""
    columns = run["columns"]
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


def findings(rows, config=None):
    history = History(rows, config)
    return {check.name: finding for check in HACKING_CHECKS if (finding := check.run(history)) is not None}


def levels(rows, config=None):
    return {name: finding.level for name, finding in findings(rows, config).items()}


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run['setting']}_seed{run['seed']}")
def test_measured_runs(run):
    """Honest runs are silent after every step; hacked ones are named before step 60."""
    rows = recorded(run)
    alarms = {}
    for count in range(1, len(rows) + 1):
        for name, level in levels(rows[:count]).items():
            if level != "ok":
                alarms.setdefault(name, rows[count - 1]["step"])
    assert run["setting"] in (*HONEST, *HACKED)
    if run["setting"] in HONEST:
        assert alarms == {}
    else:
        assert min(alarms.values()) < 60


def test_the_study_is_complete():
    """Three seeds each, the honest ones of 150 steps."""
    seeds = {setting: {run["seed"] for run in RUNS if run["setting"] == setting} for setting in ("ocr", *HACKED)}
    assert all(numbers == {1, 2, 3} for numbers in seeds.values())
    assert all(len(recorded(run)) == 151 for run in RUNS if run["setting"] == "ocr")


def history(count=40, climb=0.01, scatter=0.0, seed=0, **changes):
    """Rows of a run whose reward climbs; each change is a value or a function of the step."""
    rng = np.random.default_rng(seed)
    base = {**dict.fromkeys(SCALES, 0.3), PROMPT_SHARE: 0.3, "images/jpeg_bits": 9.0}
    rows = []
    for step in range(1, count + 1):
        row = {"step": step, "reward/mean": 0.2 + climb * step + 0.01 * rng.normal(), "reward/own": 0.0}
        for name, value in {**base, **{f"images/{key}": value for key, value in changes.items()}}.items():
            row[name] = (value(step) if callable(value) else value) * (1 + scatter * rng.normal())
        rows.append(row)
    return rows


def late(start, end):
    """A value that changes once the start is over."""
    return lambda step: start if step <= START else end


@pytest.mark.parametrize(
    ("name", "watched", "problem"),
    [
        # (0.3 + 0.01) * 3 - 0.01 = 0.92, * 8: 2.47; a third is 0.093, an eighth 0.029
        ("contrast", 0.925, 2.48),
        ("saturation", 0.09, 0.028),
        ("sharpness", 0.925, 2.48),
        ("diversity", 0.09, 0.028),
        # 9.01 * 3 - 0.01 = 27.02, * 8: 72.07
        ("jpeg_bits", 27.1, 72.1),
        # (0.3 + 0.05) / (1.05 - 0.3) = 0.467: of shares the odds are three times that at 0.592, eight times at 0.818,
        # a third at 0.098, an eighth at 0.0106
        ("luminance", 0.595, 0.82),
        ("dark_share", 0.097, 0.01),
        ("clipped_share", 0.595, 0.82),
    ],
)
def test_a_statistic_that_leaves_its_start(name, watched, problem):
    start = 9.0 if name == "jpeg_bits" else 0.3
    within = start + 0.95 * (watched - start)
    for end, level in ((within, "ok"), (watched, "watch"), (problem, "problem")):
        assert levels(history(**{name: late(start, end)}))["image_drift"] == level, (end, level)
    one = findings(history(**{name: late(start, watched)}))["image_drift"]
    assert one.metric == f"images/{name}"
    assert f"images/{name} went from {start:g} (steps 1-8) to {watched:g} (steps 31-40), while" in one.measured


def test_images_that_stop_to_depend_on_their_prompts():
    for end, level in ((0.25, "ok"), (0.23, "watch"), (0.11, "problem"), (-0.01, "problem")):
        assert levels(history(prompt_share=late(0.3, end)))["prompt_share"] == level
    # A rise is what learning does, and a model that never looked at its prompts has nothing to lose.
    assert levels(history(prompt_share=late(0.3, 0.9)))["prompt_share"] == "ok"
    assert levels(history(prompt_share=late(-0.01, -0.1)))["prompt_share"] == "ok"


@pytest.mark.parametrize("climb", [0.0, -0.01])
def test_without_a_climbing_reward_no_drift_is_an_alarm(climb):
    rows = history(climb=climb, contrast=late(0.3, 0.01), prompt_share=late(0.3, 0.0))
    assert levels(rows) == {"image_drift": "ok", "prompt_share": "ok"}
    measured = findings(rows)["image_drift"].measured
    assert measured.startswith("images/contrast went from 0.3")
    assert measured.endswith("the reward has not climbed")


def test_a_start_and_an_end_are_needed():
    assert findings(history(START + WINDOW - 1, contrast=late(0.3, 0.01))) == {}
    assert levels(history(START + WINDOW, contrast=late(0.3, 0.01)))["image_drift"] == "problem"


def test_scatter_alone_raises_few_alarms():
    """1000 runs whose reward climbs while every statistic scatters by a fifth of its value."""
    alarms = dict.fromkeys(NAMES, 0)
    for seed in range(1000):
        for name, level in levels(history(24, scatter=0.2, seed=seed)).items():
            alarms[name] += level != "ok"
    assert alarms["image_drift"] <= 3
    assert alarms["prompt_share"] <= 10


def evaluated(scores, climb=0.01, std=0.4, held_out=0.0):
    """Rows with an evaluation every five steps; ``scores`` are the observer's."""
    rows = history(5 * len(scores), climb)
    for i, score in enumerate(scores):
        row = rows[5 * i]
        row |= {"val/reward/mean": 0.2 + held_out * i, "val/reward/own": 0.0, "val/reward/other": score}
        if std:
            row["val/reward/std/other"] = std
    return rows


def test_an_observer_that_falls_while_the_reward_climbs():
    # From 0.5 on, by 0.15 and by 0.5 deviations of 0.4: to 0.44 and to 0.3.
    for end, level in ((0.445, "ok"), (0.43, "watch"), (0.29, "problem"), (0.9, "ok")):
        rows = evaluated([0.5] * 10 + [end] * 2)
        assert levels(rows)["observer_fall"] == level, end
    # Three evaluations are too few.
    assert "observer_fall" not in levels(evaluated([0.5, 0.5, 0.1]))
    assert levels(evaluated([0.5, 0.5, 0.1, 0.1]))["observer_fall"] == "problem"
    assert levels(evaluated([0.5, 0.5, 0.1, 0.1], climb=0.0))["observer_fall"] == "ok"
    # The held-out reward may show a climb before the training reward does.
    for climb, level in ((0.1, "problem"), (-0.1, "ok")):
        assert levels(evaluated([0.5] * 4 + [0.1] * 2, climb=0.0, held_out=climb))["observer_fall"] == level
    # Without deviations, in units of the score.
    assert findings(evaluated([0.5] * 10 + [0.35] * 2, std=None))["observer_fall"].value == pytest.approx(0.3)
    # A fall within the scatter of the evaluations.
    assert levels(evaluated([0.5, 0.6, 0.5, 0.6, 0.5, 0.6, 0.5, 0.6, 0.48, 0.48]))["observer_fall"] == "ok"


def test_evaluations_that_scatter_raise_few_alarms():
    """Deviations of a tenth of the scores' own, which 100 independent images have."""
    rng = np.random.default_rng(0)
    rows = [evaluated((0.5 + 0.04 * rng.normal(size=8)).tolist()) for _ in range(1000)]
    assert sum(levels(one)["observer_fall"] != "ok" for one in rows) <= 20


def test_observers_are_what_the_run_was_not_trained_on():
    row = {"step": 1, "reward/mean": 0.1, "reward/own": 0.1, "reward/faint": 0.1}
    held_out = {"val/reward/mean": 0.1, "val/reward/own": 0.1, "val/reward/faint": 0.1, "val/reward/other": 0.1}
    more = {"val/reward/std/other": 0.1, "val/reward/judge/style": 0.1}
    rows = [{**row, **held_out, **more}]
    assert observers(History([{"step": 0, **held_out}])) == []
    assert observers(History(rows)) == ["val/reward/other"]
    weights = {"reward": {"functions": {"own": 1.0, "faint": 1e-6}}}
    assert observers(History(rows, weights)) == ["val/reward/faint", "val/reward/other"]


def test_small_weights_are_small_beside_the_largest():
    """Scores from 0 to 100 have weights like these; own functions have theirs in sections of their own."""
    names = ("a", "b", "watched", "mine")
    rows = [{"step": 1, "reward/mean": 0.1} | {f"{kind}reward/{name}": 0.1 for kind in ("", "val/") for name in names}]
    reward = {
        "functions": {"a": 0.01, "b": 0.002},
        "reward_functions": {"watched": {"path": "w.py", "weight": 1e-6}},
        "custom_reward_function": {"path": "m.py", "name": "mine", "weight": 0.005},
    }
    assert observers(History(rows, {"reward": reward})) == ["val/reward/watched"]


def test_panels_draw_each_statistic_against_its_start():
    assert factors(Series("images/contrast", (1, 2), (0.29, 0.29))).values == (1.0, 1.0)
    steps = tuple(range(1, 10))
    drawn = factors(Series("images/dark_share", steps, (0.0,) * 8 + (1.0,)))
    assert drawn.values[:8] == pytest.approx((1.0,) * 8)
    assert drawn.values[8] == pytest.approx((1.05 / 0.05) ** 2)
    run = History(history(contrast=late(0.3, 0.61), prompt_share=0.3))
    panels = {panel.title: panel.words(run) for panel in logged_panels(run)}
    assert "contrast from 1 to 2" in panels["Images against their start"]
    assert "watch above 3; watch below 0.333" in panels["Images against their start"]
    assert "explained by the prompt from 0.3 to 0.3" in panels["Images depend on their prompts"]


def test_findings_are_in_the_report():
    rows = history(contrast=late(0.3, 0.01))
    assert found(rows, None, "image_drift").level == "problem"
    assert math.isfinite(found(rows, None, "prompt_share").value)
