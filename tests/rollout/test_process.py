"""What the trainer does about an engine's process that dies, hangs, fails, or outlives it; without an engine."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests_support import TIMEOUT, end, wait_until

from flowgrpo_rc.models.lora import AdapterMismatchError
from flowgrpo_rc.rollout.base import EngineLostError, RolloutError
from flowgrpo_rc.rollout.placement import EngineTimeouts
from flowgrpo_rc.rollout.process.environment import check_devices, engine_environment, inside, with_threads
from flowgrpo_rc.rollout.process.parent import EngineProcess, Launch

HERE = Path(__file__).parent
TIMEOUTS = EngineTimeouts(
    start_timeout_s=120.0, request_timeout_s=120.0, sync_timeout_s=120.0, silence_timeout_s=20.0, close_timeout_s=20.0
)
FAKE = Launch(
    module="fake_server",
    settings=None,
    environment=os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])])},
    explain=lambda error: f"<{error}>",
)


@pytest.fixture
def make_process():
    """``make(**timeouts)``: a running process, closed in the end."""
    made = []

    def make(settings=None, *, start=True, **timeouts):
        made.append(EngineProcess(replace(FAKE, settings=settings), replace(TIMEOUTS, **timeouts)))
        if start:
            made[-1].start()
        return made[-1]

    yield make
    for process in made:
        process.close()


def is_running(pid):
    """False for zombies too: they hold nothing."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def later(seconds, action, *arguments):
    thread = threading.Timer(seconds, action, arguments)
    thread.start()
    return thread


def test_answers_belong_to_their_calls_and_errors_are_one_line(make_process):
    process = make_process()
    for value in ("one", {"two": torch.arange(3)}, None):
        assert str(process.call("generate", "echo", value)) == str(value)
    assert process.call("sync", {}, 3) == "digest 3"
    with pytest.raises(RolloutError, match="^<cannot draw>$") as caught:
        process.call("generate", "wrong")
    assert not isinstance(caught.value, EngineLostError)
    with pytest.raises(AdapterMismatchError, match="^<does not bind>$"):
        process.call("sync", [])
    assert process.call("generate", "echo", 1) == 1  # it works on


def test_a_large_answer_and_a_long_pause_before_a_call(make_process):
    """Signs of life that nobody reads meanwhile are dropped."""
    process = make_process()
    time.sleep(1.2)
    assert len(process.call("generate", "large", 20_000_000)) == 20_000_000


@pytest.mark.parametrize(
    ("method", "argument", "doing"), [("generate", "sleep", "sampling"), ("sync", "slow", "taking an adapter")]
)
def test_killed_in_the_midst_of_a_call(make_process, method, argument, doing):
    process = make_process()
    pid = process.pid
    later(0.3, os.kill, pid, signal.SIGKILL)
    words = f"^its process {pid} died of signal 9 (before|while) {doing}; log: "
    with pytest.raises(EngineLostError, match=words) as caught:
        process.call(method, argument, 600)
    assert "\n" not in str(caught.value)
    assert process.log.exists()
    with pytest.raises(EngineLostError, match=f"its process {pid} is gone"):
        process.call("generate", "echo", 1)
    process.log.unlink()
    process.start()
    assert process.pid != pid
    assert process.call("generate", "echo", 1) == 1


def test_killed_between_two_calls(make_process):
    process = make_process()
    os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: not is_running(process.pid))
    with pytest.raises(EngineLostError, match="died of signal 9 (before|while) sampling"):
        process.call("generate", "echo", 1)
    process.log.unlink()


def test_ending_by_itself_in_a_call_is_a_loss_too(make_process):
    process = make_process()
    with pytest.raises(EngineLostError, match="ended with code 3 while sampling"):
        process.call("generate", "end", 3)
    process.log.unlink()


def test_a_stopped_process_is_ended_after_its_silence(make_process):
    """SIGSTOP: alive for the kernel, silent for us; stopped before a call, in one, and in the midst of an answer."""
    process = make_process(silence_timeout_s=3.0)
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(EngineLostError, match=r"gave no sign of life for 3 s while sampling; it was ended"):
        process.call("generate", "echo", 1)
    assert not is_running(process.pid)
    process.log.unlink()
    process.start()
    with pytest.raises(EngineLostError, match=r"gave no sign of life for 3 s while sampling; it was ended"):
        process.call("generate", "stop", 0.1)
    process.log.unlink()


