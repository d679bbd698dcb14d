"""The run folder: its files, and how records of an earlier run are kept.

Records are never deleted. A run moves the records that it would overwrite aside, under the next free number:
``metrics.1.jsonl``, ``samples.1/``, ``checkpoints.1/``. Records that are moved together share the number.
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
MADE_AT_THE_END = ("lora", "lora_ema", "writer", "writer_ema", "plots")
"""Outputs of a run's last step, besides those drawn from its records."""
RECORDS = ("metrics.jsonl", "timeline.jsonl", "samples", "checkpoints", "profile", *MADE_AT_THE_END)
"""Records. A folder that holds one of them is used."""
DRAWN_FROM_RECORDS = ("config.yaml", "summary.png", "report.html")
"""Files that are moved aside together with the records; alone they do not make a folder a used one."""
WRITING = ".writing"
"""Suffix of the temporary name of an incomplete file, which a kill leaves behind."""
_STEMS = "|".join(Path(name).stem for name in (*RECORDS, *DRAWN_FROM_RECORDS))
_ASIDE = re.compile(rf"({_STEMS})\.([0-9]{{1,9}})(\.\w+)?")
_NUMBERED = re.compile(r"step_([0-9]{1,18})\.")
"""Sample grids and profiles."""


class RunFolderError(RuntimeError):
    """A file of the run folder cannot be written; the message names it and the reason."""


