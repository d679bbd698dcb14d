"""A reward that never returns ends the run: by an interrupt where one reaches it, else with the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types
from pathlib import Path
from types import FrameType

import pytest
from reward_files import GOOD, IMAGES, METADATA, PROMPTS, build, function, write

from flowgrpo_rc.rewards import RewardError
from flowgrpo_rc.rewards.isolation import watch
from flowgrpo_rc.rewards.isolation.user_code import UserCode

LIMIT = 0.3
LATE = rf"did not return within reward\.timeout_s={LIMIT} s; it was at .*mine\.py:"

SLEEPERS = {
    "time.sleep(60)": r"5, in f \(time\.sleep\(60\)\)",
    "while True: pass": r"5, in f",
    "try: time.sleep(60)\nexcept Exception: pass\nreturn [1, 2, 3]": r"5, in f",
    "try: time.sleep(60)\nexcept BaseException: pass\nreturn [1, 2, 3]": r"5, in f",
    "try: time.sleep(60)\nexcept BaseException as e: raise ValueError('x') from e": r"5, in f",
    "threading.Event().wait()": r"5, in f",
    "import queue; queue.Queue().get()": r"5, in f",
    "import subprocess; subprocess.run(['sleep', '60'])": r"5, in f",
    "import socket; a, b = socket.socketpair(); a.recv(1)": r"5, in f",
    "def inner():\n    time.sleep(60)\ninner()": r"6, in inner \(time\.sleep\(60\)\)",
    "os.read(os.pipe()[0], 1)": r"5, in f",
}


@pytest.mark.parametrize(("body", "where"), SLEEPERS.items())
def test_a_call_that_never_returns_is_interrupted(tmp_path: Path, body: str, where: str) -> None:
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGURG)}
    mix = build(write(tmp_path, function(body)), timeout_s=LIMIT)
    start = time.monotonic()
    with pytest.raises(RewardError, match=rf"reward function 'f' {LATE}{where}.*raise reward\.timeout_s") as caught:
        mix(IMAGES, PROMPTS)
    assert LIMIT < time.monotonic() - start < 8
    assert "\n" not in str(caught.value)
    assert {n: signal.getsignal(n) for n in handlers} == handlers


@pytest.mark.parametrize(
    ("source", "where"),
    [
        ("async def f(images, prompts, metadata):\n    await asyncio.sleep(60)", r"5, in f \(await asyncio\.sleep"),
        ("async def f(solution_image):\n    await asyncio.Event().wait()", r"5, in f"),
        (
            "async def ask():\n    await asyncio.sleep(60)\nasync def f(solution_image):\n    await ask()",
            r"5, in ask \(await asyncio\.sleep\(60\)\)",
        ),
        ("async def f(solution_image):\n    time.sleep(60)", r"5, in f \(time\.sleep\(60\)\)"),
    ],
)
def test_a_coroutine_that_never_ends(tmp_path: Path, source: str, where: str) -> None:
    mix = build(write(tmp_path, source), timeout_s=LIMIT)
    with pytest.raises(RewardError, match=LATE + where):
        mix(IMAGES, PROMPTS, METADATA)


@pytest.mark.parametrize(
    ("source", "where"),
    [
        ("time.sleep(60)", r"4, in <module> \(time\.sleep\(60\)\)"),
        (
            "class f:\n    def __init__(self):\n        time.sleep(60)\n"
            "    def __call__(self, images, prompts, metadata): ...",
            r"6, in __init__",
        ),
        ("def __getattr__(name):\n    time.sleep(60)", r"5, in __getattr__"),
    ],
)
def test_before_training(tmp_path: Path, source: str, where: str) -> None:
    with pytest.raises(ValueError, match=LATE + where):
        build(write(tmp_path, source), timeout_s=LIMIT)


@pytest.mark.parametrize("timeout_s", [None, 30.0, 1e300])
def test_a_call_in_time(tmp_path: Path, timeout_s: float | None) -> None:
    threads = threading.active_count()
    mix = build(write(tmp_path, function(f"time.sleep(0.05)\n{GOOD}")), timeout_s=timeout_s)
    for _ in range(3):
        assert mix(IMAGES, PROMPTS).total.tolist() == [1, 2, 3]
    assert threading.active_count() == threads


def test_every_call_has_its_own_deadline(tmp_path: Path) -> None:
    mix = build(write(tmp_path, function(f"time.sleep(0.2)\n{GOOD}")), timeout_s=0.5)
    for _ in range(4):
        mix(IMAGES, PROMPTS)


@pytest.mark.parametrize("threaded", [False, True])
def test_a_deadline_at_any_moment_is_either_met_or_told(tmp_path: Path, threaded: bool) -> None:
    """Around the call's own beginning and end too: no other exception ever comes out."""
    mix = build(write(tmp_path, function(f"time.sleep(0.001)\n{GOOD}")), timeout_s=60)
    outcomes: set[str] = set()

    def score() -> None:
        for step in range(150):
            mix._code["f"].timeout_s = 1e-4 + step * 2e-5
            try:
                outcomes.add(str(mix(IMAGES, PROMPTS).total.tolist()))
            except RewardError as error:
                outcomes.add(type(error).__name__)

    if threaded:
        thread = threading.Thread(target=score)
        thread.start()
        thread.join()
    else:
        score()
    assert outcomes <= {"[1.0, 2.0, 3.0]", "RewardError"}
    assert "RewardError" in outcomes


