"""The lanes of the last steps, and the finding on waits: by hand, and on damaged files."""

import json

import numpy as np
import pytest
from PIL import Image
from rows import CONFIG, folder, rows, settings

from flowgrpo_rc.report import read_run, write_report
from flowgrpo_rc.report.checks_learning import LEARNING_CHECKS
from flowgrpo_rc.report.finding import OK, WATCH
from flowgrpo_rc.report.history import History
from flowgrpo_rc.report.panels import logged_panels
from flowgrpo_rc.report.summary import write_plots
from flowgrpo_rc.report.timeline import Bar, last_lanes

WAITING_CHECK = next(check for check in LEARNING_CHECKS if check.name == "waiting")
AHEAD = {"actor_rollout_ref__rollout__ahead": 1}


def line(step, start=None, engines=True, started=5000.0):
    """A step of 10 s from ``start`` on: 2 s of waiting and 7 s of update; one of two engines draws for 5 s."""
    at = 10.0 * (step - 1) if start is None else start
    stages = [["rollout", at, at + 2], ["reward", at + 2, at + 3], ["update", at + 3, at + 10]]
    busy = [["sync", at, at + 1, 0, step - 1], ["draw", at + 1, at + 6, 16, step - 1]]
    return {"step": step, "started": started, "stages": stages, "engines": {"b": busy, "a": []} if engines else {}}


def panel(lines):
    made = History(rows(5), CONFIG, timeline=lines)
    return next((p for p in logged_panels(made) if "over time" in p.title), None), made


def test_lanes_are_of_the_last_steps_of_this_start():
    lines = [line(1, started=4000.0), *(line(step, 10.0 * step) for step in range(2, 8))]
    lanes = last_lanes(lines)
    assert lanes.steps == (4, 7)
    assert (lanes.begin, lanes.ends) == (40.0, [50.0, 60.0, 70.0, 80.0])
    assert lanes.trainer[:2] == [Bar("rollout", 40.0, 42.0), Bar("reward", 42.0, 43.0)]
    assert lanes.engines.keys() == {"a", "b"}
    assert lanes.engines["b"][1] == Bar("draw", 41.0, 46.0, 3)
    assert last_lanes(lines[:1]).steps == (1, 1)
    assert last_lanes(lines[:2]).steps == (2, 2)


def test_shares_count_what_lies_within_the_steps():
    """Work that began before the first step counts from its begin on: 1 of 10 s here, and 5 s of the step."""
    first = line(1)
    first["engines"]["b"].insert(0, ["draw", -4.0, 1.0, 16, 0])
    lanes = last_lanes([first])
    assert lanes.share(lanes.engines["b"], "draw") == pytest.approx(0.6)
    assert lanes.share(lanes.trainer, "rollout") == pytest.approx(0.2)


def test_the_panel_says_and_draws_them(tmp_path):
    found, made = panel([line(1), line(2)])
    assert found.words(made) == (
        "steps 1-2 in 20 s; the trainer waited for images 20% of the time and was in update 70%; a drew 0%; b drew 50%"
    )
    written = [path.name for path in write_plots(made, tmp_path)]
    assert "timeline.png" in written
    pixels = np.asarray(Image.open(tmp_path / "timeline.png").convert("RGB")).reshape(-1, 3)
    for colour in ("#2563a8", "#6fa8dc", "#c2570c", "#7b4fa3"):  # draws of two adapters, updates, syncs
        expected = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
        assert (np.abs(pixels.astype(int) - expected).max(1) <= 2).sum() > 100, colour


def test_without_engines_the_stages_stand_on_the_page_alone():
    found, made = panel([line(1, engines=False)])
    assert found.words(made) == "steps 1-1 in 10 s; the trainer was in rollout 20% of the time and was in update 70%"
    assert not found.file
    assert panel([])[0] is None


def test_many_engines_stay_within_the_picture():
    many = line(1)
    many["engines"] = {f"{i:02} on a machine with a very long name indeed": [["lost", 1, 2, 1, 0]] for i in range(15)}
    found, made = panel([many])
    assert found.words(made).count("00 on a machine with a ve... drew") == 1
    assert found.words(made).count(" drew ") == 12


def test_the_page_shows_the_timeline_of_a_run_folder(tmp_path):
    root = folder(tmp_path / "run", rows(3))
    lines = [json.dumps(line(step)) for step in range(1, 7)]
    (root / "timeline.jsonl").write_text("\n".join([*lines, '{"step": 7, "sta']))
    page = write_report(read_run(root))[0].read_text()
    assert "Trainer and engines over time" in page
    assert "steps 3-6 in 40 s" in page
    (root / "timeline.jsonl").unlink()
    assert "over time" not in write_report(read_run(root))[0].read_text()


def waiting(busy, waits, reward=0.0, **changes):
    """Of 12 steps whose first ones are otherwise; an update takes 2 s."""
    made = rows(
        12,
        perf__engines_busy=lambda step: busy if step > 2 else 0.0,
        perf__trainer_waits=lambda step: waits if step > 2 else 1.0,
        timing_s__reward=reward,
        timing_s__update=2.0,
    )
    return WAITING_CHECK.run(History(made, settings(**changes)))


SLOW_REWARD = "The trainer waits for rewards (3 s a step) longer than it learns (2 s): have a server"


@pytest.mark.parametrize(
    ("busy", "waits", "reward", "changes", "level", "value", "advice"),
    [
        (0.85, 0.1, 0.0, AHEAD, OK, 0.15, "Give the trainer some"),
        (0.4, 0.1, 1.9, AHEAD, WATCH, 0.6, "Give the trainer some of the engines' GPUs"),
        (0.4, 0.1, 3.0, AHEAD, WATCH, 0.6, SLOW_REWARD),
        (0.9, 0.7, 3.0, AHEAD, WATCH, 0.7, "Give the engines more GPUs"),
        (0.6, 0.55, 0.0, {}, WATCH, 0.55, "Set rollout.ahead=1"),
        (0.3, 0.4, 3.0, {}, WATCH, 0.7, "Set rollout.ahead=1"),
    ],
)
def test_who_waits_for_whom_and_what_to_do(busy, waits, reward, changes, level, value, advice):
    found = waiting(busy, waits, reward, **changes)
    assert (found.level, found.value) == (level, pytest.approx(value))
    assert found.advice.startswith(advice)
    assert f"engines were idle {1 - busy:.0%} of the time, the trainer waited for images {waits:.0%}" in found.measured


def test_waits_are_judged_with_engines_elsewhere_and_after_some_steps_alone():
    assert WAITING_CHECK.run(History(rows(12), settings(**AHEAD))) is None
    early = rows(3, perf__engines_busy=0.1, perf__trainer_waits=0.9)
    assert WAITING_CHECK.run(History(early, settings(**AHEAD))) is None
