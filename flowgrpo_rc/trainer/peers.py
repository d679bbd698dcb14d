"""One process's exception ends all processes of a run, with its message.

A process that raises leaves the others in the next collective, where they would wait until the time-out of the process
group. Here the first one to fail writes that down in the store at which the processes of a launch meet anyway
(``MASTER_ADDR`` and ``MASTER_PORT``, kept by ``torchrun`` or by process 0); in every other process a thread looks there
once a second. The main thread is then given ``GRACE_SECONDS`` to end by itself, as with gloo, where a lost connection
raises; after that its process is ended where it is. A process that is killed writes nothing: launchers notice that.

The message is shown once a machine: by the process that failed, and on other machines by the first process there.
"""

import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from flowgrpo_rc.messages import one_line

POLL_SECONDS = 1.0
"""How often a process looks whether another one has failed."""
GRACE_SECONDS = 20.0
"""How long a process may take to end by itself once one has failed; launchers kill about ten seconds later."""
CONNECT_SECONDS = 5.0
"""How long the store may take to answer."""
FAILED = 1
"""Exit code of a process that is ended because another one has failed."""
_MEETING = ("RANK", "MASTER_ADDR", "MASTER_PORT")
"""Where a process finds the others, besides how many there are."""
_KEY = "first_failure"
_NOTICED = "noticed"


class PeerFailureError(RuntimeError):
    """Another process of this launch has failed first; the message is that one's."""


@dataclass(frozen=True)
class Failure:
    """The first failure among the processes of a launch."""

    rank: int
    """The process that failed."""
    host: str
    """The machine that it ran on."""
    text: str
    """Its exception's message."""


