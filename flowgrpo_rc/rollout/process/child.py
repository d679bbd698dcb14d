"""The loop of an engine's process: answer one call after the other, show life, end with the trainer."""

import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from flowgrpo_rc.messages import one_line
from flowgrpo_rc.rollout.process.protocol import HEARTBEAT, READY, Call, Reply, Start, receive, send

HEARTBEAT_SECONDS = 0.5
"""Seconds between two signs of life, and between two looks whether the trainer is there."""
_PR_SET_PDEATHSIG = 1
"""Linux's ``prctl`` option for a signal at the end of the parent's thread."""


def serve(make: Callable[[Any], Any]) -> NoReturn:
    """The whole life of a process whose first argument is the descriptor of its end of the pipe.

    It ends when ``close`` arrives, when the pipe closes or when the trainer is gone; where ``make`` raises, with that
    error as the last line of its log.

    Args:
        make: makes the server out of the settings; its methods are what is called, ``close`` the last of them.
    """
    connection = Connection(int(sys.argv[1]))
    start: Start = receive(connection)
    _end_with_trainer(start)
    lock = threading.Lock()
    threading.Thread(target=_send_heartbeats, args=(connection, lock), daemon=True).start()
    server = make(start.settings)
    reply = Reply(READY)
    while True:
        try:
            with lock:
                send(connection, reply)
            del reply  # a whole rollout, which need not be kept until the next one
            call: Call = receive(connection)
        except (EOFError, OSError):
            _end()
        if call.method == "close":
            with suppress(Exception):
                server.close()
            os._exit(0)
        reply = _answer(server, call)


def _answer(server: Any, call: Call) -> Reply:
    """Never raises: an error goes back as one line."""
    try:
        return Reply(call.id, getattr(server, call.method)(*call.arguments))
    except Exception as error:
        traceback.print_exc()
        return Reply(call.id, error=one_line(error, 1000), error_type=type(error).__name__)


def _end_with_trainer(start: Start) -> None:
    """Have this process end with the trainer's, and end now where that one has gone already."""
    if start.die_with_thread and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == start.parent:
            time.sleep(HEARTBEAT_SECONDS)
        _end()

    threading.Thread(target=watch, daemon=True).start()


def _send_heartbeats(connection: Connection, lock: threading.Lock) -> None:
    """Show life; a trainer that is busy with something else lets them fill the pipe and holds this thread up."""
    while True:
        time.sleep(HEARTBEAT_SECONDS)
        with lock:
            try:
                send(connection, HEARTBEAT)
            except OSError:
                _end()


def _end() -> NoReturn:
    """The trainer is gone: end at once, with all that this process has started."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
