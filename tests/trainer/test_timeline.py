"""timeline.jsonl and the metrics of engines elsewhere: what they say, by hand and in runs."""

import json
import os
import time
from types import SimpleNamespace

import pytest
from engines_elsewhere import Elsewhere

from flowgrpo_rc.rollout import EngineLostError, RolloutPool
from flowgrpo_rc.rollout.pool import EngineWork, Work
from flowgrpo_rc.run_folder import TIMING_PREFIXES, RunFolderError
from flowgrpo_rc.trainer import FlowGRPOTrainer
from flowgrpo_rc.trainer import timer as module
from flowgrpo_rc.trainer.timer import Span, Timeline, engine_use

R = "actor_rollout_ref.rollout"
STAGES = ["rollout", "rollout", "probe", "reward", "score", "correct", "advantage", "update", "sync"]
OF_ENGINES = {
    "timing_s/engine_draw",
    "timing_s/engine_draw_max",
    "perf/engines_busy",
    "perf/engines_left",
    "perf/engine_restarts",
    "perf/trainer_waits",
}


def engine(name, *done, doing=None, given_up=False):
    return EngineWork(name, [Work(name, *one) for one in done], Work(name, *doing) if doing else None, given_up)


class Pool(RolloutPool):
    """Accounts made by hand."""

    def __init__(self, accounts):
        self.accounts = accounts

    def take_account(self):
        return self.accounts.pop(0)


def test_what_lies_within_the_step_counts_by_hand(monkeypatch):
    """A step from second 10 to 20. One engine draws from 8 to 12 and from 13 on, and takes an adapter in between: it
    draws 2 + 7 s and is busy for 10 of 10 s. The other draws for 3 s and is idle otherwise. A third is given up."""
    first = engine("a", ("draw", 8.0, 12.0), ("sync", 12.0, 13.0), doing=("draw", 13.0, 20.5))
    second = engine("b", ("start", 1.0, 9.0), ("draw", 14.0, 17.0))
    third = engine("c", ("lost", 10.0, 20.0), given_up=True)
    clock = iter([10.0, 20.0])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))
    line = Timeline(Pool([[first, second, third]]), SimpleNamespace(process_index=0, num_processes=1))
    _, found = line.take([Span("rollout", 11.0, 15.0), Span("update", 15.0, 19.0)])
    assert found == pytest.approx(
        {
            "timing_s/engine_draw": (9 + 3) / 2,
            "timing_s/engine_draw_max": 9.0,
            "perf/engines_busy": (1.0 + 0.3) / 2,
            "perf/engines_left": 2.0,
            "perf/engine_restarts": 0.0,
            "perf/trainer_waits": 0.4,
        }
    )
    assert found.keys() == OF_ENGINES


def test_a_draw_over_two_steps_is_counted_once():
    """From 1 to 9, where a step ends at 5: 4 s in each."""
    assert engine_use([engine("a", doing=("draw", 1.0, 5.0))], 0.0, 5.0) == [(4.0, 0.8)]
    assert engine_use([engine("a", ("draw", 1.0, 9.0))], 5.0, 10.0) == [(4.0, 0.8)]


def test_times_are_those_of_the_run_and_only_later_starts_are_restarts(monkeypatch):
    """The clock begins at 100. The engine has started before that, and starts twice more."""
    clock = iter([100.0, 104.0, 110.0])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(module.time, "time", lambda: 5000.0)
    again = engine(
        "a", ("lost", 104.0, 105.0), ("start", 105.0, 106.0), ("lost", 106.0, 106.5), ("start", 106.5, 107.0)
    )
    drew = engine("a", ("start", 98.0, 99.0), ("draw", 101.00004, 103.0, 16, 2))
    line = Timeline(Pool([[drew], [again]]), SimpleNamespace(process_index=3, num_processes=4))
    first, metrics = line.take([Span("rollout", 100.5, 103.5)])
    assert first == {
        "started": 5000.0,
        "stages": [["rollout", 0.5, 3.5]],
        "engines": {"rank 3: a": [["start", -2.0, -1.0, 0, -1], ["draw", 1.0, 3.0, 16, 2]]},
    }
    assert (metrics["perf/engine_restarts"], metrics["perf/trainer_waits"]) == (0.0, 0.75)
    second, metrics = line.take([])
    assert [work[0] for work in second["engines"]["rank 3: a"]] == ["lost", "start", "lost", "start"]
    assert metrics["perf/engine_restarts"] == 2.0
    assert metrics["perf/engines_busy"] == pytest.approx(0.5)