def test_a_signal_that_comes_late_does_no_harm() -> None:
    os.kill(os.getpid(), signal.SIGURG)
    time.sleep(0.01)


def test_the_deadline_of_a_call_around_another(tmp_path: Path) -> None:
    """The outer one is the shorter, and the inner one passes its signal on."""
    inner = build(write(tmp_path, function("time.sleep(60)")), timeout_s=30)
    outer = build(write(tmp_path, function("return f.inner(images, prompts).total"), "outer.py"), timeout_s=LIMIT)
    sys.modules[outer.functions["f"].function.__module__].f.inner = inner  # type: ignore[attr-defined]
    start = time.monotonic()
    with pytest.raises(RewardError, match=rf"did not return within reward\.timeout_s={LIMIT} s"):
        outer(IMAGES, PROMPTS)
    assert time.monotonic() - start < 10


# ---------------------------------------------------------------------- what no exception reaches

SCRIPT = """
import sys, threading
sys.path.insert(0, {tests!r})
from pathlib import Path
from types import FrameType
import numpy as np
from reward_files import build
from flowgrpo_rc.rewards import RewardError
from flowgrpo_rc.rewards.isolation.user_code import UserCode
from flowgrpo_rc.rewards.isolation import watch
watch.GRACE_S = 0.5
def score():
    mix = build(Path({path!r}), timeout_s=0.3)
    print("started", flush=True)
    sys.stdout.write("kept")  # in a buffer that only an orderly end would write out
    try:
        mix(np.zeros((3, 4, 4, 3), np.uint8), ["a", "b", "c"])
    except RewardError as error:
        print(f"error: {{error}}", file=sys.stderr)
        sys.exit(1)
if {threaded}:
    thread = threading.Thread(target=score)
    thread.start()
    thread.join()
else:
    score()
"""

STUCK = {
    "swallows every exception": (
        "while True:\n    try: time.sleep(60)\n    except BaseException: pass",
        "error: reward function 'f' did not return within reward.timeout_s=0.3 s; it was at",
    ),
    "waits for its own threads": (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(1) as pool: return pool.submit(time.sleep, 60).result()",
        "error: reward function 'f' did not return within reward.timeout_s=0.3 s; it was at",
    ),
    "leaves a thread behind": (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "return ThreadPoolExecutor(1).submit(time.sleep, 60).result()",
        "a thread that it started still runs",
    ),
    "never gives up the interpreter's lock": (
        "import re\nre.match('(a+)+$', 'a' * 60 + 'b')",
        "in f\n",
    ),
}


