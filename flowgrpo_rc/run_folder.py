"""The run folder: where everything a run leaves behind lies, and what becomes of what an earlier run left there.

Records are never deleted. What a run would overwrite is moved aside under the next free number: ``metrics.1.jsonl``,
``samples.1/``, ``checkpoints.1/``. What is moved at one time shares its number.
"""

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from flowgrpo_rc.checks import path as check_path
from flowgrpo_rc.run_lock import RunLock

TIMING_PREFIXES = ("timing_s/", "perf/")
"""Metrics that depend on the machine's speed; all others repeat exactly with the same seed and machine."""
RECORDS = ("metrics.jsonl", "samples", "checkpoints", "lora", "lora_ema", "plots")
"""What makes a folder one that a run has used."""
DRAWN_FROM_RECORDS = ("config.yaml", "summary.png", "report.html")
"""What goes aside with them, and alone makes no earlier run."""
_ASIDE = re.compile(
    rf"({'|'.join(Path(name).stem for name in (*RECORDS, *DRAWN_FROM_RECORDS))})\.([0-9]{{1,9}})(\.\w+)?"
)
_GRID = re.compile(r"step_([0-9]{1,18})\.png")
WRITING = ".writing"
"""Ending of a temporary name: what is not complete yet, and what a kill leaves behind."""


class RunFolderError(RuntimeError):
    """A file of the run folder cannot be written; the message names it and the reason."""


