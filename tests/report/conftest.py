"""Tests of plots draw them."""

import pytest


@pytest.fixture(autouse=True)
def _plots_are_drawn(plots_stay_blank, monkeypatch):
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", plots_stay_blank)