class Peers:
    """What a process of a launch knows and tells of the first failure among them.

    Args:
        environment: the launcher's variables.

    Raises:
        RuntimeError: there is nothing at that address (with launchers other than ``torchrun``, until process 0 has made
            its process group).
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._rank = int(environment["RANK"])
        self._processes = int(environment["WORLD_SIZE"])
        self._host = socket.gethostname()
        self._store = self._connect()
        self.known: Failure | None = None
        """The first failure, once this process has heard of it."""
        self.error: BaseException | None = None
        """The first exception of this process."""
        self._told = False
        """Whether this process has shown the message, or leaves that to another one."""

    @property
    def failed_elsewhere(self) -> bool:
        """Whether another process is known to have failed before this one."""
        return self.known is not None and self.known.rank != self._rank

    def first(self, error: BaseException) -> BaseException:
        """The exception to end with: ``error``, which the others are told of, unless one was told of before."""
        if self.error is None:  # before anything that the launcher's signal may interrupt
            self.error = error
        if self.known is None:
            own = Failure(self._rank, self._host, one_line(self.error))
            with suppress(RuntimeError):  # the store goes with process 0, which some launchers let keep it
                self.known = Failure(**json.loads(self._store.compare_set(_KEY, "", json.dumps(asdict(own)))))
                self._store.add(_NOTICED, 1)
                self._wait_until_noticed()
        if self.known is not None and self.failed_elsewhere:
            return PeerFailureError(self._in_words(self.known))
        return self.error

    def _wait_until_noticed(self) -> None:
        """Until every other process knows of the failure, so that it does not take for one of its own what comes of it
        there (a lost connection, the launcher's signal); a few seconds at most."""
        waiting = threading.Event()
        for _ in range(0 if self.failed_elsewhere else 30):
            if self._store.add(_NOTICED, 0) >= self._processes:
                return
            waiting.wait(POLL_SECONDS / 10)

    def _in_words(self, failure: Failure) -> str:
        """The message, with where it comes from if that is another machine."""
        if failure.host in ("", self._host):
            return failure.text
        return f"process {failure.rank} on {failure.host}: {failure.text}"

    def shows(self) -> bool:
        """Whether this process is the one to show the message, now; asked once more it is not."""
        first_here = self._environment.get("LOCAL_RANK", "0") == "0"
        is_own = not self.failed_elsewhere
        elsewhere = self.known is not None and self.known.host != self._host and first_here
        shows = not self._told and (is_own or elsewhere)
        self._told = True
        return shows

    def watch(self, stop: threading.Event, on_end: Callable[[], object]) -> None:
        """Until ``stop``: look for a failure, and end this process where it does not end by itself after one."""
        while not stop.wait(POLL_SECONDS):
            self._look()
            if self.known is not None:
                if not stop.wait(GRACE_SECONDS):
                    self._end(self.known, on_end)
                return

    def _look(self) -> None:
        try:
            if self.known is not None or not self._store.check([_KEY]):
                return
            found = Failure(**json.loads(self._store.get(_KEY)))
            self._store.add(_NOTICED, 1)
        except RuntimeError:
            try:
                self._store = self._connect()
            except RuntimeError:
                where = f"{self._environment['MASTER_ADDR']}:{self._environment['MASTER_PORT']}"
                text = f"process 0, or its launcher, which kept the store at {where}, has ended without a word"
                self.known = Failure(0, "", text)
            return
        self.known = found

    def _end(self, failure: Failure, on_end: Callable[[], object]) -> None:
        """The main thread does not return: it waits for a process that is no more."""
        with suppress(Exception):
            on_end()
        if self.shows():
            print(f"error: {self._in_words(failure)}", file=sys.stderr, flush=True)
        os._exit(FAILED)

    def _connect(self) -> Any:
        from torch.distributed import PrefixStore, TCPStore

        environment = self._environment
        store = TCPStore(
            environment["MASTER_ADDR"],
            int(environment["MASTER_PORT"]),
            is_master=False,
            timeout=timedelta(seconds=CONNECT_SECONDS),
            wait_for_workers=False,
        )
        # A launcher that starts all processes anew after a failure keeps its store.
        attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        return PrefixStore(f"flowgrpo_rc/{environment.get('TORCHELASTIC_RUN_ID', '')}/{attempt}", store)


@contextmanager
def failing_together(on_end: Callable[[], object]) -> Iterator[None]:
    """Inside, an exception of any process of the launch ends all of them; alone nothing changes.

    The processes are expected to end then: ``GRACE_SECONDS`` after a failure those that are left are ended.

    Args:
        on_end: called from another thread before the process is ended in the midst of something, to release what would
            outlive it.

    Raises:
        PeerFailureError: whatever was raised inside, another process had failed before.
    """
    peers = _peers()
    if peers is None:
        yield
        return
    stop = threading.Event()
    watcher = threading.Thread(target=peers.watch, args=(stop, on_end), name="peers", daemon=True)
    watcher.start()
    try:
        yield
    except BaseException as error:
        # The watcher goes on: what is closed on the way out may wait for processes that are no more, too.
        first = peers.first(error)
        if first is error:
            raise
        raise first from error
    stop.set()
    watcher.join()


def processes_here(accelerator: Any) -> int:
    """How many processes of the run are on this machine; launchers other than ``torchrun`` tell of one machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", str(accelerator.num_processes)))


def first_error(error: BaseException) -> BaseException:
    """The exception to end with: ``error``, unless this process or another one has failed before."""
    peers = _peers()
    return error if peers is None else peers.first(error)


def shows_error() -> bool:
    """Whether this process is to show the error that ends it; true once in a launch of several processes a machine."""
    peers = _peers()
    return peers is None or peers.shows()


def failed_elsewhere() -> bool:
    """Whether another process is known to have failed; does not wait, so that a signal's handler may ask."""
    return any(peers.failed_elsewhere for peers in _found)


_found: list[Peers] = []
"""This process's, once the store has answered."""


def _peers() -> Peers | None:
    """What is known of the others; None where there are none, or not yet a place to meet them."""
    alone = os.environ.get("WORLD_SIZE", "1") == "1" or not os.environ.keys() >= set(_MEETING)
    if not _found and not alone and _store_is_up():
        with suppress(RuntimeError):
            _found.append(Peers(os.environ))
    return _found[0] if _found else None


def _store_is_up() -> bool:
    """``torchrun`` keeps the store itself; with other launchers it is there once there is a process group."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return True
    from torch import distributed

    return distributed.is_available() and distributed.is_initialized()
