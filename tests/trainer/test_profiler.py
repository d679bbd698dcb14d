"""The profiler: files that its viewers read, of the steps that were asked for, and a run that is otherwise the same."""

import json

import pytest
from tests_support import untimed

from flowgrpo_rc.trainer import FlowGRPOTrainer

STAGES = {"rollout", "probe", "reward", "score", "correct", "advantage", "update", "sync"}


@pytest.mark.run
def test_a_profiled_step_and_the_run_around_it(small_config, finished_run):
    every_step = ("trainer.save_freq=1", "trainer.test_freq=1")
    folder = FlowGRPOTrainer(small_config("trainer.profile_steps=[2]", *every_step)).fit()
    names = sorted(path.name for path in folder.profile.iterdir())
    assert names == ["step_00002.rank_0.pt.trace.json", "step_00002.rank_0.txt"]
    events = json.loads((folder.profile / names[0]).read_text())["traceEvents"]
    spans = {event["name"] for event in events if event.get("ph") == "X"}
    assert spans >= STAGES
    assert "aten::mm" in spans
    table = (folder.profile / names[1]).read_text()
    assert "Self CPU" in table
    assert "aten::" in table
    assert untimed(folder.rows()) == untimed(finished_run.rows())
    assert not finished_run.profile.exists()