def test_stopped_in_the_midst_of_a_message(make_process, monkeypatch):
    """More than the pipe holds: what is read and what is written stops half-way."""
    from flowgrpo_rc.rollout.process import parent

    process = make_process(silence_timeout_s=3.0)
    receive = parent.receive

    def receive_from_a_stopped_one(connection):
        os.kill(process.pid, signal.SIGSTOP)
        return receive(connection)

    # Only now, while the first bytes of a large answer are there.
    with monkeypatch.context() as patched:
        process.call("generate", "echo", 1)
        patched.setattr(parent, "receive", receive_from_a_stopped_one)
        with pytest.raises(EngineLostError, match="gave no sign of life for 3 s while sampling"):
            process.call("generate", "large", 50_000_000)
    process.log.unlink()
    process.start()
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(EngineLostError, match="did not take a request for 3 s while sampling; it was ended"):
        process.call("generate", "echo", b"x" * 50_000_000)
    assert not is_running(process.pid)
    process.log.unlink()


def test_each_call_has_its_own_limit(make_process):
    """The process beats on while its engine hangs."""
    process = make_process(request_timeout_s=0.5, sync_timeout_s=0.7)
    with pytest.raises(EngineLostError, match=r"took more than 0.5 s for sampling; it was ended"):
        process.call("generate", "sleep", 600)
    process.log.unlink()
    process.start()
    with pytest.raises(EngineLostError, match=r"took more than 0.7 s for taking an adapter; it was ended"):
        process.call("sync", "slow")
    process.log.unlink()


def test_a_start_that_fails_says_why_in_one_line(make_process):
    """The first time it is final: nothing would change; later the machine may be the cause."""
    process = make_process("fail", start=False)
    with pytest.raises(RolloutError, match=r"ended with code 1 while starting; log: .*, which ends: <model>$") as error:
        process.start()
    assert not isinstance(error.value, EngineLostError)
    assert "ValueError: there is no such" in process.log.read_text()
    process.log.unlink()
    process._started = True
    with pytest.raises(EngineLostError, match="ended with code 1 while starting"):
        process.start()
    process.log.unlink()


@pytest.mark.parametrize(
    ("settings", "says"), [("die", "died of signal 9 while starting"), ("hang", "took more than 2 s for starting")]
)
def test_a_start_that_dies_or_hangs_may_be_tried_again(make_process, settings, says):
    process = make_process(settings, start=False, start_timeout_s=2.0 if settings == "hang" else 120.0)
    with pytest.raises(EngineLostError, match=says):
        process.start()
    assert not is_running(process.pid)
    process.log.unlink()


def test_close_ends_it_and_removes_its_log(make_process):
    process = make_process()
    pid, log = process.pid, process.log
    assert log.exists()
    process.close()
    assert not is_running(pid)
    assert not log.exists()
    process.close()
    with pytest.raises(EngineLostError, match="is gone"):
        process.call("generate", "echo", 1)
    with pytest.raises(EngineLostError, match="was closed before starting"):
        process.start()
    assert not is_running(process.pid)


@pytest.mark.parametrize("doing", ["starting", "sampling"])
def test_close_from_another_thread_ends_a_call_at_once(make_process, doing):
    process = make_process("hang" if doing == "starting" else None, start=doing == "sampling")
    caught = []

    def work():
        try:
            process.start() if doing == "starting" else process.call("generate", "sleep", 600)
        except EngineLostError as error:
            caught.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.5)
    began = time.monotonic()
    process.close()
    thread.join(10)
    assert time.monotonic() - began < 5
    assert caught == [f"its process {process.pid} was closed while {doing}"]
    assert not process.log.exists()


def test_one_that_was_closed_is_not_started_again(make_process):
    process = make_process()
    pid = process.pid
    process.close()
    with pytest.raises(EngineLostError, match="^its process was closed before starting$"):
        process.start()
    assert process.pid == pid


@pytest.mark.parametrize("how", ["closed", "killed"])
def test_what_it_has_started_ends_with_it(make_process, how):
    """As vllm-omni starts a process for each GPU of an engine."""
    process = make_process()
    below = process.call("generate", "start")
    assert is_running(below)
    if how == "closed":
        process.close()
    else:
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(EngineLostError):
            process.call("generate", "echo", 1)
        process.log.unlink()
    wait_until(lambda: not is_running(below))


FLOODING = """
import os, sys, threading
from multiprocessing.connection import Connection
connection, lock = Connection(int(sys.argv[1])), threading.Lock()
def beat():
    while True:
        with lock:
            connection.send_bytes(b"x" * 1000)
connection.recv_bytes()
threading.Thread(target=beat, daemon=True).start()
import pickle
from flowgrpo_rc.rollout.process.protocol import READY, Reply
with lock:
    connection.send_bytes(pickle.dumps(Reply(READY)))
connection.recv_bytes()
if "{kind}" == "deaf":
    threading.Event().wait()
with lock:
    os._exit(0)
"""
"""An engine whose signs of life have filled the pipe while the trainer was busy with something else."""


