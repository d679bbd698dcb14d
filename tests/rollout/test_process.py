"""Engines in processes: losses and errors as a pool needs them, and their devices; without an engine."""

import os
import threading
from types import SimpleNamespace

import pytest
import torch
from tests_support import TIMEOUT, alive, wait_until

from flowgrpo_rc.models import ModelConfig
from flowgrpo_rc.models.lora import AdapterMismatchError
from flowgrpo_rc.rollout.base import EngineLostError, RolloutError
from flowgrpo_rc.rollout.config import EngineTimeouts, RolloutConfig
from flowgrpo_rc.rollout.process import EngineHandle, EngineProcess, ProcessHandle, check_devices, engine_environment

starts_one = pytest.mark.process


@pytest.fixture
def make_process(tmp_path, monkeypatch):
    """``make(at_start, **timeouts)``: an engine's process, closed after the test; logs go to ``tmp_path``."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made = []

    def make(*at_start, start=True, **timeouts):
        timeouts = EngineTimeouts(**{f"{name}_timeout_s": seconds for name, seconds in timeouts.items()})
        settings = {"environment": os.environ, "timeouts": timeouts}
        process = EngineProcess("engine", "remote_fake:Fake", *at_start, **settings)
        made.append(process)
        if start:
            process.start()
        return process

    yield make
    for process in made:
        process.close()


@starts_one
def test_errors_keep_their_kind_and_leave_the_process_running(make_process):
    process = make_process()
    assert process.call("sync", {}, 3) == "digest 3"
    with pytest.raises(RolloutError, match="^cannot draw$") as caught:
        process.call("generate", "wrong")
    assert not isinstance(caught.value, EngineLostError)
    with pytest.raises(AdapterMismatchError, match="^does not bind$"):
        process.call("sync", [])
    assert process.call("generate", "echo", 1) == 1


@starts_one
def test_a_loss_names_the_log_and_a_start_replaces_the_process(make_process, tmp_path):
    process = make_process(request=0.5, sync=0.7)
    pid = process.pid
    process.call("generate", "print", "the last words")
    with pytest.raises(EngineLostError) as caught:
        process.call("generate", "sleep", 600)
    (log,) = tmp_path.iterdir()
    assert str(caught.value) == (
        f"its process {pid} took more than 0.5 s for sampling; it was ended; log: {log}, which ends: the last words"
    )
    process.start()
    assert process.pid != pid
    with pytest.raises(EngineLostError, match=r"took more than 0.7 s for taking an adapter; it was ended"):
        process.call("sync", "slow")


@starts_one
def test_an_error_at_the_first_start_is_final_and_later_it_is_a_loss(make_process):
    """At first the settings are the cause, and nothing would change; later the machine may be."""
    process = make_process("fail", start=False)
    with pytest.raises(RolloutError, match=r"ended with code 1 while starting; log: .*, which ends: model$") as error:
        process.start()
    assert not isinstance(error.value, EngineLostError)
    process._has_worked = True
    with pytest.raises(EngineLostError, match="ended with code 1 while starting"):
        process.start()
    with pytest.raises(EngineLostError, match="died of signal 9 while starting"):
        make_process("die")


@starts_one
@pytest.mark.parametrize("doing", ["starting", "sampling"])
def test_close_from_another_thread_ends_a_call_at_once(make_process, doing, tmp_path):
    process = make_process(*(["hang"] if doing == "starting" else []), start=doing == "sampling")
    caught = []

    def work():
        try:
            process.start() if doing == "starting" else process.call("generate", "sleep", 600)
        except EngineLostError as error:
            caught.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    wait_until(lambda: process._in_use.locked() and process.pid > 0 and alive(process.pid))
    process.close()
    thread.join(TIMEOUT)
    assert caught == [f"its process {process.pid} was closed"]
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(EngineLostError, match="^it was closed before starting$"):
        process.start()


@pytest.mark.parametrize(
    ("visible", "devices", "seen"),
    [
        ("4,6", ["cuda:1"], "6"),
        ("4,6", ["cuda"], "4"),
        ("GPU-a,GPU-b,GPU-c", ["cuda:2", "cuda:1"], "GPU-c,GPU-b"),
        (None, ["cuda:2", "cuda:3"], "2,3"),
        ("4,6", ["cpu"], "4,6"),
    ],
)
def test_an_engine_sees_its_own_gpus_alone_and_no_launcher(monkeypatch, visible, devices, seen):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    launcher = {"RANK": "1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x"}
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    environment = engine_environment(*devices)
    assert environment["CUDA_VISIBLE_DEVICES"] == seen
    assert not launcher.keys() & environment.keys()


def test_devices_are_those_that_this_process_sees(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_devices("cpu", "cuda:0", "cuda:1")
    with pytest.raises(ValueError, match="rollout.devices: got cuda:2, but this process sees cuda:0 to cuda:1"):
        check_devices("cuda:2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="got cuda:0, but this process sees no GPU"):
        check_devices("cuda:0")


@pytest.mark.parametrize(("device", "inside"), [("cuda:1", "cuda:0"), ("cpu", "cpu")])
def test_an_engines_process_has_its_device_alone_and_the_trainers_number_of_threads(monkeypatch, device, inside):
    torch.set_num_threads(3)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    handle = ProcessHandle(RolloutConfig(), ModelConfig(), device)
    assert handle._target[-1] == inside
    assert handle._environment["OMP_NUM_THREADS"] == "3"


def test_an_engine_that_is_closed_while_it_is_made_is_ended():
    ended = []

    class Handle(EngineHandle):
        def _make(self):
            self.close()
            return SimpleNamespace(end=lambda: ended.append(True))

    with pytest.raises(EngineLostError, match="^it was closed before starting$"):
        Handle("engine", EngineTimeouts()).start()
    assert ended == [True]
