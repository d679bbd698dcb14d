"""Stop requests: the first signal asks, an echo of it is ignored, a later one ends at once."""

import os
import signal

import pytest

from flowgrpo_rc.trainer import interrupt
from flowgrpo_rc.trainer.interrupt import ending_on_signals, stop_request


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_first_signal_asks_and_an_echo_is_ignored(number):
    said = []
    before = signal.getsignal(number)
    with stop_request(lambda: said.append("stopping")) as stop:
        assert not stop.is_set()
        for _ in range(2):
            os.kill(os.getpid(), number)
        assert stop.is_set()
    assert said == ["stopping"]
    assert signal.getsignal(number) == before


def test_a_later_signal_ends_at_once(monkeypatch):
    monkeypatch.setattr(interrupt, "SAME_SIGNAL_SECONDS", 0.0)
    with stop_request(lambda: None) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.is_set()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def ignored_hangup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGHUP, before)


def test_an_ignored_hangup_stays_ignored(ignored_hangup):
    """As ``nohup`` leaves it."""
    with stop_request(lambda: None) as stop, ending_on_signals():
        os.kill(os.getpid(), signal.SIGHUP)
        assert not stop.is_set()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_outside_the_loop_a_signal_ends(number):
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), ending_on_signals():
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) == before


def test_outside_the_loop_an_echo_is_ignored_and_a_later_signal_ends_the_process(monkeypatch):
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    with ending_on_signals():
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert codes == []
        monkeypatch.setattr(interrupt, "SAME_SIGNAL_SECONDS", 0.0)
        os.kill(os.getpid(), signal.SIGINT)
    assert codes == [130]


def test_a_forked_child_answers_as_if_it_had_no_handlers():
    """``multiprocessing.Pool`` ends its workers with SIGTERM and waits for them; Ctrl-C reaches them too, and the run
    that is asked to stop still wants their work."""
    said = []
    with stop_request(lambda: said.append("stopping")) as stop:
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGHUP)
            if stop.is_set() or said:
                os._exit(1)
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(2)
        assert os.waitpid(child, 0)[1] == signal.SIGTERM
        assert not stop.is_set()
