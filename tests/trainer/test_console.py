"""Standard output and standard error that fail or are closed: nothing is raised, and it is reported once."""

import errno
import io
import os
import sys

import pytest

from flowgrpo_rc.trainer import console
from flowgrpo_rc.trainer.console import surviving_console


class Failing(io.StringIO):
    """Refuses every write with one error."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def write(self, text):
        raise self.error


@pytest.mark.parametrize(
    "error",
    [
        BrokenPipeError(errno.EPIPE, "Broken pipe"),
        OSError(errno.ENOSPC, "No space left on device"),
        ValueError("I/O operation on closed file"),
    ],
)
@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_an_error_of_writing_is_reported_once_on_the_other_stream(monkeypatch, error, name):
    other = io.StringIO()
    monkeypatch.setattr(sys, name, Failing(error))
    monkeypatch.setattr(sys, "stderr" if name == "stdout" else "stdout", other)
    with surviving_console() as streams:
        for _ in range(3):
            print("a line", file=getattr(sys, name), flush=True)
    assert other.getvalue() == f"a part of the output could not be written ({error})\n"
    assert streams[name == "stderr"].failure is error


def test_both_failing_or_closed_is_survived(monkeypatch):
    for stream in (Failing(BrokenPipeError()), None):
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, stream)
        with surviving_console():
            print("out", flush=True)
            print("err", file=sys.stderr)
        assert sys.stdout is stream


def test_streams_are_restored_and_nesting_changes_nothing(capsys):
    before = (sys.stdout, sys.stderr)
    with surviving_console() as outer:
        with surviving_console() as inner:
            assert inner == outer
        print("still wrapped")
        assert sys.stdout is outer[0]
    assert (sys.stdout, sys.stderr) == before
    assert capsys.readouterr().out == "still wrapped\n"


def test_characters_that_the_encoding_lacks_are_escaped(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    with surviving_console():
        print("a ━ \udc80")
        assert raw.getvalue() == b"a \\u2501 \\udc80\n"


def test_a_gone_reader_leaves_nothing_for_the_interpreters_last_flush(monkeypatch):
    """The descriptor is redirected afterwards, so that a buffer that is still full can be flushed."""
    read, write = os.pipe()
    stream = os.fdopen(write, "w")
    monkeypatch.setattr(sys, "stdout", stream)
    os.close(read)
    with surviving_console():
        print("x" * 100_000)
    stream.write("a library's own reference to the stream")
    stream.close()


def test_a_reader_that_stands_still_is_waited_for_once(monkeypatch):
    """A pipe that nobody empties would block the write for ever, and with it a stop."""
    monkeypatch.setattr(console, "PATIENCE_S", 0.05)
    read, write = os.pipe()
    with os.fdopen(write, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with surviving_console() as (out, _):
            for _ in range(3):
                print("x" * 200_000)
            assert isinstance(out.failure, TimeoutError)
    os.close(read)
