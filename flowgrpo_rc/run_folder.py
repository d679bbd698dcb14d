"""The run folder: where everything a run leaves behind lies, and what becomes of what an earlier run left there.

Records are never deleted. What a run would overwrite is moved aside under the next free number: ``metrics.1.jsonl``,
``samples.1/``, ``checkpoints.1/``. What is moved at one time shares its number.
"""

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

from flowgrpo_rc.checks import path as check_path
from flowgrpo_rc.messages import reason
from flowgrpo_rc.run_lock import RunFolderInUseError, RunLock

TIMING_PREFIXES = ("timing_s/", "timing_per_image_ms/", "perf/")
"""Metrics that depend on the machine's speed and memory; all others repeat exactly with the same seed and machine."""
MADE_AT_THE_END = ("lora", "lora_ema", "plots")
"""What a run makes of its last step, besides what is drawn from its records."""
RECORDS = ("metrics.jsonl", "timeline.jsonl", "samples", "checkpoints", "profile", *MADE_AT_THE_END)
"""What makes a folder one that a run has used."""
DRAWN_FROM_RECORDS = ("config.yaml", "summary.png", "report.html")
"""What is moved aside together with the records, and does not alone make a folder a used one."""
WRITING = ".writing"
"""Ending of a temporary name: what is not complete yet, and what a kill leaves behind."""
_STEMS = "|".join(Path(name).stem for name in (*RECORDS, *DRAWN_FROM_RECORDS))
_ASIDE = re.compile(rf"({_STEMS})\.([0-9]{{1,9}})(\.\w+)?")
_PROFILE = re.compile(r"step_([0-9]{1,18})\.rank_")
_GRID = re.compile(r"step_([0-9]{1,18})\.png")


class RunFolderError(RuntimeError):
    """A file of the run folder cannot be written; the message names it and the reason."""


