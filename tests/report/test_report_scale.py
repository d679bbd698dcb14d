"""The work of a report grows with the number of rows, not with its square. Counted, as times depend on the machine."""

from unittest.mock import MagicMock

import pytest
from rows import rows, settings

from flowgrpo_rc.report import history as history_module
from flowgrpo_rc.report.health import CHECKS
from flowgrpo_rc.report.history import History
from flowgrpo_rc.report.panel import MOST_POINTS, thinned
from flowgrpo_rc.report.panels import logged_panels
from flowgrpo_rc.report.summary import key_numbers


class Counted(dict):
    """A row that counts how often something looks at it."""

    visits = 0

    def items(self):
        Counted.visits += 1
        return super().items()

    def __iter__(self):
        Counted.visits += 1
        return super().__iter__()

    def get(self, *key):
        Counted.visits += 1
        return super().get(*key)


def work(count, monkeypatch):
    """Visits to rows, numbers that means were taken of, and the most points of a line, of a run of ``count`` steps."""
    summed = []
    monkeypatch.setattr(history_module, "fmean", lambda values: summed.append(len(values)) or sum(values) / len(values))
    Counted.visits = 0
    made = rows(count, reward__mean=lambda step: step % 7, **{"val__reward/mean": lambda step: step % 5})
    history = History([Counted(row) for row in made], settings())
    findings = [check.run(history) for check in CHECKS]
    assert any(findings)
    axes = MagicMock()
    for panel in logged_panels(history):
        panel.words(history)
        if panel.scale != "share":  # which asks the axes what was drawn
            panel.draw(history, axes)
    key_numbers(history)
    return Counted.visits, sum(summed), max(len(call.args[0]) for call in axes.plot.call_args_list)


def test_four_times_the_rows_are_four_times_the_work(monkeypatch):
    few_visits, few_summed, _ = work(3_000, monkeypatch)
    many_visits, many_summed, points = work(12_000, monkeypatch)
    assert few_visits <= 10 * 3_000
    assert many_visits <= 4.2 * few_visits
    # Windows of running means grow with the run: at every point they would be sixteen times as much.
    assert many_summed <= 4.5 * few_summed
    assert points <= MOST_POINTS + 2


def test_thinning_keeps_the_ends_and_the_extremes():
    points = {step: (step * 7919) % 1001 / 1000 for step in range(10_000)} | {7_777: 9.0, 5_555: -9.0}
    kept = thinned(points)
    assert len(kept) <= MOST_POINTS + 2
    assert {0, 5_555, 7_777, 9_999} <= set(kept)
    assert list(kept) == sorted(kept)
    assert all(points[step] == value for step, value in kept.items())
    short = dict(enumerate(range(MOST_POINTS)))
    assert thinned(short) == short


@pytest.mark.parametrize("count", [40, 5_000])
def test_a_smoothed_line_ends_in_the_mean_of_its_last_window(count):
    history = History(rows(count, reward__mean=lambda step: float(step)), settings())
    panel = logged_panels(history)[0]
    smooth = next(series for line, series in panel.logged(history) if line.smooth)
    window = max(10, count // 40)
    assert smooth.values[-1] == pytest.approx(count - (window - 1) / 2)
    assert (smooth.values[0], smooth.span) == (1.0, (1, count))
    assert len(smooth) <= MOST_POINTS + 2
