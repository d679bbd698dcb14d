"""Child processes: what they find at their start, how calls fail, and that none outlives its parent."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from tests_support import TIMEOUT, alive, end, wait_until

from flowgrpo_rc import processes
from flowgrpo_rc.processes import ChildProcess, ProcessLostError, RemoteError, RemoteObject

pytestmark = pytest.mark.process
HERE = Path(__file__).parent
ROOT = HERE.parent


@pytest.fixture
def make_remote():
    """``make(at_start, **settings)``: a ``Fake`` in a child that has been started, which is ended after the test."""
    made = []

    def make(*at_start, ready=True, **settings):
        made.append(RemoteObject("remote_fake:Fake", *at_start, **settings))
        if ready:
            made[-1].wait_until_ready(TIMEOUT)
        return made[-1]

    yield make
    for remote in made:
        remote.end()


def call(remote, method, *arguments, limit_s: float = TIMEOUT):
    return remote.call(method, *arguments, limit_s=limit_s, doing="sampling")


def test_answers_belong_to_their_calls_and_errors_are_one_line(make_remote):
    remote = make_remote()
    for value in ("one", {"two": torch.arange(3)}, None):
        assert str(call(remote, "generate", "echo", value)) == str(value)
    with pytest.raises(RemoteError, match="^cannot draw$") as caught:
        call(remote, "generate", "wrong")
    assert caught.value.kind == "RuntimeError"
    time.sleep(1.2)  # signs of life that nobody reads meanwhile are dropped
    assert len(call(remote, "generate", "large", 20_000_000)) == 20_000_000


def test_a_child_imports_what_its_parent_does_and_nothing_of_the_working_folder(tmp_path, monkeypatch):
    """Another checkout there, or a user's ``random.py``, would run in its place and end well."""
    for name in ("random", "pickle", "socket", "remote_fake"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a file of the working folder was imported')")
    (tmp_path / "flowgrpo_rc").mkdir()
    (tmp_path / "flowgrpo_rc/__init__.py").write_text("raise SystemExit('the other checkout was imported')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, ""])  # as in an interactive interpreter
    remote = RemoteObject("remote_fake:Fake")
    try:
        remote.wait_until_ready(TIMEOUT)
        _, path, *_ = call(remote, "generate", "found")
        assert [folder for folder in sys.path if folder] == path[: len(sys.path) - 1]
        assert not {"", str(tmp_path)} & set(path)
    finally:
        remote.end()


IGNORING = """
import signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
from flowgrpo_rc.processes import RemoteObject
remote = RemoteObject("remote_fake:Fake", environment={"A": "b"})
remote.wait_until_ready(600)
environment, _, leads_its_session, has_torch, handlers = remote.call("generate", "found", limit_s=600, doing="asking")
remote.close(60)
assert environment.pop("A") == "b" and not set(environment) - {"LC_CTYPE"}, environment
assert leads_its_session and not has_torch
assert handlers == [signal.SIG_DFL] * 3, handlers
assert remote.exit_code == 0
"""


def test_a_child_has_a_session_and_signals_of_its_own():
    """Also below ``nohup``; and it loads no torch before its object does."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT)])}
    subprocess.run([sys.executable, "-c", IGNORING], env=environment, check=True, timeout=TIMEOUT)


def test_killed_in_the_midst_of_a_call_and_between_two(make_remote):
    remote = make_remote()
    threading.Timer(0.3, os.kill, (remote.pid, signal.SIGKILL)).start()
    with pytest.raises(ProcessLostError, match="^died of signal 9 while sampling$"):
        call(remote, "generate", "sleep", 600)
    with pytest.raises(ProcessLostError, match="^died of signal 9 while sampling$"):
        call(remote, "generate", "echo", 1)
    with pytest.raises(ProcessLostError, match="ended with code 3 while sampling"):
        call(make_remote(), "generate", "end", 3)


@pytest.mark.parametrize("when", ["before a call", "in a call", "in a long answer", "in a long request"])
def test_a_stopped_child_is_ended_after_its_silence(make_remote, monkeypatch, when):
    """SIGSTOP: alive for the kernel, silent for the parent."""
    remote = make_remote(silence_s=3.0)
    arguments = ("echo", 1)
    if when == "in a call":
        arguments = ("stop", 0.1)
    elif when == "in a long answer":
        arguments = ("large", 50_000_000)
        receive = processes._receive

        def receive_from_a_stopped_one(connection):
            os.kill(remote.pid, signal.SIGSTOP)  # while the first bytes are there
            return receive(connection)

        monkeypatch.setattr(processes, "_receive", receive_from_a_stopped_one)
    else:
        os.kill(remote.pid, signal.SIGSTOP)
        if when == "in a long request":
            arguments = ("echo", b"x" * 50_000_000)
    with pytest.raises(ProcessLostError, match="^gave no sign of life for 3 s while sampling; it was ended$"):
        call(remote, "generate", *arguments)
    assert not alive(remote.pid)


def test_a_call_that_takes_too_long_is_ended(make_remote):
    """The process gives signs of life while its object hangs."""
    with pytest.raises(ProcessLostError, match=r"^took more than 0.5 s for sampling; it was ended$"):
        call(make_remote(), "generate", "sleep", 600, limit_s=0.5)


@pytest.mark.parametrize(
    ("at_start", "limit_s", "kind", "says"),
    [
        ("fail", TIMEOUT, RemoteError, "^ended with code 1 while starting$"),
        ("die", TIMEOUT, ProcessLostError, "^died of signal 9 while starting$"),
        ("hang", 1.0, ProcessLostError, "^took more than 1 s for starting; it was ended$"),
    ],
)
def test_a_start_that_fails(make_remote, at_start, limit_s, kind, says):
    remote = make_remote(at_start, ready=False)
    with pytest.raises(kind, match=says):
        remote.wait_until_ready(limit_s)
    assert not alive(remote.pid)
    if at_start == "fail":
        assert remote.output().startswith("loading\n")
        said = remote.save_output("child_")
        name = Path(said.removeprefix("log: ").partition(",")[0])
        assert said == f"log: {name}, which ends: model"
        assert "ValueError: there is no such\nmodel" in name.read_text()
        name.unlink()


def test_the_end_of_the_output_is_kept_and_no_file_of_it(make_remote, monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    remote = make_remote()
    for number in range(30):
        call(remote, "generate", "print", f"{number} " + "x" * 10_000)
    call(remote, "generate", "print", "last")
    wait_until(lambda: remote.output().endswith("last\n"))
    assert len(remote.output()) <= processes._LOG_BYTES
    assert list(tmp_path.iterdir()) == []


def test_close_lets_it_end_and_kills_it_where_it_does_not(make_remote):
    polite = make_remote()
    time.sleep(1.2)  # unread signs of life must not hold up its end
    polite.close(TIMEOUT)
    assert polite.exit_code == 0
    polite.close(TIMEOUT)
    deaf = make_remote(environment=os.environ | {"DEAF": "1"})
    deaf.close(0.5)
    assert deaf.exit_code == -9


@pytest.mark.parametrize("how", ["ended", "killed", "by itself"])
def test_what_a_child_has_started_ends_with_it(make_remote, how):
    """As vllm-omni starts a process for each GPU of an engine."""
    remote = make_remote()
    below = call(remote, "generate", "start")
    assert alive(below)
    if how == "ended":
        remote.end()
    elif how == "killed":
        os.kill(remote.pid, signal.SIGKILL)
    else:
        remote.close(TIMEOUT)
    wait_until(lambda: not alive(below))


def test_another_program_in_the_place_of_a_child():
    child = ChildProcess("flowgrpo_rc.processes:run_command", ["sh", "-c", "echo here; exit 3"])
    child.wait(TIMEOUT)
    assert (child.exit_code, child.output()) == (3, "here\n")


PARENT = """
import os, signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from flowgrpo_rc.processes import RemoteObject
how = sys.argv[1]
def start():
    global remote
    remote = RemoteObject("remote_fake:Fake")
    remote.wait_until_ready(600)
thread = threading.Thread(target=start)
thread.start()
thread.join()
print(remote.pid, flush=True)
if how == "with a process below":
    print(remote.call("generate", "start", limit_s=600, doing=how), flush=True)
if how in ("computing", "with a stopped one"):
    threading.Thread(target=remote.call, args=("generate", "compute"), kwargs={"limit_s": 600, "doing": how}).start()
    time.sleep(0.5)
if how == "with a stopped one":
    os.kill(remote.pid, signal.SIGSTOP)
if how == "with a fork that holds the pipe" and not os.fork():
    time.sleep(600)
print("now", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    "how",
    [
        "idle",
        "computing",
        "with a stopped one",
        "with a process below",
        "with a fork that holds the pipe",
        "interrupted",
    ],
)
def test_no_child_outlives_its_parent(how):
    """kill -9 leaves the parent no time to close anything; a child may be stopped, or deep in compiled code, and was
    started by a thread that has ended. Ctrl-C signals the parent's whole process group."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT)])}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True, "start_new_session": True}
    parent = subprocess.Popen([sys.executable, "-c", PARENT, how], env=environment, **pipes)
    assert parent.stdout is not None
    try:
        children = [int(parent.stdout.readline())]
        if how == "with a process below":
            children.append(int(parent.stdout.readline()))
        assert parent.stdout.readline() == "now\n"
        assert all(alive(child) for child in children)
        if how == "interrupted":
            os.killpg(parent.pid, signal.SIGINT)
        else:
            end(parent.pid)
        parent.wait(TIMEOUT)
        wait_until(lambda: not any(alive(child) for child in children))
    finally:
        with suppress(ProcessLookupError):  # its fork is of its group
            os.killpg(parent.pid, signal.SIGKILL)
        parent.stdout.close()