class RunFolder:
    """One run: ``summary.png``, ``config.yaml``, ``metrics.jsonl``, ``timeline.jsonl``, samples, plots, checkpoints and
    the final LoRAs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.metrics = root / "metrics.jsonl"
        self.timeline = root / "timeline.jsonl"
        self.summary = root / "summary.png"
        self.config = root / "config.yaml"
        self.samples = root / "samples"
        self.plots = root / "plots"
        self.profile = root / "profile"
        self.checkpoints = root / "checkpoints"
        self.lora = root / "lora"
        self.lora_ema = root / "lora_ema"
        self.lock: RunLock | None = None
        """Held by the process that writes the folder."""

    @classmethod
    def open(cls, root: str, *, fresh: bool, lock: bool = True) -> "RunFolder":
        """The folder at ``root``, locked; with ``fresh`` a new one beside it (``root-2``, ``root-3``...) if it is in
        use or has been.

        Args:
            root: the setting ``trainer.default_local_dir``.
            fresh: whether the run may not continue in a used folder.
            lock: false in processes that do not write.

        Raises:
            ValueError: ``root`` names no folder.
            RunFolderInUseError: another run writes it, and it may not be another.
        """
        field = "trainer.default_local_dir"
        check_path(field, root)
        try:
            path = Path(root).expanduser()
        except RuntimeError as error:
            raise ValueError(f"{field}: got {root!r}: {error}; give the whole path") from error
        if not lock:
            return cls(path)
        named = path.resolve() if path.name in ("", "..") else path
        folders = (cls(path if number == 1 else Path(f"{named}-{number}")) for number in count(1))
        return next(folder for folder in folders if folder._lock(fresh=fresh))

    def _lock(self, *, fresh: bool) -> bool:
        """Lock the folder; false where a fresh one is wanted and this one is in use or has been."""
        try:
            with suppress(FileNotFoundError, NotADirectoryError):
                self.root.lstat()  # a name that is too long, or out of reach, would count as used for ever
            # Asked before it is locked too: a lock, however short, would refuse a run that wants to continue there.
            if fresh and self.is_used():
                return False
            self.lock = RunLock(self.root)
        except OSError as error:
            raise ValueError(
                f"trainer.default_local_dir: {self.root} cannot be a run folder ({reason(error)}: "
                f"{error.filename or self.root}); give a folder that can be written"
            ) from error
        except RunFolderInUseError:
            if fresh:
                return False
            raise
        if fresh and self.is_used():  # by a run that began and ended in between
            self.lock.release()
            return False
        return True

    def close(self) -> None:
        """Let other runs write it."""
        if self.lock is not None:
            self.lock.release()

    def abandon(self) -> None:
        """The run was refused: leave no trace of it."""
        if self.lock is not None:
            self.lock.abandon()

    def is_used(self) -> bool:
        """Whether an earlier run has left records here."""
        return any(_holds_something(self.root / name) for name in RECORDS)

    # ------------------------------------------------------------------ writing

    def write_config(self, config: dict[str, Any]) -> list[str]:
        """Write the resolved configuration; returns what was moved aside: one that says something else.

        Raises:
            RunFolderError: it cannot be written.
        """
        from omegaconf import OmegaConf

        text = OmegaConf.to_yaml(OmegaConf.create(config)).encode("utf-8", "backslashreplace")
        moved: list[str] = []

        def write(temporary: Path) -> None:
            temporary.write_bytes(text)
            # Only now that there is a new one does the old one go aside.
            if _holds_something(self.config) and self.config.read_bytes() != text:
                moved.extend(self.set_aside((self.config.name,), self.next_number()))

        try:
            write_whole(self.config, write)
        except OSError as error:
            raise RunFolderError(f"{self.config} cannot be written: {reason(error)}") from error
        return moved

    def append(self, row: dict[str, Any]) -> None:
        """Add one line to ``metrics.jsonl``, on the disk when this returns.

        A line that a kill left without its end is ended first, so that no row shares a line with it.

        Raises:
            RunFolderError: it cannot be written; the file is as it was, without a part of the line.
        """
        _append(self.metrics, row)

    def append_to_timeline(self, row: dict[str, Any]) -> None:
        """The same for ``timeline.jsonl``."""
        _append(self.timeline, row)

    def replace_folder(
        self, target: Path, write: Callable[[Path], None], same: Callable[[Path, Path], bool]
    ) -> list[str]:
        """Have ``write`` fill the folder ``target``, complete or not at all.

        Returns what was moved aside: what lay there, unless ``same`` says that it holds nothing else.
        """
        with temporary_folder(target) as temporary:
            write(temporary)
            for file in temporary.iterdir():
                sync_path(file)
            if target.is_dir() and same(temporary, target):
                return []
            moved = self.set_aside((target.name,), self.next_number())
            os.replace(temporary, target)
        return moved

    # ------------------------------------------------------------------ reading

    def rows(self) -> list[dict[str, Any]]:
        """All complete lines of ``metrics.jsonl``; a line cut off by a kill is left out."""
        return read_rows(self.metrics)[0] if self.metrics.is_file() else []

    def timeline_lines(self) -> list[dict[str, Any]]:
        """The same of ``timeline.jsonl``."""
        return read_rows(self.timeline)[0] if self.timeline.is_file() else []

    def grids(self) -> dict[int, Path]:
        """The sample grids by their step, in order."""
        found = {_GRID.fullmatch(grid.name): grid for grid in self.samples.glob("step_*.png")}
        return dict(sorted((int(match[1]), grid) for match, grid in found.items() if match))

    def _profiles_after(self, step: int) -> list[Path]:
        """Traces and tables of the steps after ``step``."""
        return [file for file in self.profile.glob("step_*") if (m := _PROFILE.match(file.name)) and int(m[1]) > step]

    # ------------------------------------------------------------------ moving aside

    def next_number(self) -> int:
        """The number under which the next records are moved aside: one more than the largest that was used."""
        names = [entry.name for entry in self.root.iterdir()] if self.root.is_dir() else []
        return 1 + max((int(match[2]) for name in names if (match := _ASIDE.fullmatch(name))), default=0)

    def set_aside(self, names: tuple[str, ...], number: int) -> list[str]:
        """Rename those of ``names`` that are there: ``metrics.jsonl`` to ``metrics.1.jsonl``; says which."""
        moved = []
        for name in names:
            path = self.root / name
            if path.exists() or path.is_symlink():
                target = path.with_name(f"{path.stem}.{number}{path.suffix}")
                path.rename(target)
                moved.append(f"{name} to {target.name}")
        return moved

    def set_all_aside(self) -> list[str]:
        """A new run begins here: move the records of the earlier one aside, if there are any; says which."""
        if not self.is_used():
            return []
        present = [name for name in RECORDS if _holds_something(self.root / name)]
        # Records last: as long as one is there, a start after a kill in between moves the rest.
        return self.set_aside((*DRAWN_FROM_RECORDS, *present), self.next_number())

    def set_aside_after(self, step: int, number: int | None = None) -> list[str]:
        """Move aside the lines, sample grids and profiles of later steps, and lines that are none; says which.

        A run resumed at ``step`` makes them again, and may make them otherwise. Lines that stay, stay byte for byte.
        """
        number = self.next_number() if number is None else number
        moved = []
        grids = [grid for drawn, grid in self.grids().items() if drawn > step]
        for later, what in ((grids, "sample grid(s)"), (self._profiles_after(step), "file(s) of profiles")):
            if later:
                folder = later[0].parent
                aside = folder.with_name(f"{folder.name}.{number}")
                aside.mkdir(exist_ok=True)
                for file in later:
                    file.rename(aside / file.name)
                moved.append(f"{len(later)} {what} of later steps to {aside.name}/")
        for file in (self.timeline, self.metrics):
            content = file.read_bytes() if file.is_file() else b""
            lines = [line + b"\n" for line in content.split(b"\n") if line.strip()]
            removed = [line for line in lines if not _is_row_until(line, step)]
            if removed:
                aside = file.with_name(f"{file.stem}.{number}{file.suffix}")
                write_durably(aside, b"".join(removed))
                write_durably(file, b"".join(line for line in lines if _is_row_until(line, step)))
                moved.append(f"{len(removed)} line(s) of {file.name} to {aside.name}")
        return moved


def _append(path: Path, row: dict[str, Any]) -> None:
    """Add a line to a file of rows; see ``RunFolder.append``."""
    line = (json.dumps(row, allow_nan=False) + "\n").encode()
    try:
        with path.open("a+b", buffering=0) as handle:
            size = os.fstat(handle.fileno()).st_size
            if size:
                handle.seek(size - 1)
                line = line if handle.read(1) == b"\n" else b"\n" + line
            try:
                written = 0
                while written < len(line):
                    written += handle.write(line[written:]) or 0
                sync(handle.fileno())
            except OSError:
                with suppress(OSError):
                    os.ftruncate(handle.fileno(), size)
                raise
    except OSError as error:
        raise RunFolderError(f"{path}: the row of step {row.get('step')} cannot be written: {reason(error)}") from error


def read_rows(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The rows of a ``metrics.jsonl`` or a ``timeline.jsonl``, and how many lines were none."""
    # Line by line: the text of a million rows is as large as the rows.
    with path.open(encoding="utf-8-sig", errors="replace") as lines:
        rows = [_row(line) for line in lines if line.strip()]
    return [row for row in rows if row], rows.count(None)


