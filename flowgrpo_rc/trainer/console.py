"""Standard output and standard error that may fail without ending a run.

A pipe into ``head``, a closed terminal and a log file on a full disk make every ``print`` raise, and a reader that
stands still makes it wait. The results of a run lie in its folder, so that it goes on without its console.
"""

import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any

PATIENCE_S = 30.0
"""Longest wait for a reader that stands still; its stream then counts as failed."""
_PIECE = 1024
"""Characters written at once: as many as a pipe takes that is ready for writing."""


class SurvivingStream:
    """A text stream around ``stream`` whose ``write`` and ``flush`` raise nothing; ``failure`` is the first error."""

    def __init__(self, stream: Any) -> None:
        # ``None``: the process was started with the stream closed.
        self._stream = open(os.devnull, "w") if stream is None else stream  # noqa: SIM115
        self.failure: Exception | None = None
        if hasattr(self._stream, "reconfigure"):
            self._stream.reconfigure(errors="backslashreplace")  # the C locale lacks the characters of our tables
        self._descriptor: int | None = None
        with suppress(AttributeError, OSError, ValueError):  # a stream without a file
            self._descriptor = self._stream.fileno()

    def write(self, text: str) -> int:
        """Write ``text`` as far as the stream takes it."""
        try:
            for start in range(0, len(text), _PIECE):
                # A blocked write could not be stopped by a signal.
                patience = PATIENCE_S if self.failure is None else 0.0
                if self._descriptor is not None and not select.select([], [self._descriptor], [], patience)[1]:
                    raise TimeoutError("nobody reads it")
                self._stream.write(text[start : start + _PIECE])
                # At once: a message that is still in a buffer when the process is killed is lost.
                self._stream.flush()
        except (OSError, ValueError) as error:
            self.failure = self.failure or error
        return len(text)

    def flush(self) -> None:
        """Do nothing: ``write`` has flushed."""

    def isatty(self) -> bool:
        """True if the stream is a terminal."""
        try:
            return bool(self._stream.isatty())
        except ValueError:  # it is closed
            return False

    def settle(self) -> None:
        """After a failure, redirect the descriptor to nowhere: the interpreter's last flush would fail too."""
        if self.failure is not None:
            with suppress(OSError, ValueError, AttributeError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def surviving_console() -> Iterator[tuple[SurvivingStream, SurvivingStream]]:
    """Make ``sys.stdout`` and ``sys.stderr`` ``SurvivingStream``s; nested calls change nothing."""
    if isinstance(sys.stdout, SurvivingStream) and isinstance(sys.stderr, SurvivingStream):
        yield sys.stdout, sys.stderr
        return
    out = SurvivingStream(sys.stdout)
    err = SurvivingStream(sys.stderr)
    try:
        with redirect_stdout(out), redirect_stderr(err):  # type: ignore[type-var]
            yield out, err
    finally:
        for stream, other in ((out, err), (err, out)):
            stream.settle()
            if stream.failure is not None and other.failure is None:
                other.write(f"a part of the output could not be written ({stream.failure})\n")
