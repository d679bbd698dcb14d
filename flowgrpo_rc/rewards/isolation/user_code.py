"""Calls a user's own code and reports its faults: whatever it raises, how long it takes and what it changes."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from flowgrpo_rc.rewards.errors import RewardError, describe_exception, describe_place, exception_text
from flowgrpo_rc.rewards.isolation import coroutines
from flowgrpo_rc.rewards.isolation.process_state import ProcessState
from flowgrpo_rc.rewards.isolation.watch import Watch, end_despite_threads

TIMEOUT_FIELD = "reward.timeout_s"


@dataclass
class UserCode:
    """One piece of a user's own code, and how its faults are reported.

    ``run`` calls a function of it. Whatever the call raises becomes ``error`` with file and line: also ``SystemExit``,
    which would end the command with exit code 0, and a ``KeyboardInterrupt`` that it raises itself. A real Ctrl-C goes
    through, even where the code swallows it. What it changes in the process is set back, with a warning the first
    time. A call that outlasts ``timeout_s`` is interrupted, or ends the process.
    """

    what: str
    """Begins every message: ``reward function 'x'``."""

    file: str | None = None
    """The user's file, whose lines the messages point at."""

    timeout_s: float | None = None
    """Longest time in seconds that a call may take; None for no limit."""

    error: type[Exception] = RewardError
    """The exception that the code's faults are raised as."""

    exit_code: int = 1
    """The exit code of the process where a call that never returns cannot be interrupted."""

    sets_back: bool = True
    """Whether what a call changes in the process is set back. Not where another thread of the process works meanwhile:
    what that one changes and sets back itself would be taken for the call's. Then only the settings of the call's own
    thread are looked at, and a change of them is an error."""

    _warned: set[str] = field(default_factory=set)

    def run(self, function: Callable[..., Any], *args: Any, passing: type[Exception] | tuple[()] = ()) -> Any:
        """``function(*args)``; ``passing`` is an exception of our own checks that is raised on as it is.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed.
            Exception: of the class ``error``: the code raised, did not return in time, or left something changed that
                cannot be set back, or that it must not change in this thread.
        """
        result = None
        raised = None
        with Watch(self.timeout_s, self._describe_overrun, self.exit_code, coroutines.wake) as watch:
            before = ProcessState() if self.sets_back else ProcessState(of_thread=True)
            try:
                result = watch.call(function, *args)
            except BaseException as error:
                raised = error
            changed, stuck = before.restore()
        if watch.stopped is not None:
            raise watch.stopped
        if watch.expired is not None:
            end_despite_threads(watch.expired, self.exit_code)
            raise self.error(watch.expired) from raised
        if isinstance(raised, passing):
            raise raised
        if raised is not None:
            told = describe_exception(raised, self.file)
            raise self.error(f"{self.what} raised {told}{_remedy(raised)}") from raised
        if stuck:
            raise self.error(
                f"{self.what} changed {', '.join(stuck)}, which cannot be set back and which training rests on; "
                "leave it as it is"
            )
        if changed and not self.sets_back:
            raise self.error(changed_while_drawing(self.what, changed))
        new = [name for name in changed if name not in self._warned]
        if new:
            self._warned.update(new)
            warnings.warn(
                f"{self.what} changed {', '.join(new)}; set back, since training runs in the same process. What the "
                "function needs it has to set inside every call",
                stacklevel=2,
            )
        return result

    def _describe_overrun(self, frame: FrameType | None) -> str:
        """The message for a call that is still in ``frame`` at its deadline."""
        stack = [] if frame is None else list(traceback.walk_stack(frame))
        # A coroutine that waits is on no thread's stack; one that runs is on both, exactly on the stack alone.
        place = describe_place([*stack, *coroutines.levels()], self.file, quote=True)
        return (
            f"{self.what} did not return within {TIMEOUT_FIELD}={self.timeout_s:g} s; it was"
            f"{place or ' at an unknown place'}. Mend it, or for a slow one raise {TIMEOUT_FIELD} (null for no limit)"
        )


def changed_while_drawing(who: str, settings: Sequence[str]) -> str:
    """The message for reward functions that changed these settings while another thread drew images."""
    return (
        f"{who} with streams = True changed {', '.join(settings)} while images were drawn; leave it as it is, or take "
        "streams from the function, which is then called when all images are drawn"
    )


def _remedy(error: BaseException) -> str:
    """What to do about exceptions whose cause is not obvious from their text."""
    if isinstance(error, SystemExit):
        return (
            "; remove the call that ends the program, and put what only a script should do under "
            "if __name__ == '__main__'"
        )
    text = exception_text(error)
    if "read-only" in text or "readonly" in text:
        return "; images are handed over read-only: work on a copy, images.copy()"
    return ""