def sync(descriptor: int) -> None:
    """Have an open file's bytes on the disk; what cannot be synchronised (a pipe, ``/dev/null``) is left alone.

    Raises:
        OSError: the disk does not take them.
    """
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EROFS):
            raise


def sync_path(path: Path) -> None:
    """The same of a closed file, or of a folder's list of names, where the system can do that."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:  # Windows opens no folders
        if path.is_dir():
            return
        raise
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Have ``write`` write a file that is at ``path`` whole or not at all; what was there stays until then."""
    temporary = path.with_name(path.name + WRITING)
    try:
        write(temporary)
        os.replace(temporary, path)
    except BaseException:
        # Without this, a full disk would also keep the half that did fit.
        with suppress(OSError):
            temporary.unlink()
        raise


def write_durably(path: Path, content: bytes) -> None:
    """Write a file that is on the disk, name and content, when this returns; it is there whole or not at all."""

    def write(temporary: Path) -> None:
        temporary.write_bytes(content)
        sync_path(temporary)

    write_whole(path, write)
    sync_path(path.parent)


@contextmanager
def temporary_folder(target: Path) -> Iterator[Path]:
    """A new folder beside ``target``, to be filled and renamed inside ``with``; removed where it was not renamed."""
    temporary = target.with_name(f".{target.name}{WRITING}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _holds_something(path: Path) -> bool:
    """A file with something in it, or a folder with an entry that is not what a kill left half-written."""
    try:
        if path.is_dir():
            return any(not entry.name.endswith(WRITING) for entry in path.iterdir())
        return path.is_file() and path.stat().st_size > 0
    except OSError:  # what cannot be looked into is not ours to overwrite
        return True


def _row(line: str | bytes) -> dict[str, Any] | None:
    """The row that a line holds; ``None``: it is none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _is_row_until(line: bytes, step: int) -> bool:
    number = (_row(line) or {}).get("step")
    return type(number) is int and number <= step
