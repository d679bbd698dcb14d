"""Reward functions that end the program, change the process or write into what they are given."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from reward_files import GOOD, IMAGES, METADATA, PROMPTS, build, function, write

from flowgrpo_rc.rewards import RewardError, RewardMix

ENDINGS = {
    "sys.exit(0)": "SystemExit: 0",
    "sys.exit('bye')": "SystemExit: bye",
    "quit()": "SystemExit",
    "raise SystemExit": "SystemExit",
    "os._exit(0)": "SystemExit",
    "raise KeyboardInterrupt": "KeyboardInterrupt",
    "raise GeneratorExit": "GeneratorExit",
    "raise asyncio.CancelledError": "CancelledError",
    "raise type('Outcome', (BaseException,), {})('skipped')": "Outcome: skipped",
    "import pytest; pytest.exit('no')": "Exit: no",
    "raise StopIteration": "StopIteration",
    "raise MemoryError": "MemoryError",
    "raise ValueError('two\\nlines')": "ValueError: two lines",
    "raise type('Mute', (Exception,), {'__str__': lambda self: sys.exit(0)})": "Mute: .its text raised SystemExit.",
}


@pytest.fixture(autouse=True)
def _standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """`quit()` closes it."""
    monkeypatch.setattr(sys, "stdin", open(os.devnull))  # noqa: SIM115


@pytest.mark.parametrize(("line", "told"), ENDINGS.items())
def test_when_called(tmp_path: Path, line: str, told: str) -> None:
    mix = build(write(tmp_path, function(line)))
    with pytest.raises(RewardError, match=rf"reward function 'f' raised {told}.* at .*mine\.py:5, in f") as caught:
        mix(IMAGES, PROMPTS)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("line", "told"), ENDINGS.items())
def test_when_imported(tmp_path: Path, line: str, told: str) -> None:
    with pytest.raises(ValueError, match=rf"path: importing .*mine\.py raised {told}.* at .*mine\.py:4, in <module>"):
        build(write(tmp_path, line))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("async def f(images, prompts, metadata): sys.exit(0)", r"'f' raised SystemExit: 0 at .*mine\.py:4, in f"),
        ("async def f(images, prompts, metadata): raise asyncio.CancelledError", r"'f' raised CancelledError at"),
        ("async def f(solution_image): raise KeyboardInterrupt", r"'f' raised KeyboardInterrupt at .*mine\.py:4"),
        ("def f(solution_image): raise SystemExit(0)", r"'f' raised SystemExit: 0 at .*mine\.py:4, in f"),
        ("def __getattr__(name): sys.exit(0)", r"looking up 'f' in .*mine\.py raised SystemExit: 0 at .*mine\.py:4"),
        (
            "class f:\n    def __init__(self): sys.exit(0)\n    def __call__(self, images, prompts, metadata): ...",
            r"'f' raised SystemExit: 0 at .*mine\.py:5, in __init__",
        ),
        (
            "class A:\n    def __call__(self, images, prompts, metadata): sys.exit(0)\nf = A()",
            r"'f' raised SystemExit: 0 at .*mine\.py:5, in __call__",
        ),
        (
            "class A(list):\n    def __iter__(self): sys.exit(0)\n    __len__ = __iter__\n"
            "def f(images, prompts, metadata): return A([1, 2, 3])",
            r"'f' raised SystemExit: 0 at .*mine\.py:5, in __iter__",
        ),
        (
            "class A:\n    def __array__(self, *a, **k): sys.exit(0)\ndef f(images, prompts, metadata): return A()",
            r"'f' raised SystemExit: 0 at .*mine\.py:5, in __array__",
        ),
        ("f = property(", r"importing .*mine\.py raised SyntaxError"),
        ("import argparse\nargparse.ArgumentParser().parse_args(['--no'])", r"raised SystemExit: 2 at .*mine\.py:5"),
    ],
)
def test_anywhere_else(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises((RewardError, ValueError), match=message):
        build(write(tmp_path, source))(IMAGES, PROMPTS, METADATA)


def test_check_prompts_of_the_users_own(tmp_path: Path) -> None:
    source = function(GOOD) + "\ndef check(prompts, image_size, sources): sys.exit(0)\nf.check_prompts = check\n"
    with pytest.raises(ValueError, match=r"'f' raised SystemExit: 0 at .*mine\.py:6, in check"):
        build(write(tmp_path, source)).check_prompts(PROMPTS)


INTERRUPTED = [
    "def f(images, prompts, metadata):\n    time.sleep(9)\n",
    "def f(images, prompts, metadata):\n    try: time.sleep(9)\n    except BaseException: pass\n    return [1.0]\n",
    "def f(images, prompts, metadata):\n    try: time.sleep(9)\n"
    "    except BaseException as error: raise RuntimeError('other') from error\n",
    "async def f(images, prompts, metadata):\n    await asyncio.sleep(9)\n",
]


@pytest.mark.parametrize(
    ("source", "number"),
    [(source, signal.SIGINT) for source in INTERRUPTED]
    + [(INTERRUPTED[1], s) for s in (signal.SIGTERM, signal.SIGHUP)],
)
def test_a_real_interrupt_goes_through(tmp_path: Path, source: str, number: signal.Signals) -> None:
    """Also where the function swallows it, and from every signal that the command line makes one."""
    mix = build(write(tmp_path, source))
    previous = signal.signal(number, signal.default_int_handler)
    try:
        killer = subprocess.Popen([sys.executable, "-c", _kill_after(0.2, number)])
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            mix(IMAGES[:1], PROMPTS[:1])
        assert time.monotonic() - start < 8
        killer.wait()
    finally:
        signal.signal(number, previous)


def _kill_after(seconds: float, number: int) -> str:
    return f"import os, time; time.sleep({seconds}); os.kill({os.getpid()}, {int(number)})"


# ---------------------------------------------------------------------- the process around

CHANGES = {
    "torch.set_grad_enabled(False)": ("torch's gradient mode", torch.is_grad_enabled),
    "f.mode = torch.inference_mode(); f.mode.__enter__()": (
        "torch's inference mode",
        torch.is_inference_mode_enabled,
    ),
    "torch.set_default_dtype(torch.float64)": ("torch's default dtype", torch.get_default_dtype),
    "torch.set_default_device('meta')": ("torch's default device", torch.get_default_device),
    "torch.use_deterministic_algorithms(True)": (
        "torch.use_deterministic_algorithms",
        torch.are_deterministic_algorithms_enabled,
    ),
    "torch.autograd.set_detect_anomaly(True)": ("torch's anomaly detection", torch.is_anomaly_enabled),
    "torch.set_float32_matmul_precision('medium')": (
        "torch's float32 matmul precision",
        torch.get_float32_matmul_precision,
    ),
    "torch.set_num_threads(torch.get_num_threads() + 1)": ("torch's number of threads", torch.get_num_threads),
    "torch.backends.cudnn.deterministic = True": (
        "torch.backends.cudnn.deterministic",
        lambda: torch.backends.cudnn.deterministic,
    ),
    "torch.autocast('cpu', torch.bfloat16).__enter__()": (
        "torch's autocast on cpu",
        lambda: torch.is_autocast_enabled("cpu"),
    ),
    "np.seterr(all='raise')": ("numpy's error state", np.geterr),
    "os.chdir('/')": ("the working folder", os.getcwd),
    "import tempfile; os.chdir(tempfile.mkdtemp()); os.rmdir(os.getcwd())": ("the working folder", os.getcwd),
    "sys.setrecursionlimit(5000)": ("the recursion limit", sys.getrecursionlimit),
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)": (
        "the handler of SIGTERM",
        lambda: signal.getsignal(signal.SIGTERM),
    ),
    "signal.signal(signal.SIGINT, signal.SIG_IGN)": (
        "the handler of SIGINT",
        lambda: signal.getsignal(signal.SIGINT),
    ),
    "signal.alarm(1000)": ("the timer ITIMER_REAL", lambda: signal.getitimer(signal.ITIMER_REAL)),
    "signal.setitimer(signal.ITIMER_VIRTUAL, 1000)": (
        "the timer ITIMER_VIRTUAL",
        lambda: signal.getitimer(signal.ITIMER_VIRTUAL),
    ),
    "os.umask(0o177)": ("the mode mask of new files", lambda: [os.umask(0o022), os.umask(0o022)][0]),
    "import gc; gc.disable()": ("the garbage collector", gc.isenabled),
    "torch.set_flush_denormal(True)": ("torch.set_flush_denormal", lambda: bool(np.full(1, 5e-324)[0] * 2 == 0)),
    "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])": (
        "the blocked signals",
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, []),
    ),
    "sys.stdout = None": ("sys.stdout", lambda: sys.stdout),
    "sys.stderr = open(os.devnull, 'w')": ("sys.stderr", lambda: sys.stderr),
    "warnings.simplefilter('error')": (
        "the warning filters that raise",
        lambda: [entry for entry in warnings.filters if entry[0] == "error"],
    ),
}


@pytest.mark.parametrize("line", CHANGES)
@pytest.mark.parametrize("end", [GOOD, "sys.exit(0)"])
def test_what_training_rests_on_is_set_back(tmp_path: Path, line: str, end: str) -> None:
    """Before the error is raised too; the warning comes once a function."""
    torch.set_num_threads(1)
    name, read = CHANGES[line]
    mix = build(write(tmp_path, function(f"{line}\n{end}")))
    before = read()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            if end == GOOD:
                np.testing.assert_array_equal(mix(IMAGES, PROMPTS).total, [1, 2, 3])
            else:
                with pytest.raises(RewardError, match="SystemExit"):
                    mix(IMAGES, PROMPTS)
        assert read() == before
    told = [str(w.message) for w in caught if "reward function 'f' changed" in str(w.message)]
    assert len(told) == (1 if end == GOOD else 0)
    assert all(f"'f' changed {name}" in text and "set back" in text for text in told)


def test_gradients_flow_after_a_call_that_left_inference_mode_on(tmp_path: Path) -> None:
    mix = build(write(tmp_path, function(f"f.mode = torch.inference_mode(); f.mode.__enter__()\n{GOOD}")))
    with pytest.warns(UserWarning, match="inference mode"):
        mix(IMAGES, PROMPTS)
    x = torch.ones(2, requires_grad=True)
    (x * x).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((2,), 2.0))


def test_at_import_too(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"importing .*mine\.py changed torch's gradient mode"):
        mix = build(write(tmp_path, "torch.set_grad_enabled(False)\n" + function(GOOD)))
    assert torch.is_grad_enabled()
    mix(IMAGES, PROMPTS)


def test_what_cannot_be_set_back_is_refused(tmp_path: Path) -> None:
    """A device entered by hand stays on a stack of torch's that only its own object can pop."""
    mix = build(write(tmp_path, function(f"f.d = torch.device('meta')\nf.d.__enter__()\n{GOOD}")))
    try:
        with pytest.raises(RewardError, match=r"'f' changed torch's default device, which cannot be set back"):
            mix(IMAGES, PROMPTS)
    finally:
        sys.modules[mix.functions["f"].function.__module__].f.d.__exit__(None, None, None)  # type: ignore[attr-defined]
    assert torch.ones(1).device.type == "cpu"


