"""Stage times, by the host's clock or by events that are read once a step on CUDA; the speed as a step logs it."""

import pytest
import torch

from flowgrpo_rc.trainer import timer as module
from flowgrpo_rc.trainer.timer import Span, StageTimer, speed


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


def test_speed_of_a_step_by_hand():
    """8 images in 4 s of rollout and 1 s of update, on two processes; validation and the log do not count."""
    times = {"rollout": 4.0, "update": 1.0, "validate": 100.0, "save": 7.0, "log": 0.5}
    found = speed({f"timing_s/{stage}": seconds for stage, seconds in times.items()}, images=8, processes=2)
    assert found == {
        "timing_per_image_ms/rollout": 500.0,
        "timing_per_image_ms/update": 125.0,
        "perf/total_num_images": 8.0,
        "perf/time_per_step": 5.0,
        "perf/images_per_second": 1.6,
        "perf/throughput": 0.8,
    }


def test_mfu_is_the_share_of_the_time_that_the_work_takes_at_the_peak():
    """1.5 s of one GPU's peak, in 5 s of two."""
    times = {"timing_s/rollout": 4.0, "timing_s/update": 1.0}
    assert speed(times, images=8, processes=2, seconds_at_peak=1.5)["perf/mfu"] == pytest.approx(0.15)
    assert "perf/mfu" not in speed(times, images=8, processes=2)


def test_a_row_without_an_update_has_no_speed():
    """The first validation; and the probe before training draws images of its own."""
    assert speed({"timing_s/validate": 3.0, "timing_s/probe": 1.0, "timing_s/step": 4.0}, images=8, processes=1) == {}
