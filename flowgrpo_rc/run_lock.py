"""One run per folder: a lock that the kernel releases when its process ends, however it ends."""

import errno
import gc
import os
import socket
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

LOCK_FILE = ".lock"
_NOT_SUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of ``flock`` on file systems without locks."""


class RunFolderInUseError(ValueError):
    """Another run writes this folder; the message names the folder, the host and the process."""


class RunLock:
    """A lock on the file ``.lock`` of a run folder; the text of the file names the holder.

    Args:
        folder: the run folder, which is made where it is missing.

    Raises:
        RunFolderInUseError: another run holds the lock.
        OSError: the folder cannot be made or written.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK_FILE
        self.problem: str | None = None
        """The reason why this file system cannot lock; ``None`` where it can."""
        self._made = [parent for parent in (folder, *folder.parents) if not parent.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        try:
            # Without flock filelock would otherwise keep a marker file, which a killed run leaves behind.
            # For all threads: a trainer may be made in one thread and fitted in another.
            self._lock = FileLock(self.path, timeout=0, thread_local=False, fallback_to_soft=False)
        except TypeError:  # older versions, which keep no marker
            self._lock = FileLock(self.path, timeout=0, thread_local=False)
        try:
            try:
                self._lock.acquire()
            except Timeout:
                gc.collect()  # an earlier run of this process that nobody refers to any more may still hold it
                self._lock.acquire()
        except Timeout:
            holder = "another process"
            with suppress(OSError):
                holder = self.path.read_text(errors="replace").strip() or holder
            raise RunFolderInUseError(
                f"run folder {folder} is in use by {holder}; two runs in one folder would mix. Wait for that one or "
                "end it, or give this run a folder of its own: trainer.default_local_dir=... or "
                "trainer.resume_mode=disable"
            ) from None
        except (OSError, NotImplementedError) as error:  # older versions of filelock raise the latter
            if isinstance(error, OSError) and error.errno not in _NOT_SUPPORTED:
                raise
            self.problem = getattr(error, "strerror", None) or str(error)
            return
        with suppress(OSError):  # a full disk takes no text, and the lock holds without
            self.path.write_text(f"process {os.getpid()} on host {socket.gethostname()}\n")

    def release(self) -> None:
        """Release the lock; harmless when done before."""
        if self._lock.is_locked:
            with suppress(OSError):
                self.path.unlink()
            self._lock.release()

    def abandon(self) -> None:
        """Release the lock, and remove the folders that were made for it if nothing was put there."""
        self.release()
        for folder in self._made:
            with suppress(OSError):  # something else was put there
                folder.rmdir()
