"""Standard output and standard error that may go away, fill up or stand still without ending a run.

A pipe into ``head``, a closed terminal and a log file on a full disk make every ``print`` raise. What a run is for
lies in its folder, so inside ``surviving_console`` such an error is told once, on the other stream, and is not raised.
"""

import errno
import os
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any

from flowgrpo_rc.messages import reason

CHUNK = 1000
"""Characters a write, at most 4 bytes each: a pipe that reports room takes 4096 bytes without blocking."""
STUCK_SECONDS = 1.0
"""After a request to stop: how long one write waits for a reader that stands still."""
_PASSING_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EAGAIN, errno.EWOULDBLOCK}
"""Errors after which the stream may work again."""


class SurvivingStream:
    """A text stream around ``stream`` whose ``write`` and ``flush`` raise nothing.

    Args:
        stream: the one to write to; ``None`` (a process started with the stream closed) swallows everything.
        name: what messages call it.
    """

    def __init__(self, stream: Any, name: str) -> None:
        self._stream = stream
        self._name = name
        self._gone = stream is None
        """Whether nothing is written any more."""
        self._stuck = False
        """Whether the run is to end and the reader has stood still for ``STUCK_SECONDS``."""
        self.failure: BaseException | None = None
        """The first error of writing."""
        self.other: SurvivingStream | None = None
        """Where that error is told."""
        self.hurry = False
        """Whether the run is to end: a reader that stands still holds it up no longer."""

    def write(self, text: str) -> int:
        """Write ``text`` as far as the stream takes it; characters that its encoding lacks are escaped."""
        if not self._gone:
            try:
                for start in range(0, len(text), CHUNK):
                    self._write(text[start : start + CHUNK])
            except (OSError, ValueError) as error:
                self._tell_failure(error)
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write each of ``lines``."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Hand on what is buffered; a buffer that cannot be handed on is kept."""
        if self._gone or not self._wait_for_room():
            return
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._tell_failure(error)

    def isatty(self) -> bool:
        """Whether a terminal is at the other end."""
        try:
            return not self._gone and bool(self._stream.isatty())
        except (OSError, ValueError, AttributeError):
            return False

    def settle(self) -> None:
        """The last flush. What cannot be written then is dropped, so that the interpreter's own flush cannot fail."""
        self.flush()
        if self.failure is not None or self._stuck:
            self._to_null()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _write(self, text: str) -> None:
        if not self._wait_for_room():
            return
        try:
            self._stream.write(text)
        except UnicodeEncodeError as error:
            self._stream.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
        self._stream.flush()

    def _wait_for_room(self) -> bool:
        """Wait until a write will not block; false when the run is to end and the reader stands still."""
        since = time.monotonic()
        try:
            while not _has_room(self._stream.fileno(), milliseconds=0 if self._stuck else 200):
                self._stuck = self._stuck or (self.hurry and time.monotonic() - since > STUCK_SECONDS)
                if self._stuck:
                    return False
        except (OSError, ValueError, AttributeError, TypeError):
            return True  # no descriptor to ask, or no way to ask it: the write tells what is wrong
        self._stuck = False
        return True

    def _tell_failure(self, error: BaseException) -> None:
        first = self.failure is None
        self.failure = self.failure or error
        if getattr(error, "errno", None) not in _PASSING_ERRORS:
            self._to_null()
        if first and self.other is not None:
            why = reason(error) if isinstance(error, OSError) else str(error)
            self.other.write(f"{self._name} cannot be written ({why}); going on without it\n")

    def _to_null(self) -> None:
        """Let the descriptor lead nowhere, so that what is still buffered and what other code writes there is lost
        without an error."""
        self._gone = True
        with suppress(OSError, ValueError, AttributeError):
            descriptor = self._stream.fileno()
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, descriptor)
            os.close(null)


_active: list[SurvivingStream] = []
"""Standard output and standard error of the outermost ``surviving_console``."""


@contextmanager
def surviving_console() -> Iterator[tuple[SurvivingStream, SurvivingStream]]:
    """Inside, ``sys.stdout`` and ``sys.stderr`` are ``SurvivingStream``s; inside another one nothing changes."""
    if _active:
        yield _active[0], _active[1]
        return
    _fill_standard_descriptors()
    out = SurvivingStream(sys.stdout, "standard output")
    err = SurvivingStream(sys.stderr, "standard error")
    out.other = err
    err.other = out
    _active.extend((out, err))
    try:
        with redirect_stdout(out), redirect_stderr(err):  # type: ignore[type-var]
            yield out, err
    finally:
        out.settle()
        err.settle()
        _active.clear()


def hurry() -> None:
    """The run is to end: from now on no write waits for long. Safe in a signal handler."""
    for stream in _active:
        stream.hurry = True


def write_at_once(text: str) -> None:
    """Write to standard error if it takes it without waiting. Safe in a signal handler: uses no buffered stream."""
    with suppress(OSError, ValueError):
        if not hasattr(select, "poll") or _has_room(2, milliseconds=0):
            os.write(2, text.encode()[:4000])


def _has_room(descriptor: int, *, milliseconds: int) -> bool:
    """Whether a write to the descriptor will not block, or will not within this time."""
    poller = select.poll()
    poller.register(descriptor, select.POLLOUT)
    return bool(poller.poll(milliseconds))


def _fill_standard_descriptors() -> None:
    """A descriptor that is closed at the start would be given to the next file opened, which then received output."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            with suppress(OSError):
                os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
