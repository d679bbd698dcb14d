"""One run a folder: a lock that the kernel releases when its process ends, however it ends."""

import errno
import gc
import os
import socket
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LOCK_FILE = ".lock"
_HELD = {errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES}
_TRIES = 100
"""A lock file may be removed by its last holder between opening and locking it; so often in a row it is not."""


_RANKS = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
"""Where launchers put a process's number."""
_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
"""Where they put how many there are."""


def starts_as_main() -> bool:
    """Whether this process is the only one or the launcher's first, which alone writes; known before accelerate is.

    A number without a launcher (left in the environment) says nothing, to accelerate neither.
    """
    launched = "LOCAL_RANK" in os.environ or any(os.environ.get(name, "1") != "1" for name in _SIZES)
    return not launched or next((os.environ[name] for name in _RANKS if name in os.environ), "0") == "0"


class RunFolderInUseError(ValueError):
    """Another run writes this folder; the message names the folder, the host and the process."""


class RunLock:
    """``flock`` on the file ``.lock`` of a run folder, which also holds who has it.

    The lock belongs to this process alone: the file is closed in children, whether they are started by ``exec`` or
    ``fork``.

    Args:
        folder: the run folder; it and its parents are made where they are missing.

    Raises:
        RunFolderInUseError: another run holds it.
        OSError: the folder cannot be made or written.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK_FILE
        self._made: list[Path] = []
        self._descriptor: int | None = None
        self.problem: str | None = None
        """Why this file system locks nothing; ``None`` where it does."""
        try:
            self._acquire()
        except BaseException:
            self._remove_folders()
            raise
        _held.add(self)

    def release(self) -> None:
        """Let others have it; harmless when done before."""
        if self._descriptor is None:
            return
        with suppress(OSError):
            if self._is_current(self._descriptor):
                self.path.unlink()
        self.drop()

    def abandon(self) -> None:
        """Release it and remove the folders that were made for it, if nothing has been put there."""
        self.release()
        self._remove_folders()

    def drop(self) -> None:
        """Close the file alone: what a forked child does, whose parent keeps the lock."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __del__(self) -> None:
        with suppress(Exception):
            self.release()

    def _acquire(self) -> None:
        for _ in range(_TRIES):
            self._make(self.path.parent)
            try:
                descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
            except FileNotFoundError:  # the folder was removed by a start that was refused
                continue
            try:
                self._lock(descriptor)
                if self.problem is not None or self._is_current(descriptor):
                    self._descriptor = descriptor
                    self._sign(descriptor)
                    return
            finally:
                if self._descriptor is None:
                    os.close(descriptor)
        raise OSError(errno.EAGAIN, "its lock is made and removed all the time", str(self.path))

    def _lock(self, descriptor: int) -> None:
        if fcntl is None:
            self.problem = "this system has no flock"
            return
        for last in (False, True):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if error.errno not in _HELD:
                    self.problem = error.strerror or str(error)
                    return
            if last:
                raise RunFolderInUseError(
                    f"run folder {self.path.parent} is in use by {_holder(descriptor)}; two runs in one folder would "
                    "mix. Wait for that one or end it, or give this run a folder of its own: "
                    "trainer.default_local_dir=... or trainer.resume_mode=disable"
                )
            gc.collect()  # an earlier run of this process that nobody refers to any more may still hold it

    def _sign(self, descriptor: int) -> None:
        with suppress(OSError):  # a full disk takes no name, and the lock holds without
            os.ftruncate(descriptor, 0)
            os.lseek(descriptor, 0, os.SEEK_SET)
            os.write(descriptor, f"process {os.getpid()} on host {socket.gethostname()}\n".encode())

    def _is_current(self, descriptor: int) -> bool:
        """Whether the path still leads to the open file."""
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self.path))
        except FileNotFoundError:
            return False

    def _make(self, folder: Path) -> None:
        if not folder.is_dir():
            if folder.parent != folder:
                self._make(folder.parent)
            with suppress(FileExistsError):
                folder.mkdir()
                self._made.append(folder)
            if not folder.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, "is not a folder", str(folder))

    def _remove_folders(self) -> None:
        while self._made:
            with suppress(OSError):  # something lies there by now
                self._made.pop().rmdir()


def _holder(descriptor: int) -> str:
    """What the holder wrote; it may be about to write it."""
    for _ in range(10):
        os.lseek(descriptor, 0, os.SEEK_SET)
        text = " ".join(os.read(descriptor, 300).decode(errors="replace").split())
        if text:
            return text
        time.sleep(0.02)
    return "another process"


_held: "weakref.WeakSet[RunLock]" = weakref.WeakSet()


def _drop_all() -> None:
    for lock in list(_held):
        lock.drop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_all)