class LostOnce(Elsewhere):
    """An engine that is lost at its second call."""

    calls = 0

    def generate(self, request):
        self.calls += 1
        if self.calls == 2:
            raise EngineLostError("killed")
        return super().generate(request)


def lines(folder):
    return [json.loads(line) for line in folder.timeline.read_text().splitlines()]


@pytest.mark.run
def test_a_run_without_engines_elsewhere_has_its_stages(trained_run):
    folder = trained_run("trainer.test_freq=1")
    first, second = lines(folder)
    assert [line["step"] for line in (first, second)] == [1, 2]
    assert first.keys() == {"step", "started", "stages", "engines"}
    assert first["engines"] == second["engines"] == {}
    assert [stage for stage, _, _ in first["stages"]] == ["validate", *STAGES]
    assert [stage for stage, _, _ in second["stages"]] == ["validate", "log", *STAGES]
    times = [time for line in (first, second) for _, *times in line["stages"] for time in times]
    assert times == sorted(times)
    assert times[0] >= 0
    assert first["started"] == second["started"] < time.time()
    assert not OF_ENGINES & {name for row in folder.rows() for name in row}


@pytest.mark.run
def test_a_run_with_an_engine_elsewhere_records_its_work(small_config, pooled):
    pooled(LostOnce, engines=1)
    with pytest.warns(UserWarning, match="is started anew: killed"):
        folder = FlowGRPOTrainer(
            small_config(f"{R}.ahead=1", "trainer.total_training_steps=3", "data.val_files=null")
        ).fit()
    work = [one for line in lines(folder) for one in line["engines"]["engine 0"]]
    assert [one[0] for one in work].count("lost") == 1
    assert [one[0] for one in work].count("start") == 2
    drawn = [(rows, version) for what, _, _, rows, version in work if what == "draw"]
    versions = sorted({version for _, version in drawn})
    assert versions == [0, 1]  # the third batch is drawn with the adapter after the first
    assert sum(rows for rows, _ in drawn) == 3 * 16
    assert all(begin <= end for _, begin, end, _, _ in work)
    times = [time for _, *times, _, _ in work for time in times]
    assert times == sorted(times)
    rows = [row for row in folder.rows() if row["step"] > 0]
    assert all(row.keys() >= OF_ENGINES for row in rows)
    assert all(name.startswith(TIMING_PREFIXES) for name in OF_ENGINES)
    assert sum(row["perf/engine_restarts"] for row in rows) == 1
    assert {row["perf/engines_left"] for row in rows} == {1}
    assert all(0 <= row[name] <= 1 for row in rows for name in ("perf/engines_busy", "perf/trainer_waits"))
    drew = sum(end - begin for what, begin, end, *_ in work if what == "draw")
    assert sum(row["timing_s/engine_draw"] for row in rows) == pytest.approx(drew, abs=1e-2)


@pytest.mark.run
def test_a_timeline_that_cannot_be_written_costs_no_step(small_config, capsys):
    trainer = FlowGRPOTrainer(small_config())
    os.mkdir(trainer.folder.timeline)
    with pytest.raises(RunFolderError, match=r"trained to step 2, but could not write .*timeline.jsonl \("):
        trainer.fit()
    assert "timeline.jsonl could not be written: " in capsys.readouterr().out
    assert [row["step"] for row in trainer.folder.rows()] == [0, 1, 2]
