"""Threads of a process of ours do not spin for long; a user's own process and settings are left alone."""

import os
import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest

from flowgrpo_rc import threads
from flowgrpo_rc.cli.main import main
from flowgrpo_rc.rollout.process import engine_environment

OURS = {"GOMP_SPINCOUNT": str(threads.SPINS)}


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr(threads, "is_busy", lambda: False)


@pytest.fixture
def x86(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")


@pytest.fixture
def unset(monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("machine", ["x86_64", "AMD64", "aarch64"])
@pytest.mark.parametrize(
    "chosen", [{}, {"OMP_NUM_THREADS": "3"}, {"GOMP_SPINCOUNT": "infinite"}, {"OMP_WAIT_POLICY": "active"}]
)
def test_only_where_a_turn_is_long_and_the_user_has_settled_nothing(monkeypatch, machine, chosen):
    """The number of threads stays in any case: it would change the last digits of results."""
    monkeypatch.setattr(platform, "machine", lambda: machine)
    environment = dict(chosen)
    threads.limit_spinning(environment)
    settled = machine == "aarch64" or not chosen.keys() <= {"OMP_NUM_THREADS"}
    assert environment == (chosen if settled else chosen | OURS)


def test_the_command_line_called_from_a_process_with_torch_leaves_it_alone(x86, unset, capsys):
    assert main(["explain-config", "bypass_mode=true"]) == 0
    assert "GOMP_SPINCOUNT" not in os.environ


def test_the_engines_process_has_it_whoever_starts_it(x86, unset):
    assert OURS.items() <= engine_environment("cpu").items()
    assert "GOMP_SPINCOUNT" not in os.environ


@pytest.mark.parametrize(
    ("running", "busy"),
    [
        ([5, 5, 5, 5, 5, 5, 5], True),  # four others on four cores
        ([4, 4, 4, 4, 4, 4, 4], False),
        ([1, 9, 1, 9, 1, 9, 1], False),  # bursts
    ],
)
def test_where_others_want_every_core_threads_sleep_at_once(x86, monkeypatch, tmp_path, running, busy):
    monkeypatch.undo()  # of the fixture that calls every machine quiet
    looks = iter(running)
    load = SimpleNamespace(read_text=lambda: f"0.5 0.4 0.3 {next(looks)}/512 4711\n")
    monkeypatch.setattr(threads, "_LOAD", load)
    monkeypatch.setattr(threads, "_BETWEEN_LOOKS", 0)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    environment: dict[str, str] = {}
    threads.limit_spinning(environment)
    assert environment == ({"GOMP_SPINCOUNT": "0"} if busy else OURS)
    monkeypatch.setattr(threads, "_LOAD", tmp_path / "missing")
    assert threads.is_busy() is False


COMMAND = (
    "from flowgrpo_rc import threads; threads.is_busy = lambda: False; from flowgrpo_rc.cli.main import main; "
    "main(['explain-config', 'bypass_mode=true']); import torch"
)
LIBRARY = "import flowgrpo_rc; flowgrpo_rc.diffusion_loss"


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="libgomp on x86-64 only")
@pytest.mark.parametrize(
    ("code", "settings", "expected"),
    [(COMMAND, {}, str(threads.SPINS)), (COMMAND, {"GOMP_SPINCOUNT": "77"}, "77"), (LIBRARY, {}, "300000")],
)
def test_libgomp_has_read_it(unset, code, settings, expected):
    """libgomp prints what it works with when torch loads it."""
    environment = os.environ | {"OMP_DISPLAY_ENV": "verbose"} | settings
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert f"GOMP_SPINCOUNT = '{expected}'" in done.stderr