class RunFolder:
    """The paths of one run: metrics, timeline, configuration, samples, plots, checkpoints, replay buffer and the final
    LoRAs, a prompt writer's among them."""

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
        self.replay = root / ".replay"
        self.lora = root / "lora"
        self.lora_ema = root / "lora_ema"
        self.writer = root / "writer"
        self.writer_ema = root / "writer_ema"
        self.lock: RunLock | None = None  # held by the process that writes the folder
        self.beside: Path | None = None  # the folder that was asked for, if another run has it

    @classmethod
    def open(cls, root: str, *, fresh: bool, lock: bool = True) -> "RunFolder":
        """The folder at ``root``, locked.

        Args:
            root: the setting ``trainer.default_local_dir``.
            fresh: take a new folder beside it (``root-2``, ``root-3``...) if it is in use or has been.
            lock: false in processes that do not write.

        Raises:
            ValueError: ``root`` names no folder that can be written.
            RunFolderInUseError: another run writes it, and ``fresh`` is false.
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
        for number in count(1):
            folder = cls(path if number == 1 else Path(f"{named}-{number}"))
            folder.beside = None if number == 1 else path
            try:
                # Before the lock, which would for a moment refuse a run that wants to continue there.
                if fresh and folder.is_used():
                    continue
                folder.lock = RunLock(folder.root)
                if not fresh or not folder.is_used():
                    return folder
                folder.lock.release()  # another run began and ended there in between
            except RunFolderInUseError:
                if not fresh:
                    raise
            except OSError as error:
                raise ValueError(
                    f"{field}: {folder.root} cannot be a run folder ({reason(error)}: "
                    f"{error.filename or folder.root}); give a folder that can be written"
                ) from error
        raise AssertionError("unreachable")

    def close(self) -> None:
        """Release the lock."""
        if self.lock is not None:
            self.lock.release()

    def abandon(self) -> None:
        """Release the lock of a run that was refused, and remove the folders that were made for it."""
        if self.lock is not None:
            self.lock.abandon()

    def is_used(self) -> bool:
        """True if an earlier run has left records here."""
        return any(_has_content(self.root / name) for name in RECORDS)

    def write_config(self, config: dict[str, Any]) -> list[str]:
        """Write the resolved configuration, or raise ``RunFolderError``. Returns the names of an earlier, different one
        that was moved aside."""
        from omegaconf import OmegaConf

        text = OmegaConf.to_yaml(OmegaConf.create(config)).encode("utf-8", "backslashreplace")
        moved: list[str] = []
        try:
            if _has_content(self.config) and self.config.read_bytes() != text:
                moved = self.set_aside((self.config.name,), self.next_number())
            write_whole(self.config, lambda temporary: temporary.write_bytes(text))
        except OSError as error:
            raise RunFolderError(f"{self.config} cannot be written: {reason(error)}") from error
        return moved

    def append(self, row: dict[str, Any]) -> None:
        """Add one line to ``metrics.jsonl``, on the disk when this returns. Raises ``RunFolderError`` if it cannot be
        written; the file is then as it was, without a part of the line."""
        _append(self.metrics, row)

    def append_to_timeline(self, row: dict[str, Any]) -> None:
        """Add one line to ``timeline.jsonl``, likewise."""
        _append(self.timeline, row)

    def replace_folder(
        self, target: Path, write: Callable[[Path], None], same: Callable[[Path, Path], bool]
    ) -> list[str]:
        """Fill the folder ``target`` by ``write``, whole or not at all. Returns the names of an earlier folder that was
        moved aside. One that is the ``same`` stays."""
        with temporary_folder(target) as temporary:
            write(temporary)
            for file in temporary.iterdir():
                sync_path(file)
            if target.is_dir() and same(temporary, target):
                return []
            moved = self.set_aside((target.name,), self.next_number())
            os.replace(temporary, target)
        return moved

    def rows(self) -> list[dict[str, Any]]:
        """All complete lines of ``metrics.jsonl``, without one that a kill cut off."""
        return read_rows(self.metrics)[0] if self.metrics.is_file() else []

    def timeline_lines(self) -> list[dict[str, Any]]:
        """All complete lines of ``timeline.jsonl``."""
        return read_rows(self.timeline)[0] if self.timeline.is_file() else []

    def grids(self) -> dict[int, Path]:
        """The sample grids by their step, in order."""
        grids = [grid for grid in self.samples.glob("step_*.png") if grid.stem[5:].isdecimal()]
        return dict(sorted((int(grid.stem[5:]), grid) for grid in grids))

    def next_number(self) -> int:
        """The number for the next records to be moved aside: one more than the largest in use."""
        names = [entry.name for entry in self.root.iterdir()] if self.root.is_dir() else []
        return 1 + max((int(match[2]) for name in names if (match := _ASIDE.fullmatch(name))), default=0)

    def set_aside(self, names: tuple[str, ...], number: int) -> list[str]:
        """Rename the files ``names`` that exist: ``metrics.jsonl`` to ``metrics.1.jsonl``. Returns the renamings."""
        moved = []
        for name in names:
            path = self.root / name
            if path.exists() or path.is_symlink():
                target = path.with_name(f"{path.stem}.{number}{path.suffix}")
                path.rename(target)
                moved.append(f"{name} to {target.name}")
        return moved

    def set_all_aside(self) -> list[str]:
        """Back up everything that an earlier run left here; returns the renamings."""
        if not self.is_used():
            return []
        present = [name for name in RECORDS if _has_content(self.root / name)]
        # Records last: as long as one remains, a start after a kill in between moves the rest.
        return self.set_aside((*DRAWN_FROM_RECORDS, *present), self.next_number())

    def set_aside_after(self, step: int, number: int | None = None) -> list[str]:
        """Back up everything after ``step``, and malformed lines; returns what was moved. A run that is resumed at
        ``step`` makes these steps again, possibly with other settings."""
        number = self.next_number() if number is None else number
        moved = []
        for folder, what in ((self.samples, "sample grid(s)"), (self.profile, "file(s) of profiles")):
            later = [file for file in folder.glob("step_*") if (m := _NUMBERED.match(file.name)) and int(m[1]) > step]
            if later:
                aside = folder.with_name(f"{folder.name}.{number}")
                aside.mkdir(exist_ok=True)
                for file in later:
                    file.rename(aside / file.name)
                moved.append(f"{len(later)} {what} of later steps to {aside.name}/")
        for file in (self.timeline, self.metrics):
            lines = file.read_bytes().split(b"\n") if file.is_file() else []
            kept = []
            removed = []
            for line in filter(bytes.strip, lines):
                row_step = (_row(line) or {}).get("step")
                stays = type(row_step) is int and row_step <= step
                (kept if stays else removed).append(line + b"\n")
            if removed:
                aside = file.with_name(f"{file.stem}.{number}{file.suffix}")
                write_durably(aside, b"".join(removed))
                write_durably(file, b"".join(kept))
                moved.append(f"{len(removed)} line(s) of {file.name} to {aside.name}")
        return moved


def _append(path: Path, row: dict[str, Any]) -> None:
    line = (json.dumps(row, allow_nan=False) + "\n").encode()
    try:
        with path.open("a+b", buffering=0) as handle:
            size = os.fstat(handle.fileno()).st_size
            if size:
                # A kill may have left a line without its end, which must not swallow this one.
                handle.seek(size - 1)
                line = line if handle.read(1) == b"\n" else b"\n" + line
            try:
                written = 0
                while written < len(line):  # a nearly full disk takes a part
                    written += handle.write(line[written:]) or 0
                _sync(handle.fileno())
            except OSError:
                with suppress(OSError):
                    os.ftruncate(handle.fileno(), size)
                raise
    except OSError as error:
        raise RunFolderError(f"{path}: the row of step {row.get('step')} cannot be written: {reason(error)}") from error


def read_rows(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The rows of a ``metrics.jsonl`` or a ``timeline.jsonl``, and the number of malformed lines."""
    lines = path.read_text(encoding="utf-8-sig", errors="replace").splitlines()
    rows = [_row(line) for line in lines if line.strip()]
    return [row for row in rows if row], rows.count(None)


def sync_path(path: Path) -> None:
    """``fsync`` of a closed file, or of a folder's list of names; ``OSError`` if the disk does not take the bytes."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _sync(descriptor)
    finally:
        os.close(descriptor)


def _sync(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:  # a pipe or ``/dev/null`` cannot be synced
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EROFS):
            raise


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Have ``write`` fill a temporary file and rename it to ``path``; an earlier file stays until then."""
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
    """``write_whole``, with name and content on the disk when this returns."""

    def write(temporary: Path) -> None:
        temporary.write_bytes(content)
        sync_path(temporary)

    write_whole(path, write)
    sync_path(path.parent)


@contextmanager
def temporary_folder(target: Path) -> Iterator[Path]:
    """A new folder beside ``target``, to be filled and renamed inside ``with``; removed if it was not renamed."""
    temporary = target.with_name(f".{target.name}{WRITING}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _has_content(path: Path) -> bool:
    """True for a non-empty file, or a folder with an entry that no kill left incomplete."""
    if path.is_dir():
        return any(not entry.name.endswith(WRITING) for entry in path.iterdir())
    return path.is_file() and path.stat().st_size > 0


def _row(line: str | bytes) -> dict[str, Any] | None:
    """The row of a line; ``None`` if it is malformed."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