@pytest.mark.parametrize("kind", STUCK)
def test_the_process_ends(tmp_path: Path, kind: str) -> None:
    body, told = STUCK[kind]
    done = run_stuck(tmp_path, body, threaded=False)
    assert done.returncode == 1
    assert told in done.stderr
    assert "mine.py" in done.stderr
    if kind != "never gives up the interpreter's lock":
        assert done.stdout == "started\nkept"
        assert "Traceback" not in done.stderr


def test_the_process_ends_off_the_main_thread(tmp_path: Path) -> None:
    """No signal reaches a system call there."""
    done = run_stuck(tmp_path, "time.sleep(60)", threaded=True)
    assert done.returncode == 1
    assert "error: reward function 'f' did not return within reward.timeout_s=0.3 s; it was at" in done.stderr


def run_stuck(folder: Path, body: str, *, threaded: bool) -> subprocess.CompletedProcess[str]:
    path = folder / "mine.py"
    path.write_text("import time\n\n\n" + function(body))
    script = SCRIPT.format(tests=str(Path(__file__).parent), path=str(path), threaded=threaded)
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=50, check=False
    )


@pytest.mark.parametrize(
    "source",
    ["def f(images, prompts, metadata):\n    while True: pass", "async def f(solution_image): await asyncio.sleep(60)"],
)
def test_python_code_off_the_main_thread_is_interrupted(tmp_path: Path, source: str) -> None:
    mix, errors = build(write(tmp_path, source), timeout_s=LIMIT), []

    def score() -> None:
        try:
            mix(IMAGES, PROMPTS, METADATA)
        except RewardError as error:
            errors.append(str(error))

    thread = threading.Thread(target=score)
    thread.start()
    thread.join(30)
    assert len(errors) == 1
    assert f"did not return within reward.timeout_s={LIMIT} s" in errors[0]


def test_a_coroutine_off_the_main_thread_is_woken_after_the_interrupt(tmp_path: Path, monkeypatch) -> None:
    """Woken before, while the message is made, it would be waiting again when the interrupt comes, and sleep on."""
    describe = UserCode._describe_overrun

    def slowly(self: UserCode, frame: FrameType | None) -> str:
        message = describe(self, frame)
        time.sleep(0.5)
        return message

    monkeypatch.setattr(UserCode, "_describe_overrun", slowly)
    test_python_code_off_the_main_thread_is_interrupted(
        tmp_path, "async def f(solution_image): await asyncio.sleep(60)"
    )


def test_calls_that_go_on_together_are_each_watched_to_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """One inside another, and one in another thread: what ends first takes nothing from the others."""
    due: list[float | None] = []
    fake = types.SimpleNamespace(
        dump_traceback_later=lambda seconds, exit, file: due.append(seconds - 2 * watch.GRACE_S),
        cancel_dump_traceback_later=lambda: due.append(None),
    )
    monkeypatch.setattr(watch, "faulthandler", fake)
    begun = threading.Event()
    may_end = threading.Event()

    def exits() -> None:
        with pytest.raises(SystemExit):
            os._exit(13)  # where nothing refuses it, all tests end with this code

    def other() -> None:
        begun.set()
        assert may_end.wait(60)
        exits()
        ended.append(True)

    def outer() -> None:
        exits()
        UserCode("inner", timeout_s=10_000).run(exits)
        exits()
        thread = threading.Thread(target=UserCode("beside", timeout_s=30_000).run, args=(other,))
        thread.start()
        assert begun.wait(60)
        threads.append(thread)

    threads: list[threading.Thread] = []
    ended: list[bool] = []
    exit_process = os._exit
    UserCode("outer", timeout_s=20_000).run(outer)
    exited: list[int] = []
    with monkeypatch.context() as patched:
        patched.setattr(watch, "_exit_process", exited.append)
        os._exit(3)  # of this thread, where nothing is called any more
    assert exited == [3]
    may_end.set()
    threads[0].join(60)
    assert ended
    assert os._exit is exit_process
    rounded = [None if seconds is None else round(seconds, -4) for seconds in due]
    assert rounded == [20_000, 10_000, 20_000, 20_000, 30_000, None], "each time the one that is due first"