class RunFolder:
    """One run: ``summary.png``, ``config.yaml``, ``metrics.jsonl``, samples, plots, checkpoints and the final LoRAs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.metrics = root / "metrics.jsonl"
        self.summary = root / "summary.png"
        self.config = root / "config.yaml"
        self.samples = root / "samples"
        self.plots = root / "plots"
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
        path = _path_of(root)
        if not lock:
            return cls(path)
        named = path.resolve() if path.name in ("", "..") else path
        number = 1
        while True:
            folder = cls(path if number == 1 else Path(f"{named}-{number}"))
            number += 1
            try:
                with suppress(FileNotFoundError, NotADirectoryError):
                    folder.root.lstat()  # a name that is too long, or out of reach, would count as used for ever
                if fresh and folder.is_used():
                    continue
                folder.lock = RunLock(folder.root)
            except OSError as error:
                raise ValueError(
                    f"trainer.default_local_dir: {folder.root} cannot be a run folder ({_reason(error)}: "
                    f"{error.filename or folder.root}); give a folder that can be written"
                ) from error
            except ValueError:  # in use
                if fresh:
                    continue
                raise
            if fresh and folder.is_used():  # by a run that began and ended in between
                folder.lock.release()
                continue
            return folder

    def create(self) -> None:
        """Make the folder, if it is not there."""
        self.root.mkdir(parents=True, exist_ok=True)

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
        temporary = self.config.with_name(self.config.name + WRITING)
        moved = []
        try:
            temporary.write_bytes(text)
            if _holds_something(self.config) and self.config.read_bytes() != text:
                moved = self.set_aside((self.config.name,), self.next_number())
            os.replace(temporary, self.config)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            raise RunFolderError(f"{self.config} cannot be written: {_reason(error)}") from error
        return moved

    def append(self, row: dict[str, Any]) -> None:
        """Add one line to ``metrics.jsonl``, on the disk when this returns; one that was left without its end is ended.

        Raises:
            RunFolderError: it cannot be written; the file is as it was, without a part of the line.
        """
        line = (json.dumps(row, allow_nan=False) + "\n").encode()
        try:
            with self.metrics.open("a+b", buffering=0) as handle:
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
            raise RunFolderError(
                f"{self.metrics}: the row of step {row.get('step')} cannot be written: {_reason(error)}"
            ) from error

    def replace_folder(
        self, target: Path, write: Callable[[Path], None], same: Callable[[Path, Path], bool]
    ) -> list[str]:
        """Have ``write`` fill the folder ``target``, complete or not at all.

        Returns what was moved aside: what lay there, unless ``same`` says that it holds nothing else.
        """
        temporary = target.with_name(f".{target.name}{WRITING}")
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            write(temporary)
            for file in temporary.iterdir():
                sync_path(file)
            if target.is_dir() and same(temporary, target):
                shutil.rmtree(temporary)
                return []
            moved = self.set_aside((target.name,), self.next_number())
            os.replace(temporary, target)
            return moved
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    # ------------------------------------------------------------------ reading

    def rows(self) -> list[dict[str, Any]]:
        """All complete lines of ``metrics.jsonl``; a line cut off by a kill is left out."""
        return read_rows(self.metrics)[0] if self.metrics.is_file() else []

    def grids(self) -> dict[int, Path]:
        """The sample grids by their step, in order."""
        found = {_GRID.fullmatch(grid.name): grid for grid in self.samples.glob("step_*.png")}
        return dict(sorted((int(match[1]), grid) for match, grid in found.items() if match))

    # ------------------------------------------------------------------ moving aside

    def next_number(self) -> int:
        """The number under which the next records are moved aside."""
        return next_number(self.root)

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
        """Move aside the lines and sample grids of later steps, and lines that are none; says which.

        A run resumed at ``step`` makes them again, and may make them otherwise. Lines that stay, stay byte for byte.
        """
        number = self.next_number() if number is None else number
        moved = []
        later = [grid for drawn, grid in self.grids().items() if drawn > step]
        if later:
            aside = self.root / f"samples.{number}"
            aside.mkdir(exist_ok=True)
            for grid in later:
                grid.rename(aside / grid.name)
            moved.append(f"{len(later)} sample grid(s) of later steps to {aside.name}/")
        if self.metrics.is_file():
            moved += self._set_lines_aside(step, self.root / f"metrics.{number}.jsonl")
        return moved

    def _set_lines_aside(self, step: int, aside: Path) -> list[str]:
        lines = [line for line in self.metrics.read_bytes().split(b"\n") if line.strip()]
        kept = [line for line in lines if _is_row_until(line, step)]
        removed = [line for line in lines if not _is_row_until(line, step)]
        if not removed:
            return []
        temporary = self.metrics.with_name(self.metrics.name + WRITING)
        for path, content in ((aside, removed), (temporary, kept)):
            path.write_bytes(b"".join(line + b"\n" for line in content))
            sync_path(path)
        os.replace(temporary, self.metrics)
        sync_path(self.root)
        return [f"{len(removed)} line(s) of {self.metrics.name} to {aside.name}"]


def read_rows(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The rows of a ``metrics.jsonl``, and how many lines were none."""
    rows, broken = [], 0
    for line in path.read_text(encoding="utf-8-sig", errors="replace").splitlines():
        try:
            row = json.loads(line) if line.strip() else {}
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            broken += 1
        elif row:
            rows.append(row)
    return rows, broken


def next_number(root: Path) -> int:
    """One more than the largest number of what was moved aside in ``root``."""
    names = [entry.name for entry in root.iterdir()] if root.is_dir() else []
    return 1 + max((int(match[2]) for name in names if (match := _ASIDE.fullmatch(name))), default=0)


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


def _path_of(root: str) -> Path:
    text = os.fspath(root)
    check_path("trainer.default_local_dir", text)
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ValueError(f"trainer.default_local_dir: got {text!r}: {error}; give the whole path") from error


def _holds_something(path: Path) -> bool:
    """A file with something in it, or a folder with an entry that is not what a kill left half-written."""
    try:
        if path.is_dir():
            return any(not entry.name.endswith(WRITING) for entry in path.iterdir())
        return path.is_file() and path.stat().st_size > 0
    except OSError:  # what cannot be looked into is not ours to overwrite
        return True


def _is_row_until(line: bytes, step: int) -> bool:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return False
    number = row.get("step") if isinstance(row, dict) else None
    return isinstance(number, int) and not isinstance(number, bool) and number <= step


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
