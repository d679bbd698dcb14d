"""Exceptions of a command as messages and exit codes.

A foreseen error is one line; ``FLOWGRPO_RC_DEBUG=1`` adds its traceback. Any other error always shows it.
"""

import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flowgrpo_rc.messages import one_line
from flowgrpo_rc.trainer.interrupt import INTERRUPTED
from flowgrpo_rc.trainer.launch import has_peers, rank, report_to_launcher

FAILED = 1
"""Exit code of a command that failed while running."""
REFUSED = 2
"""Exit code of a command that was refused before training."""
NEGATIVE = 3
"""Exit code of a command whose answer is no."""
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
    "actor_rollout_ref.model.enable_gradient_checkpointing=true, or actor_rollout_ref.model.dtype=bfloat16; "
    "flowgrpo-rc plan says more, e.g. a base in 8 or 4 bits"
)
"""Settings with which a run needs less memory."""
_PEERS = {
    r"Connection (closed|reset) by peer": "another process of this launch has failed or was killed; its own message or "
    "the launcher's report says why",
    "Timed out waiting": "another process of this launch is busy or hangs; if it may be busy that long, raise "
    "actor_rollout_ref.nccl_timeout",
}
"""Patterns of gloo's errors about lost or slow processes -> the explanation."""
_NO_MEMORY = "[Cc]an(no|')t allocate memory|not enough memory|out of memory"
"""Pattern of torch's errors that have no type of their own."""


def exit_code(error: BaseException, *, phase: str, unfinished: str | None = None) -> int:
    """Print ``error`` on standard error and return the command's exit code.

    The lines of several processes begin with their rank.

    Args:
        error: anything; the project's own exceptions bring a message that stands alone, as do the ``ValueError``,
            ``OSError`` and ``ImportError`` of settings, files and extras before training.
        phase: ``COMMAND``, or ``LOADING`` or ``TRAINING`` of a command that loads the model.
        unfinished: what an interrupt leaves of a command that trains nothing.
    """
    training = phase == TRAINING
    report_to_launcher(error)
    if debugging():
        traceback.print_exception(error)
    if isinstance(error, KeyboardInterrupt):
        print(f"interrupted{f': {unfinished}' if unfinished else _INTERRUPTED[phase]}", file=sys.stderr)
        return INTERRUPTED
    # A reward that fails on trial is as one that fails in the loop.
    failed = training or (phase == LOADING and _is_of_reward(error))
    # Own exceptions are raised with a message for users.
    is_own = type(error).__module__.partition(".")[0] == __name__.partition(".")[0]
    # Before training a ValueError is about settings and files; in the loop it is a bug.
    is_foreseen = is_own or isinstance(error, OSError if training else (OSError, ValueError, ImportError))
    explanation = None if is_own else _explanation(error)
    text = explanation or (str(error) if is_own else one_line(error))
    label = f"[rank {rank()}] error" if has_peers() else "error"
    if not is_foreseen and not explanation:
        print(f"{label}: unexpected {type(error).__name__}: {text}", file=sys.stderr)
        if not debugging():
            traceback.print_exception(error)
        return FAILED
    print(f"{label}: {text or type(error).__name__}", file=sys.stderr)
    return FAILED if failed or explanation else REFUSED


def _is_of_reward(error: BaseException) -> bool:
    # Here, since other commands need no numpy.
    from flowgrpo_rc.rewards.answer import RewardError

    return isinstance(error, RewardError)


def debugging() -> bool:
    """True with ``FLOWGRPO_RC_DEBUG=1``: the user wants tracebacks of foreseen errors too."""
    return os.environ.get("FLOWGRPO_RC_DEBUG", "0") not in ("", "0")


@contextmanager
def warnings_in_a_line() -> Iterator[None]:
    """Print warnings without the place in the program that gave them, unless debugging."""
    # Python's format shows a line of this package's source, which explains nothing to users.
    before = warnings.formatwarning

    def formatted(message: Warning | str, *place: Any, **line: Any) -> str:
        return before(message, *place, **line) if debugging() else f"warning: {' '.join(str(message).split())}\n"

    warnings.formatwarning = formatted
    try:
        yield
    finally:
        warnings.formatwarning = before


def _explanation(error: BaseException) -> str | None:
    """Cause and remedy of torch's errors about memory and other processes; None for any other error."""
    text = one_line(error, 300)
    is_runtime = isinstance(error, RuntimeError)
    # Accelerators raise types of their own, which are not imported here.
    is_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if is_memory or (is_runtime and re.search(_NO_MEMORY, text)):
        return f"out of memory ({text}); {LESS_MEMORY}"
    for pattern, cause in _PEERS.items():
        if is_runtime and re.search(pattern, text):
            return f"{cause} ({text})"
    return None
