"""Standard output and error that fail, close or stand still: nothing is raised, and it is said once."""

import errno
import io
import os
import signal
import sys
import threading
import time

import pytest

from flowgrpo_rc.trainer import console
from flowgrpo_rc.trainer.console import surviving_console, write_at_once
from flowgrpo_rc.trainer.interrupt import stop_request


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
        OSError(errno.EIO, "Input/output error"),
        ValueError("I/O operation on closed file"),
    ],
)
@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_an_error_of_writing_is_told_once_on_the_other_stream(monkeypatch, error, name):
    other = io.StringIO()
    monkeypatch.setattr(sys, name, Failing(error))
    monkeypatch.setattr(sys, "stderr" if name == "stdout" else "stdout", other)
    with surviving_console() as streams:
        for _ in range(3):
            print("a line", file=getattr(sys, name), flush=True)
    said = "standard output" if name == "stdout" else "standard error"
    assert other.getvalue().startswith(f"{said} cannot be written (")
    assert other.getvalue().count("\n") == 1
    assert streams[name == "stderr"].failure is error


def test_both_failing_is_survived(monkeypatch):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, Failing(BrokenPipeError()))
    with surviving_console():
        print("out")
        print("err", file=sys.stderr)


def test_closed_streams_are_survived(monkeypatch):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    with surviving_console():
        print("out", flush=True)
        sys.stdout.writelines(["a", "b"])
    assert sys.stdout is None


def test_streams_are_given_back_and_nesting_changes_nothing(capsys):
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
    """The descriptor leads nowhere afterwards, so that a buffer that is still full can be flushed."""
    read, write = os.pipe()
    stream = os.fdopen(write, "w")
    monkeypatch.setattr(sys, "stdout", stream)
    os.close(read)
    with surviving_console():
        print("x" * 100_000)
        print("again")
    stream.write("a library's own reference to the stream")
    stream.close()


def test_a_reader_that_stands_still_holds_up_no_end(monkeypatch):
    """The pipe is full; a request to stop, and after it a write is given up."""
    monkeypatch.setattr(console, "STUCK_SECONDS", 0.05)
    read, write = os.pipe()
    stream = os.fdopen(write, "w")
    monkeypatch.setattr(sys, "stdout", stream)
    with surviving_console() as (out, _err):
        filling = threading.Thread(target=lambda: print("x" * 200_000))
        filling.start()
        filling.join(0.5)
        assert filling.is_alive(), "nobody reads: without a request to stop it waits"
        since = time.monotonic()
        with stop_request(lambda: None):
            os.kill(os.getpid(), signal.SIGTERM)
        filling.join(10)
        assert not filling.is_alive()
        assert time.monotonic() - since < 5
        assert out.failure is None
    os.close(read)
    stream.close()


def test_a_reader_that_is_slow_gets_everything(monkeypatch):
    read, write = os.pipe()
    stream = os.fdopen(write, "w")
    monkeypatch.setattr(sys, "stdout", stream)
    got = []

    def drain():
        time.sleep(0.3)
        while block := os.read(read, 4096):
            got.append(block)

    reader = threading.Thread(target=drain)
    reader.start()
    with surviving_console():
        print("x" * 300_000)
    stream.close()
    reader.join()
    assert b"".join(got) == b"x" * 300_000 + b"\n"


def test_a_handlers_line_does_not_wait(monkeypatch):
    """Standard error is a full pipe: nothing is written, and nothing waits."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    try:
        while True:
            os.write(write, b"x" * 65536)
    except BlockingIOError:
        os.set_blocking(write, True)
    saved = os.dup(2)
    os.dup2(write, 2)
    try:
        write_at_once("stopping\n")
    finally:
        os.dup2(saved, 2)
        for descriptor in (saved, read, write):
            os.close(descriptor)
