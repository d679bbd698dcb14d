"""What a reward function may leave changed in the process that also trains, and setting it back.

A function that turns gradients off, changes the default dtype or moves to another folder would change training, or
lose its files, without a word. ``ProcessState()`` before the call and ``.restore()`` after it put back what
``_settings`` names.

The global random generators are the rewards' own: training draws from generators of its own alone, and checkpoints
hold the global ones' states for rewards that use them. Environment variables, ``sys.path`` and patched modules are not
looked after.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

_LEFT_INFERENCE_MODES: list[Any] = []
"""Guards that take the thread out of an inference mode somebody left on; each must outlive the run."""


@dataclass(frozen=True)
class _Setting:
    """One thing that is set back. ``write`` gets what ``read`` returned."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]
    of_thread: bool = False
    """Whether each thread has a value of its own, which no other thread sees or can set back."""

    def has(self, value: Any) -> bool:
        """Whether it has this value now; no where it cannot be read, as of a working folder that is gone."""
        with suppress(Exception):
            present = self.read()
            return present is value or bool(present == value)
        return False


class ProcessState:
    """The settings as they are when it is made; torch's only where torch is loaded.

    Args:
        of_thread: only those that each thread has for itself (True), or only those of the process (False).
    """

    def __init__(self, of_thread: bool | None = None) -> None:
        self._before: list[tuple[_Setting, Any]] = []
        for setting in _settings():
            if of_thread not in (None, setting.of_thread):
                continue
            with suppress(Exception):  # this version of a library does not tell it
                self._before.append((setting, setting.read()))

    def restore(self) -> tuple[list[str], list[str]]:
        """Set back what differs; the names of what was set back, and of what could not be."""
        changed = []
        stuck = []
        for setting, value in self._before:
            if setting.has(value):
                continue
            with suppress(Exception):
                setting.write(value)
            (changed if setting.has(value) else stuck).append(setting.name)
        return changed, stuck


def _settings() -> Iterator[_Setting]:
    yield _Setting("the working folder", os.getcwd, os.chdir)
    yield _Setting("the mode mask of new files", _umask, os.umask)
    yield _Setting("the recursion limit", sys.getrecursionlimit, sys.setrecursionlimit)
    yield _Setting("the garbage collector", gc.isenabled, lambda on: gc.enable() if on else gc.disable())
    yield _Setting("numpy's error state", np.geterr, lambda state: np.seterr(**state), of_thread=True)
    yield _Setting("the warning filters that raise", _raising_filters, _remove_raising_filters)
    for name in ("stdin", "stdout", "stderr"):
        yield _stream(name)
    # Python sets signal handlers in the main thread alone.
    if threading.current_thread() is threading.main_thread():
        yield from _signals()
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "set_grad_enabled"):
        yield from _torch_settings(torch)


