"""Stop requests: the first signal asks, an echo of it is ignored, a later one ends at once."""

import os
import signal

import pytest

from flowgrpo_rc.trainer import interrupt
from flowgrpo_rc.trainer.interrupt import StopRequest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_asks_and_an_echo_is_ignored(number):
    said = []
    before = signal.getsignal(number)
    with StopRequest(lambda: said.append("stopping")) as stop:
        assert not stop.requested
        for _ in range(2):
            os.kill(os.getpid(), number)
        assert stop.requested
    assert said == ["stopping"]
    assert signal.getsignal(number) == before


def test_a_later_signal_ends_at_once(monkeypatch):
    monkeypatch.setattr(interrupt, "SAME_SIGNAL_SECONDS", 0.0)
    with StopRequest(lambda: None) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
