"""A user's own reward: its file, errors with file and line, deadlines, copies, and torch's settings restored."""

import signal
import subprocess
import sys
import textwrap
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reward_files import GOOD, IMAGES, METADATA, PROMPTS, build, function, write

from flowgrpo_rc.rewards import RewardError, RewardMix, load_function, user_code
from flowgrpo_rc.rewards.user_code import UserCode

ENDINGS = {
    "sys.exit(0)": "SystemExit: 0 at .*; remove the call",
    "raise asyncio.CancelledError": "CancelledError",
    "raise StopIteration": "StopIteration",
    "raise ValueError('two\\nlines')": "ValueError: two lines",
    "{}['gone']": "KeyError: 'gone'",
}


@pytest.mark.parametrize(("line", "named"), ENDINGS.items())
def test_an_exception_of_a_call_is_a_reward_error_with_file_and_line(tmp_path: Path, line: str, named: str) -> None:
    mix = build(write(tmp_path, function(line)))
    with pytest.raises(RewardError, match=rf"^reward function 'f' raised ({named})") as caught:
        mix(IMAGES, PROMPTS)
    assert "mine.py:5, in f" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("line", ["sys.exit(0)", "{}['gone']", "f = property("])
def test_an_exception_of_an_import_is_a_refusal(tmp_path: Path, line: str) -> None:
    with pytest.raises(ValueError, match=r"path: importing .*mine\.py raised .* at .*mine\.py:4"):
        build(write(tmp_path, line))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("async def f(images, prompts, metadata): sys.exit(0)", r"'f' raised SystemExit: 0 at .*mine\.py:4, in f"),
        ("def f(solution_image): raise SystemExit(0)", r"'f' raised SystemExit: 0 at .*mine\.py:4, in f"),
        (
            "class f:\n    def __init__(self): sys.exit(0)\n    def __call__(self, images, prompts, metadata): ...",
            r"'f' raised SystemExit: 0 at .*mine\.py:5, in __init__",
        ),
        (
            "class A:\n    def __call__(self, images, prompts, metadata): sys.exit(0)\nf = A()",
            r"'f' raised SystemExit: 0 at .*mine\.py:5, in __call__",
        ),
    ],
)
def test_other_forms_are_named_alike(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises((RewardError, ValueError), match=message):
        build(write(tmp_path, source))(IMAGES, PROMPTS, METADATA)


def test_a_users_check_of_prompts_is_a_refusal(tmp_path: Path) -> None:
    source = function(GOOD) + "\ndef check(prompts, image_size, sources): sys.exit(0)\nf.check_prompts = check\n"
    with pytest.raises(ValueError, match=r"'f' raised SystemExit: 0 at .*mine\.py:6, in check"):
        build(write(tmp_path, source)).check_prompts(PROMPTS)


@pytest.mark.parametrize(
    "source",
    [
        function(f"signal.raise_signal(signal.SIGINT)\n{GOOD}"),
        "async def f(images, prompts, metadata):\n    signal.raise_signal(signal.SIGINT)\n    await asyncio.sleep(60)",
    ],
)
def test_ctrl_c_goes_through(tmp_path: Path, source: str) -> None:
    mix = build(write(tmp_path, source))
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            mix(IMAGES, PROMPTS)
    finally:
        signal.signal(signal.SIGINT, previous)


# ---------------------------------------------------------------------- files


def test_same_file_twice_is_one_module_and_equal_names_do_not_clash(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = write(tmp_path / "a", "def f(*a): return 1")
    second = write(tmp_path / "b", "def f(*a): return 2")
    assert load_function(first, "f") is load_function(first, "f")
    assert load_function(first, "f")() == 1
    assert load_function(second, "f")() == 2


def test_dataclass_in_the_file_works(tmp_path: Path) -> None:
    """dataclasses look their module up in sys.modules while the file is executed."""
    path = tmp_path / "mine.py"
    head = "from __future__ import annotations\nfrom dataclasses import dataclass\n"
    path.write_text(f"{head}@dataclass\nclass A:\n    x: int = 3\ndef f(*a): return A().x\n")
    assert load_function(path, "f")() == 3


@pytest.mark.parametrize(
    ("source", "name", "told"),
    [
        ("from math import sqrt\ndef b(): ...\ndef a(): ...\n", "mine.py", r"defines no 'f'; it defines a, b$"),
        ("x = 1\n", "mine.py", r"it defines no function$"),
        ("f = 3\n", "mine.py", r"name: 'f' in .* is a int, which cannot be called"),
        ("", "mine.txt", r"is not a Python file; its name must end in \.py"),
    ],
)
def test_a_file_without_the_function(tmp_path: Path, source: str, name: str, told: str) -> None:
    (tmp_path / name).write_text(source)
    with pytest.raises(ValueError, match=told):
        load_function(tmp_path / name, "f")


# ---------------------------------------------------------------------- torch's settings

SETTINGS: dict[str, Callable[[], Any]] = {
    "torch.set_grad_enabled(False)": torch.is_grad_enabled,
    "torch.set_default_dtype(torch.float64)": torch.get_default_dtype,
    "torch.set_default_device('meta')": torch.get_default_device,
}


@pytest.mark.parametrize("line", SETTINGS)
@pytest.mark.parametrize("end", [GOOD, "sys.exit(0)"])
def test_torchs_settings_are_restored(tmp_path: Path, line: str, end: str) -> None:
    before = SETTINGS[line]()
    mix = build(write(tmp_path, function(f"{line}\n{end}")))
    if end == GOOD:
        np.testing.assert_array_equal(mix(IMAGES, PROMPTS).total, [1, 2, 3])
    else:
        with pytest.raises(RewardError, match="SystemExit"):
            mix(IMAGES, PROMPTS)
    assert SETTINGS[line]() == before
    assert torch.ones(1).device.type == "cpu"


@pytest.mark.parametrize("end", [GOOD, "sys.exit(0)"])
def test_the_working_folder_is_restored(tmp_path: Path, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's own paths may be relative to it."""
    monkeypatch.chdir(tmp_path)
    mix = build(write(tmp_path, function(f"os.chdir('/')\n{end}")))
    if end == GOOD:
        mix(IMAGES, PROMPTS)
    else:
        with pytest.raises(RewardError, match="SystemExit"):
            mix(IMAGES, PROMPTS)
    assert Path.cwd() == tmp_path


# ---------------------------------------------------------------------- copies


@pytest.mark.parametrize("line", ["images[0] = 0", "np.add(images, 1, out=images)"])
def test_writing_into_the_images_is_an_error_with_its_remedy(tmp_path: Path, line: str) -> None:
    before = IMAGES.copy()
    mix = build(write(tmp_path, function(f"{line}\n{GOOD}")))
    with pytest.raises(RewardError, match=r"'f' raised ValueError: .*read-only at .*mine\.py:5.*images\.copy\(\)"):
        mix(IMAGES, PROMPTS)
    np.testing.assert_array_equal(IMAGES, before)


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize(
    "line",
    [
        "torch.from_numpy(images).zero_()",
        "prompts.clear(); metadata.clear()",
        "metadata[0]['extra_info']['index'] = 7; prompts[0] = 'other'",
    ],
)
def test_the_next_function_and_the_caller_see_the_originals(tmp_path: Path, line: str) -> None:
    seen = []

    def second(images, prompts, metadata):
        seen.append((images.copy(), list(prompts), [dict(row["extra_info"]) for row in metadata]))
        return [0.0] * len(prompts)

    first = build(write(tmp_path, function(f"{line}\n{GOOD}"))).functions["f"]
    before = IMAGES.copy()
    RewardMix({"f": first, "second": second}, {"f": 1.0, "second": 1.0})(IMAGES, PROMPTS, METADATA)
    np.testing.assert_array_equal(IMAGES, before)
    np.testing.assert_array_equal(seen[0][0], before)
    assert seen[0][1:] == (["a", "bb", "ccc"], [{"index": 0}, {"index": 1}, {"index": 2}])
    assert [row["extra_info"] for row in METADATA] == [{"index": 0}, {"index": 1}, {"index": 2}]


def test_images_of_one_prompt_do_not_share_metadata(tmp_path: Path) -> None:
    row = {"x": [0]}
    source = function("metadata[0]['x'][0] = 5\nreturn [row['x'][0] for row in metadata]")
    assert build(write(tmp_path, source))(IMAGES, PROMPTS, [row, row, row]).total.tolist() == [5, 0, 0]
    assert row == {"x": [0]}


# ---------------------------------------------------------------------- deadlines

LIMIT = 0.2
LATE = rf"did not return within reward\.timeout_s={LIMIT} s; it was at .*mine\.py:"

SLEEPERS = {
    "def f(images, prompts, metadata):\n    time.sleep(60)": r"5, in f \(time\.sleep\(60\)\)",
    "def f(images, prompts, metadata):\n    try: time.sleep(60)\n    except Exception: pass": r"5, in f",
    "def f(images, prompts, metadata):\n    threading.Event().wait()": r"5, in f",
    "def inner(): time.sleep(60)\ndef f(images, prompts, metadata): inner()": r"4, in inner \(def inner",
    "async def f(images, prompts, metadata):\n    await asyncio.sleep(60)": r"5, in f \(await asyncio\.sleep",
    "async def f(solution_image):\n    time.sleep(60)": r"5, in f \(time\.sleep\(60\)\)",
    # A score that a function makes up for a call that hangs is none.
    "def f(images, prompts, metadata):\n    try: time.sleep(60)\n    except: return [0, 0, 0]": r"5, in f \(try: time",
}


@pytest.mark.parametrize(("source", "where"), SLEEPERS.items())
def test_a_call_that_never_returns_is_an_error(tmp_path: Path, source: str, where: str) -> None:
    handler = signal.getsignal(signal.SIGALRM)
    mix = build(write(tmp_path, source), timeout_s=LIMIT)
    with pytest.raises(RewardError, match=rf"reward function 'f' {LATE}{where}.*raise reward\.timeout_s") as caught:
        mix(IMAGES, PROMPTS, METADATA)
    assert "\n" not in str(caught.value)
    assert signal.getsignal(signal.SIGALRM) == handler
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("source", "where"),
    [
        ("time.sleep(60)", r"4, in <module> \(time\.sleep\(60\)\)"),
        (
            "class f:\n    def __init__(self):\n        time.sleep(60)\n"
            "    def __call__(self, images, prompts, metadata): ...",
            r"6, in __init__",
        ),
    ],
)
def test_a_file_that_never_loads_is_a_refusal(tmp_path: Path, source: str, where: str) -> None:
    with pytest.raises(ValueError, match=LATE + where):
        build(write(tmp_path, source), timeout_s=LIMIT)


def test_the_fault_handler_waits_for_the_first_of_all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """In threads too, which nothing can interrupt: a call that ends takes no other one's end away."""
    armed: list[float] = []
    fault_handler = types.SimpleNamespace(
        dump_traceback_later=lambda seconds, exit, file: armed.append(round(seconds, -2)),
        cancel_dump_traceback_later=lambda: armed.append(0),
    )
    monkeypatch.setattr(user_code, "faulthandler", fault_handler)

    def in_a_thread() -> None:
        thread = threading.Thread(target=UserCode("beside", timeout_s=1000).run, args=(lambda: None,))
        thread.start()
        thread.join()

    UserCode("outer", timeout_s=3000).run(UserCode("inner", timeout_s=2000).run, in_a_thread)
    assert armed == [3000, 2000, 1000, 2000, 3000, 0]


SCRIPT = """
import sys, threading
sys.path.insert(0, {tests!r})
from pathlib import Path
import numpy as np
from reward_files import build
from flowgrpo_rc.rewards import user_code
user_code.GRACE_S = 0.3
mix = build(Path({path!r}), timeout_s=0.3)
call = threading.Thread(target=mix, args=(np.zeros((3, 4, 4, 3), np.uint8), ["a", "b", "c"]))
call.start() if {threaded} else call.run()
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("body", "threaded"),
    [
        ("while True:\n    try: time.sleep(60)\n    except BaseException: pass", False),
        ("sum(range(10**13))", False),  # holds the interpreter's lock
        ("time.sleep(60)", True),
    ],
)
def test_a_call_that_cannot_be_interrupted_ends_the_process(tmp_path: Path, body: str, threaded: bool) -> None:
    path = tmp_path / "mine.py"
    path.write_text("import time\n\n\n" + function(body))  # without torch, which would take seconds to import
    script = SCRIPT.format(tests=str(Path(__file__).parent), path=str(path), threaded=threaded)
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=50)
    assert done.returncode == 1
    assert "Timeout" in done.stderr
    assert f'File "{path}", line' in done.stderr
    assert "in f\n" in done.stderr