@pytest.mark.parametrize(("kind", "ends", "seconds"), [("polite", 0, 120.0), ("deaf", -9, 1.0)])
def test_an_engine_that_waited_long_ends_when_asked_and_a_deaf_one_is_killed(tmp_path, kind, ends, seconds):
    source = FLOODING.replace('b"x" * 1000', "bytes.fromhex('80044e2e') + bytes(1000)")  # a pickled None, and more
    (tmp_path / "flooding.py").write_text(source.replace("{kind}", kind))
    environment = FAKE.environment | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{FAKE.environment['PYTHONPATH']}"}
    process = EngineProcess(
        replace(FAKE, module="flooding", environment=environment), replace(TIMEOUTS, close_timeout_s=seconds)
    )
    process.start()
    time.sleep(1.0)
    running = process._process
    process.close()
    assert running._process.returncode == ends
    assert not process.log.exists()


TRAINER = """
import os, sys, threading, time
from dataclasses import replace
from test_process import FAKE, TIMEOUTS, EngineProcess
how = sys.argv[1]
process = EngineProcess(replace(FAKE, starts_others=how == "with a process below"), TIMEOUTS)
if how == "thread":
    thread = threading.Thread(target=process.start)
    thread.start()
    thread.join()
else:
    process.start()
print(process.pid, flush=True)
if how == "with a process below":
    print(process.call("generate", "start"), flush=True)
if how == "in a call":
    process.call("generate", "sleep", 600)
time.sleep(600)
"""


@pytest.mark.parametrize("how", ["idle", "in a call", "thread", "with a process below", "interrupted"])
def test_no_orphan_when_the_trainer_ends(how):
    """kill -9 leaves the trainer no time to close anything; Ctrl-C signals the trainer's whole group of processes."""
    path = os.pathsep.join([str(HERE), str(HERE.parent), str(HERE.parents[1])])
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True, "start_new_session": True}
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, how], env=os.environ | {"PYTHONPATH": path}, **pipes)
    assert trainer.stdout is not None
    try:
        engine = int(trainer.stdout.readline())
        below = int(trainer.stdout.readline()) if how == "with a process below" else None
        assert is_running(engine)
        if how == "interrupted":
            assert os.getpgid(engine) != trainer.pid
            os.killpg(trainer.pid, signal.SIGINT)
            trainer.wait(TIMEOUT)
    finally:
        end(trainer.pid)
        trainer.wait(TIMEOUT)
    wait_until(lambda: not is_running(engine), 15)
    wait_until(lambda: below is None or not is_running(below), 15)


def test_it_is_a_session_of_its_own_without_the_trainers_launcher(make_process, monkeypatch):
    """So Ctrl-C of the terminal does not reach it, and it joins no process group."""
    process = make_process(start=False)
    for name, value in {"RANK": "1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x"}.items():
        monkeypatch.setenv(name, value)
    own = engine_environment("cpu") | {"PYTHONPATH": FAKE.environment["PYTHONPATH"]}
    process._launch = replace(FAKE, environment=own)
    process.start()
    environment, leads_its_session, has_torch = process.call("generate", "environment")
    assert leads_its_session
    assert not has_torch  # it shows life before anything heavy is imported
    assert not {"RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID"} & environment.keys()


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
def test_a_process_sees_its_own_gpus_alone(monkeypatch, visible, devices, seen):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert engine_environment(*devices)["CUDA_VISIBLE_DEVICES"] == seen


def test_a_gpu_that_is_not_shown_is_refused(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    with pytest.raises(ValueError, match="rollout.devices: got cuda:2, but CUDA_VISIBLE_DEVICES=4,6 shows 2 GPUs"):
        engine_environment("cuda:2")


def test_devices_are_those_that_this_process_sees(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_devices("cpu", "cuda:0", "cuda:1")
    with pytest.raises(ValueError, match="rollout.devices: got cuda:2, but this process sees cuda:0 to cuda:1"):
        check_devices("cuda:2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="got cuda:0, but this process sees no GPU"):
        check_devices("cuda:0")
    assert (inside("cuda:3"), inside("cpu")) == ("cuda:0", "cpu")


def test_an_engines_process_has_the_trainers_number_of_threads():
    torch.set_num_threads(3)
    assert with_threads({"OMP_NUM_THREADS": "16", "A": "b"}) == {"OMP_NUM_THREADS": "3", "A": "b"}