def _umask() -> int:
    """It can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _raising_filters() -> list[Any]:
    return [entry for entry in warnings.filters if entry[0] == "error"]


def _remove_raising_filters(before: list[Any]) -> None:
    filters: list[Any] = warnings.filters  # type: ignore[assignment]
    filters[:] = [entry for entry in filters if entry[0] != "error" or entry in before]
    # Entering and leaving makes the interpreter forget which filter applied where.
    with warnings.catch_warnings():
        pass


def _stream(name: str) -> _Setting:
    """``sys.stdout`` and its like: the same object, and open if it was."""
    ours = getattr(sys, name)
    was_open = not getattr(ours, "closed", True)
    number = None
    with suppress(OSError, ValueError, AttributeError):
        number = ours.fileno()

    def is_as_before() -> bool:
        return getattr(sys, name) is ours and not (was_open and ours.closed)

    def set_back(_: bool) -> None:
        nonlocal ours
        if was_open and ours.closed and number is not None:
            # Closing the stream left the descriptor open: Python's own standard streams do not own theirs.
            mode = "r" if name == "stdin" else "w"
            ours = open(number, mode, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        setattr(sys, name, ours)

    return _Setting(f"sys.{name}", is_as_before, set_back)


def _signals() -> Iterator[_Setting]:
    for number in signal.valid_signals():
        # None: installed by something other than Python, which Python cannot put back.
        if signal.getsignal(number) is not None:
            name = f"the handler of {getattr(number, 'name', f'signal {number:d}')}"
            yield _Setting(name, partial(signal.getsignal, number), partial(signal.signal, number))
    if hasattr(signal, "pthread_sigmask"):
        read = partial(signal.pthread_sigmask, signal.SIG_BLOCK, [])
        yield _Setting("the blocked signals", read, partial(signal.pthread_sigmask, signal.SIG_SETMASK), of_thread=True)
    for timer in ("ITIMER_REAL", "ITIMER_VIRTUAL", "ITIMER_PROF"):
        number = getattr(signal, timer, None)
        # One that was running before the call has run on meanwhile.
        if number is not None and not _is_pending(number):
            yield _Setting(f"the timer {timer}", partial(_is_pending, number), partial(signal.setitimer, number))


def _is_pending(timer: int) -> bool:
    return signal.getitimer(timer)[0] > 0


def _torch_settings(torch: Any) -> Iterator[_Setting]:
    # Before the gradient mode: entering and leaving inference mode sets that too.
    set_inference_mode = partial(_set_inference_mode, torch)
    yield _Setting("torch's inference mode", torch.is_inference_mode_enabled, set_inference_mode, of_thread=True)
    yield _Setting("torch's gradient mode", torch.is_grad_enabled, torch.set_grad_enabled, of_thread=True)
    yield _Setting("torch's default dtype", torch.get_default_dtype, torch.set_default_dtype)
    yield _Setting(
        "torch's default device",
        torch.get_default_device,
        lambda device: torch.set_default_device(None if device.type == "cpu" else device),
        of_thread=True,
    )
    yield _Setting(
        "torch.use_deterministic_algorithms",
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda state: torch.use_deterministic_algorithms(state[0], warn_only=state[1]),
    )
    yield _Setting("torch's anomaly detection", torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly)
    yield _Setting(
        "torch's float32 matmul precision", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    )
    yield _Setting("torch.set_flush_denormal", _flushes_denormals, torch.set_flush_denormal, of_thread=True)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        read = torch.cuda.current_device
        yield _Setting("torch's current CUDA device", read, torch.cuda.set_device, of_thread=True)
    yield _Setting("torch's number of threads", torch.get_num_threads, torch.set_num_threads, of_thread=True)
    cudnn = torch.backends.cudnn
    for flag in ("enabled", "benchmark", "deterministic", "allow_tf32"):
        yield _Setting(f"torch.backends.cudnn.{flag}", partial(getattr, cudnn, flag), partial(setattr, cudnn, flag))
    for kernel in ("flash", "mem_efficient", "math", "cudnn"):
        read = getattr(torch.backends.cuda, f"{kernel}_sdp_enabled", None)
        write = getattr(torch.backends.cuda, f"enable_{kernel}_sdp", None)
        if read is not None and write is not None:
            yield _Setting(f"torch's {kernel} attention kernel", read, write)
    for device in ("cpu", "cuda"):
        read = partial(torch.is_autocast_enabled, device)
        write = partial(torch.set_autocast_enabled, device)
        yield _Setting(f"torch's autocast on {device}", read, write, of_thread=True)
        read = partial(torch.get_autocast_dtype, device)
        write = partial(torch.set_autocast_dtype, device)
        yield _Setting(f"torch's autocast dtype on {device}", read, write, of_thread=True)


def _flushes_denormals() -> bool:
    """Whether this thread's processor takes the smallest numbers for zero; torch does not tell."""
    smallest = np.full(1, 5e-324)
    return bool((smallest + smallest)[0] == 0)


def _set_inference_mode(torch: Any, on: bool) -> None:
    guard = torch.inference_mode(on)
    guard.__enter__()
    _LEFT_INFERENCE_MODES.append(guard)