CLOSES = """
import sys, numpy as np
sys.path.insert(0, {tests!r})
from pathlib import Path
from reward_files import build
mix = build(Path({path!r}))
images = np.zeros((3, 4, 4, 3), np.uint8)
mix(images, ["a", "b", "c"])
mix(images, ["a", "b", "c"])
print("still here")
print("and here", file=sys.stderr)
"""


def without_torch(folder: Path, body: str) -> Path:
    """Importing torch would take a process of its own five seconds."""
    path = folder / "mine.py"
    path.write_text("import os, sys\n" + function(body))
    return path


def test_closed_streams_are_opened_again(tmp_path: Path) -> None:
    path = without_torch(tmp_path, f"sys.stdout.close(); sys.stderr.close(); sys.stdin.close()\n{GOOD}")
    script = CLOSES.format(tests=str(Path(__file__).parent), path=str(path))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "still here\n"
    assert "sys.stdout" in done.stderr
    assert "and here" in done.stderr


def test_a_forked_child_that_comes_back_does_not_train_too(tmp_path: Path) -> None:
    path = without_torch(tmp_path, f"f.child = os.fork()\n{GOOD}")
    script = CLOSES.format(tests=str(Path(__file__).parent), path=str(path))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout == "still here\n"


# ---------------------------------------------------------------------- what they are given


