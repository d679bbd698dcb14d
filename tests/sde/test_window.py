"""SDE windows: where they may lie, and that they lie there uniformly."""

from collections import Counter

import pytest
import torch

from flowgrpo_rc.sde import SDEWindow, draw_window_start, progressive_window_start


def test_defaults_to_the_whole_schedule():
    assert SDEWindow.for_schedule(10, None, None) == SDEWindow(10, 0, 10)


def test_last_cps_step_is_left_out():
    assert SDEWindow.for_schedule(10, None, None, sde_type="cps") == SDEWindow(9, 0, 9)
    with pytest.raises(ValueError, match=r"\[0, 10\].*the last cps step is deterministic"):
        SDEWindow.for_schedule(10, 2, (0, 10), sde_type="cps")


@pytest.mark.parametrize(
    ("size", "window", "message"),
    [
        (2, (0, 11), r"sde_window_range: got \[0, 11\]; with num_inference_steps=10 .* must lie in \[0, 10\]"),
        (2, (4, 4), r"must satisfy 0 <= first < stop"),
        (2, (-1, 4), r"must satisfy 0 <= first < stop"),
        (5, (1, 5), r"sde_window_size: got 5; the range .* choose a size from 1 to 4"),
        (0, (1, 5), r"sde_window_size: got 0; the range"),
    ],
)
def test_refuses_windows_outside_the_schedule(size, window, message):
    with pytest.raises(ValueError, match=message):
        SDEWindow.for_schedule(10, size, window)


def test_start_is_uniform_over_every_place_it_fits():
    window, generator = SDEWindow.for_schedule(10, 2, (1, 5)), torch.Generator().manual_seed(0)
    counts = Counter(draw_window_start(window, generator) for _ in range(3000))
    assert sorted(counts) == [1, 2, 3]
    assert all(900 < n < 1100 for n in counts.values())


@pytest.mark.parametrize(
    ("size", "first", "stop", "iters", "starts"),
    [
        (2, 0, 6, 1, [0, 2, 4, 0, 2]),
        (2, 0, 5, 1, [0, 2, 3, 0, 2]),  # the last place is moved back to fit
        (2, 1, 5, 3, [1, 1, 1, 3, 3, 3, 1]),
        (3, 0, 3, 1, [0, 0, 0]),
    ],
)
def test_progressive_window_slides_by_its_size_and_starts_over(size, first, stop, iters, starts):
    window = SDEWindow(size, first, stop)
    assert [progressive_window_start(window, step, iters) for step in range(len(starts))] == starts
