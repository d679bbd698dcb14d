"""Speed and peak memory as a step logs them."""

import pytest

from flowgrpo_rc.trainer.timer import speed


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