@pytest.mark.parametrize("line", ["images[0] = 0", "images *= 2", "np.add(images, 1, out=images)"])
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
        "images.flags.writeable = True; images[:] = 0",
        "torch.from_numpy(images).zero_()",
        "prompts.clear(); metadata.clear()",
        "metadata[0]['extra_info']['index'] = 7; prompts[0] = 'other'",
        "f.kept = (images, prompts, metadata)",
    ],
)
def test_everything_handed_over_is_a_copy(tmp_path: Path, line: str) -> None:
    """The second function, and the caller, see what the first one was given."""
    seen = []

    def second(images, prompts, metadata):
        seen.append((images.copy(), list(prompts), [dict(row["extra_info"]) for row in metadata]))
        return [0.0] * len(prompts)

    first = build(write(tmp_path, function(f"{line}\n{GOOD}"))).functions["f"]
    before = IMAGES.copy()
    RewardMix({"f": first, "second": second}, {"f": 1.0, "second": 1.0})(IMAGES, PROMPTS, METADATA)
    np.testing.assert_array_equal(IMAGES, before)
    np.testing.assert_array_equal(seen[0][0], before)
    assert seen[0][1] == ["a", "bb", "ccc"]
    assert seen[0][2] == [{"index": 0}, {"index": 1}, {"index": 2}]
    assert [row["extra_info"] for row in METADATA] == [{"index": 0}, {"index": 1}, {"index": 2}]


def test_images_of_one_prompt_do_not_share_metadata(tmp_path: Path) -> None:
    row = {"x": [0]}
    source = function("metadata[0]['x'][0] = 5\nreturn [row['x'][0] for row in metadata]")
    assert build(write(tmp_path, source))(IMAGES, PROMPTS, [row, row, row]).total.tolist() == [5, 0, 0]
    assert row == {"x": [0]}


def test_what_was_returned_can_no_longer_be_changed(tmp_path: Path) -> None:
    source = textwrap.dedent(
        """
        scores, texts = np.ones(3, np.float32), ["x", "y", "z"]
        def f(images, prompts, metadata):
            return scores, {"text": texts}
        def later():
            scores[:] = 9
            texts.clear()
        """
    )
    mix = build(write(tmp_path, source))
    result = mix(IMAGES, PROMPTS)
    sys.modules[mix.functions["f"].function.__module__].later()  # type: ignore[attr-defined]
    np.testing.assert_array_equal(result.parts["f"], [1, 1, 1])
    assert result.texts == ["x", "y", "z"]
