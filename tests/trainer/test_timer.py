"""Stage times: the host's clock on a processor, events that are read once a step on CUDA."""

import pytest
import torch

from flowgrpo_rc.trainer import timer as module
from flowgrpo_rc.trainer.timer import Span, StageTimer


def test_equal_names_add_up_until_they_are_taken(monkeypatch):
    clock = iter([10.0, 11.5, 20.0, 20.25, 30.0, 34.0])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))
    timer = StageTimer(torch.device("cpu"))
    with timer("rollout"):
        pass
    with pytest.raises(KeyError), timer("save"):
        raise KeyError
    with timer("rollout"):
        pass
    assert timer.take() == {"timing_s/rollout": 5.5, "timing_s/save": 0.25, "timing_s/step": 5.75}
    assert timer.take() == {"timing_s/step": 0}
    spans = [Span("rollout", 10.0, 11.5), Span("save", 20.0, 20.25), Span("rollout", 30.0, 34.0)]
    assert timer.take_spans() == spans
    assert timer.take_spans() == []


def test_on_cuda_nothing_waits_before_the_times_are_taken(monkeypatch):
    """Events that stand in a queue at 0, 1, 2, ... ms; waiting for the last is the only wait."""
    waits = []

    class Event:
        made = 0

        def __init__(self, enable_timing):
            assert enable_timing
            self.place = Event.made
            Event.made += 1

        def record(self, stream):
            assert stream == "the current stream"

        def synchronize(self):
            waits.append(self.place)

        def elapsed_time(self, end):
            return float(end.place - self.place)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the current stream")
    timer = StageTimer(torch.device("cuda"))
    for stage in ("rollout", "update", "rollout"):
        with timer(stage):
            pass
    assert not waits
    assert timer.take() == pytest.approx({"timing_s/rollout": 0.002, "timing_s/update": 0.001, "timing_s/step": 0.003})
    assert waits == [5]
    assert timer.take() == {"timing_s/step": 0}
    assert waits == [5]
    spans = timer.take_spans()
    assert [span.stage for span in spans] == ["rollout", "update", "rollout"]
    times = [time for span in spans for time in (span.begin, span.end)]
    assert times == sorted(times)
