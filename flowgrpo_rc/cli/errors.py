"""Every exception of a command as one line and an exit code; with ``FLOWGRPO_RC_DEBUG=1`` its traceback too."""

import atexit
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

from flowgrpo_rc.trainer.interrupt import INTERRUPTED
from flowgrpo_rc.trainer.launch import has_peers, rank, report_to_launcher

DEBUG = "FLOWGRPO_RC_DEBUG"
FAILED = 1
"""Exit code of a command that failed while running."""
REFUSED = 2
"""Exit code of a command that was refused before training."""
COMMAND = "command"
"""Phase of a command that trains nothing."""
LOADING = "loading"
"""Phase of a training run before its loop."""
TRAINING = "training"
"""Phase of a training run in its loop."""
_INTERRUPTED = {
    COMMAND: "",
    LOADING: " before training began; nothing was trained",
    TRAINING: ": ended at once. What was trained after the newest checkpoint is lost; continue from that with "
    "trainer.resume_mode=auto",
}
LESS_MEMORY = (
    "lower actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu, actor_rollout_ref.rollout.micro_batch_size, "
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu or the images' size, set "
    "actor_rollout_ref.actor.ppo_micro_batch_rows=1 or "
    "actor_rollout_ref.model.enable_gradient_checkpointing=true, or actor_rollout_ref.model.dtype=bfloat16"
)
"""What makes a run need less memory."""
_LOST_PEER = (
    "another process of this launch has failed or was killed; its own message or the launcher's report says why"
)
_PEERS = {
    "Connection closed by peer": _LOST_PEER,
    "Connection reset by peer": _LOST_PEER,
    "Timed out waiting": "another process of this launch is busy or hangs; where it is busy that long by right, raise "
    "actor_rollout_ref.nccl_timeout",
}
"""What gloo says of processes that are no more or do not answer, and what to make of it."""
_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "Cannot allocate memory")
"""What torch's errors say where they have no type of their own."""


def exit_code(error: BaseException, *, phase: str) -> int:
    """Print ``error`` on standard error and return the command's exit code.

    A foreseen error is one line, any other one its traceback. The lines of several processes begin with their rank.

    Args:
        error: anything; the project's own exceptions bring a message that stands alone, as do the ``ValueError``,
            ``OSError`` and ``ImportError`` of settings, files and extras before training.
        phase: ``COMMAND``, or of a training run ``LOADING`` or ``TRAINING``.
    """
    training = phase == TRAINING
    report_to_launcher(error)
    label = f"[rank {rank()}] error" if has_peers() else "error"
    if debugging():
        traceback.print_exception(type(error), error, error.__traceback__, file=sys.stderr)
    if isinstance(error, KeyboardInterrupt):
        print(f"interrupted{_INTERRUPTED[phase]}", file=sys.stderr)
        return INTERRUPTED
    is_own = type(error).__module__.split(".")[0] == __name__.split(".")[0]
    text = str(error) if is_own else in_a_line(error)
    if not is_own and _is_out_of_memory(error):
        print(f"{label}: out of memory ({text[:300] or type(error).__name__}); {LESS_MEMORY}", file=sys.stderr)
        return FAILED
    of_peers = [meaning for words, meaning in _PEERS.items() if type(error) is RuntimeError and words in text]
    if of_peers:
        print(f"{label}: {of_peers[0]} ({text[:300]})", file=sys.stderr)
        return FAILED
    if is_own or isinstance(error, OSError if training else (OSError, ValueError, ImportError)):
        print(f"{label}: {text or type(error).__name__}", file=sys.stderr)
        return FAILED if training else REFUSED
    print(f"{label}: unexpected {type(error).__name__}{': ' if text else ''}{text}", file=sys.stderr)
    if not debugging():
        traceback.print_exception(type(error), error, error.__traceback__, file=sys.stderr)
    return FAILED


def debugging() -> bool:
    """Whether the user asked for tracebacks."""
    return os.environ.get(DEBUG, "0") not in ("", "0")


def in_a_line(error: BaseException) -> str:
    """The message without its line breaks."""
    try:
        return " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    except Exception:  # a text that cannot be had must not hide the error itself
        return "(it has no text)"


@contextmanager
def warnings_in_a_line() -> Iterator[None]:
    """Inside, a warning is a line; ``FLOWGRPO_RC_DEBUG=1`` shows the place in the program that gave it, too."""
    before = warnings.formatwarning

    def tell(message: Warning | str, *place: Any, **line: Any) -> str:
        return before(message, *place, **line) if debugging() else f"warning: {' '.join(str(message).split())}\n"

    warnings.formatwarning = tell
    try:
        yield
    finally:
        warnings.formatwarning = before


@contextmanager
def thread_errors_in_a_line() -> Iterator[None]:
    """Inside, and when the process ends, an exception that nobody can catch is a line, not a traceback.

    It is one that ends a thread (a tracker's writer on a full disk), one that an object raises when it is thrown away,
    or one of a function that a reward has registered with ``atexit``.
    """
    before = (threading.excepthook, sys.unraisablehook)
    _install_hooks()
    _install_hooks_at_the_end()
    try:
        yield
    finally:
        threading.excepthook, sys.unraisablehook = before


def _install_hooks() -> None:
    threading.excepthook = _tell_thread
    sys.unraisablehook = _tell_ignored


@cache
def _install_hooks_at_the_end() -> None:
    """Before the interpreter waits for threads, where it offers that, or else before it calls what is registered."""
    register = getattr(threading, "_register_atexit", atexit.register)
    with suppress(RuntimeError):  # it is ending already
        register(_install_hooks)


def _tell_thread(arguments: threading.ExceptHookArgs) -> None:
    name = "a thread" if arguments.thread is None else arguments.thread.name
    if debugging():
        threading.__excepthook__(arguments)
    elif arguments.exc_value is not None and not isinstance(arguments.exc_value, SystemExit):
        _tell(f"error in {name}", arguments.exc_value)


def _tell_ignored(arguments: Any) -> None:
    name = getattr(arguments.object, "__qualname__", None) or type(arguments.object).__name__
    if debugging():
        sys.__unraisablehook__(arguments)
    elif arguments.exc_value is not None:
        _tell(f"error in {name}, ignored", arguments.exc_value)


def _tell(where: str, error: BaseException) -> None:
    text = in_a_line(error)
    print(f"{where}: {type(error).__name__}{': ' if text else ''}{text}", file=sys.stderr)


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY)
