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

from flowgrpo_rc.messages import reason

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LOCK_FILE = ".lock"
_HELD_BY_ANOTHER = {errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES}
"""What ``flock`` answers where another process holds the lock."""
_TRIES = 100
"""How often a lock file that its last holder has just removed is made anew; so often in a row it is not removed."""
_RANKS = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
"""Where launchers put a process's number."""
_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
"""Where they put how many there are."""


def starts_as_main() -> bool:
    """Whether this process is the only one or the launcher's first, which alone writes; known before accelerate is.

    A number that was left in the environment without a launcher says nothing; accelerate ignores it too.
    """
    launched = "LOCAL_RANK" in os.environ or any(os.environ.get(name, "1") != "1" for name in _SIZES)
    return not launched or next((os.environ[name] for name in _RANKS if name in os.environ), "0") == "0"


class RunFolderInUseError(ValueError):
    """Another run writes this folder; the message names the folder, the host and the process."""


class RunLock:
    """``flock`` on the file ``.lock`` of a run folder; the file's text says who holds the lock.

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
        """Folders that were made for the lock, outermost first."""
        self._descriptor: int | None = None
        """The open lock file, while the lock is held."""
        self.problem: str | None = None
        """Why this file system locks nothing; ``None`` where it does."""
        try:
            self._acquire()
        except BaseException:
            self._remove_folders()
            raise
        _open_locks.add(self)

    def release(self) -> None:
        """Let others have it; harmless when done before."""
        if self._descriptor is None:
            return
        with suppress(OSError):
            if self._is_current(self._descriptor):
                self.path.unlink()
        self.close_file()

    def abandon(self) -> None:
        """Release it and remove the folders that were made for it, if nothing has been put there."""
        self.release()
        self._remove_folders()

    def close_file(self) -> None:
        """Close the file and leave it where it is: what a forked child does, whose parent keeps the lock."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __del__(self) -> None:
        with suppress(Exception):
            self.release()

    def _acquire(self) -> None:
        for _ in range(_TRIES):
            self._make_folder()
            try:
                descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
            except FileNotFoundError:  # the folder was removed by a start that was refused
                continue
            try:
                self._lock(descriptor)
                # A lock on a file that its last holder has removed in between would guard nothing.
                if self.problem is not None or self._is_current(descriptor):
                    self._descriptor = descriptor
                    self._sign(descriptor)
                    return
            finally:
                if self._descriptor is None:
                    os.close(descriptor)
        raise OSError(errno.EAGAIN, "its lock is made and removed all the time", str(self.path))

    def _lock(self, descriptor: int) -> None:
        """Lock the open file, or note in ``problem`` why nothing can be locked here."""
        if fcntl is None:
            self.problem = "this system has no flock"
            return
        for _ in range(2):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if error.errno not in _HELD_BY_ANOTHER:
                    self.problem = reason(error)
                    return
            gc.collect()  # an earlier run of this process that nobody refers to any more may still hold it
        raise RunFolderInUseError(
            f"run folder {self.path.parent} is in use by {_holder(descriptor)}; two runs in one folder would mix. Wait "
            "for that one or end it, or give this run a folder of its own: trainer.default_local_dir=... or "
            "trainer.resume_mode=disable"
        )

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

    def _make_folder(self) -> None:
        """Make the folder and its parents where they are missing, and note which were made here."""
        for folder in reversed(self.path.parents):
            if folder.is_dir():
                continue
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


_open_locks: "weakref.WeakSet[RunLock]" = weakref.WeakSet()


def _close_files_in_child() -> None:
    for lock in list(_open_locks):
        lock.close_file()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_files_in_child)
