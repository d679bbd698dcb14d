"""Checkpoints: written under a temporary name, renamed when complete, found again through ``latest``."""

import errno
import hashlib
import json
import os
import random
import re
import shutil
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flowgrpo_rc.models.lora import give_umask_mode
from flowgrpo_rc.run_folder import WRITING, next_number, sync_path

STATE_FILE, TENSOR_FILE = "trainer_state.json", "optimizer.pt"
_FOLDER = re.compile(r"step_(0|[1-9][0-9]{0,17})")
_REMOVING = ".removing"


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, or is not one this run can continue from."""


class DamagedCheckpointError(CheckpointError):
    """A file of a checkpoint is missing, cannot be read or holds what no run has written; the message names it."""


@dataclass(frozen=True)
class Fingerprint:
    """What must agree between a checkpoint and the run that continues it."""

    pipeline: str
    transformer: dict[str, Any]
    lora: dict[str, Any]
    parts: dict[str, Any] = field(default_factory=dict)
    """What else shapes the samples: text encoders, vocabularies, VAE, schedule."""

    def check(self, saved: Any, folder: Path) -> None:
        """Raise ``CheckpointError`` naming the first difference to ``saved``."""
        file = folder / STATE_FILE
        for part in fields(self):
            own = getattr(self, part.name)
            if part.name == "parts" and isinstance(saved, dict) and part.name not in saved:
                warnings.warn(
                    f"{folder} was written before checkpoints recorded text encoders, vocabularies, VAE and schedule: "
                    "that these are the same is not checked",
                    stacklevel=3,
                )
                continue
            theirs = entry(saved, part.name, type(own), file, "fingerprint")
            if isinstance(own, dict):
                self._check_part(part.name, own, theirs, folder)
            elif theirs != own:
                raise CheckpointError(f"{folder} is a checkpoint of a {theirs}, this run trains a {own}")

    @staticmethod
    def _check_part(part: str, own: dict[str, Any], saved: dict[str, Any], folder: Path) -> None:
        different = sorted(k for k in own.keys() | saved.keys() if own.get(k) != saved.get(k))
        if different:
            key = different[0]
            raise CheckpointError(
                f"{folder} is a checkpoint of another model: {part} {key} is {saved.get(key)!r:.300} there and "
                f"{own.get(key)!r:.300} here. Use trainer.resume_mode=disable to start afresh"
            )


class CheckpointStore:
    """The folder ``checkpoints/`` of a run: ``step_N/`` folders and the file ``latest`` with the newest's name."""

    def __init__(self, root: Path, keep: int | None) -> None:
        self.root, self._keep = root, keep
        self._pointer = root / "latest"

    def latest(self) -> Path | None:
        """The checkpoint that ``latest`` names; where it names none that is complete, the newest complete one.

        Raises:
            CheckpointError: ``latest`` cannot be read.
        """
        name, complete = self._pointed(), self.complete()
        named = None if name is None else self.root / name
        return named if named in complete else (complete[-1] if complete else None)

    def stale_pointer(self) -> str | None:
        """What to say where ``latest`` names a checkpoint that is not there."""
        name, latest = self._pointed(), self.latest()
        if name is None or latest is None or latest.name == name:
            return None
        return f"{self._pointer} names {name}, which is no complete checkpoint; the newest complete one is {latest}"

    def complete(self) -> list[Path]:
        """Complete checkpoints, oldest first. A folder of another name (a user's copy) is none of ours."""
        folders = [p for p in self.root.glob("step_*") if step_of(p) is not None and _is_file(p / STATE_FILE)]
        return sorted(folders, key=lambda folder: step_of(folder) or 0)

    def set_aside_after(self, step: int, number: int | None = None) -> list[str]:
        """Move the checkpoints of later steps aside: a run resumed at ``step`` goes another way from there.

        Returns what was moved, in words.
        """
        numbered = {folder: step_of(folder) for folder in self.root.glob("step_*")}
        later = [folder for folder, own in numbered.items() if own is not None and own > step]
        kept = [folder for folder in self.complete() if folder not in later]
        if not later:
            return []
        if kept:
            _write_atomically(self._pointer, kept[-1].name)
        else:
            self._pointer.unlink(missing_ok=True)
        aside = self._aside(number)
        for folder in later:
            os.replace(folder, aside / folder.name)
        sync_path(self.root)
        names = sorted((folder.name for folder in later), key=lambda name: (len(name), name))
        return [f"checkpoints/{', '.join(names)} to {aside.name}/"]

    def save(self, step: int, state: dict[str, Any], tensors: dict[str, Any], write_lora: Any) -> Path:
        """Write ``step_N``; what was there before stays until the new one is complete, and is then moved aside.

        Args:
            step: the number in the folder's name.
            state: JSON-compatible: data position, fingerprint and the like.
            tensors: for ``torch.save``: optimizer, schedule, random states.
            write_lora: called with the folder; writes the adapter.

        Raises:
            CheckpointError: the disk is full or the folder cannot be written; earlier checkpoints are untouched.
        """
        final, temporary = self.root / f"step_{step}", self.root / f".step_{step}{WRITING}"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._remove_left_overs()
            temporary.mkdir()
            write_lora(temporary)
            state = {**state, "digests": {p.name: _digest(p) for p in sorted(temporary.iterdir()) if p.is_file()}}
            torch.save(tensors, temporary / TENSOR_FILE)
            (temporary / STATE_FILE).write_text(json.dumps(state, indent=1))
            give_umask_mode(temporary)
            for path in (*temporary.iterdir(), temporary):
                sync_path(path)
            if final.exists():
                os.replace(final, self._aside(for_name=final.name) / final.name)
            os.replace(temporary, final)
            _write_atomically(self._pointer, final.name)
        except Exception as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if not _is_write_failure(error):
                raise
            reason = "the disk is full" if _is_full(self.root, error) else f"writing failed ({_in_a_line(error)})"
            raise CheckpointError(
                f"cannot save {final}: {reason}. The newest complete checkpoint is {self.newest_complete() or 'none'}; "
                "free some space (trainer.max_actor_ckpt_to_keep limits what is kept) and start again to resume from it"
            ) from error
        self._prune()
        return final

    def newest_complete(self) -> Path | None:
        """By its number, whatever ``latest`` says."""
        complete = self.complete()
        return complete[-1] if complete else None

    def load(self, folder: Path, fingerprint: Fingerprint) -> tuple[dict[str, Any], dict[str, Any]]:
        """``(state, tensors)`` of a checkpoint, every file of it read whole.

        Raises:
            DamagedCheckpointError: not a checkpoint, or a file of it is unreadable.
            CheckpointError: of another model.
        """
        file = folder / STATE_FILE
        if not _is_file(file):
            raise DamagedCheckpointError(f"{folder} holds no {STATE_FILE}, so it is not a complete checkpoint")
        with reading(file):
            state = json.loads(file.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
        step, numbered = entry(state, "step", int, file), step_of(folder)
        if step < 0:
            raise DamagedCheckpointError(f"{file} is damaged: its step is {step}")
        if numbered is not None and step != numbered:
            raise DamagedCheckpointError(f"{file} is damaged: its step is {step}, its folder's {numbered}")
        fingerprint.check(entry(state, "fingerprint", dict, file), folder)
        for name, digest in (entry(state, "digests", dict, file) if "digests" in state else {}).items():
            with reading(folder / name):
                own = _digest(folder / name)
            if own != digest:
                raise DamagedCheckpointError(
                    f"{folder / name} is damaged: it is not what was saved (its digest differs)"
                )
        return state, _load_tensors(folder / TENSOR_FILE)

    def _pointed(self) -> str | None:
        """What ``latest`` says; ``None`` where there is none, or an empty one."""
        try:
            name = self._pointer.read_bytes()[:200].decode("utf-8-sig").strip()
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise self._unreadable(_in_a_line(error)) from error
        if name and not _FOLDER.fullmatch(name):
            raise self._unreadable(f"it says {name!r}")
        return name or None

    def _unreadable(self, why: str) -> CheckpointError:
        newest = self.newest_complete()
        found = "begin at step 0 (there is no complete checkpoint)"
        if newest is not None:
            found = f"go on from the newest complete checkpoint, {newest}"
        return CheckpointError(
            f"{self._pointer} names no checkpoint ({why}); write step_N into it, or remove it to {found}"
        )

    def _aside(self, number: int | None = None, for_name: str = "") -> Path:
        number = next_number(self.root.parent) if number is None else number
        while for_name and (self.root.with_name(f"{self.root.name}.{number}") / for_name).exists():
            number += 1
        aside = self.root.with_name(f"{self.root.name}.{number}")
        aside.mkdir(parents=True, exist_ok=True)
        return aside

    def _remove_left_overs(self) -> None:
        """What a kill left half-written or half-removed."""
        for ending in (WRITING, _REMOVING):
            for stale in self.root.glob(f".*{ending}"):
                shutil.rmtree(stale, ignore_errors=True)

    def _prune(self) -> None:
        for old in self.complete()[: -self._keep] if self._keep else []:
            doomed = old.with_name(f".{old.name}{_REMOVING}")
            with suppress(OSError):  # so that a kill leaves no half of it under its name
                os.replace(old, doomed)
                shutil.rmtree(doomed, ignore_errors=True)


def step_of(folder: Path) -> int | None:
    """The number of a folder ``step_N``; ``None`` for any other name."""
    match = _FOLDER.fullmatch(folder.name)
    return None if match is None else int(match[1])


def entry(mapping: Any, key: Any, kind: type, file: Path, where: str = "") -> Any:
    """``mapping[key]``, which is of exactly this type.

    Raises:
        DamagedCheckpointError: it is not, or not there, or ``mapping`` is none; names ``file`` and the key.
    """
    path = f"{where}.{key}" if where else str(key)
    if not isinstance(mapping, dict):
        name = where or "it"
        raise DamagedCheckpointError(f"{file} is damaged: {name} is a {type(mapping).__name__}, not a mapping")
    if key not in mapping:
        raise DamagedCheckpointError(f"{file} is damaged: {path} is missing")
    if type(mapping[key]) is not kind:
        found = type(mapping[key]).__name__
        raise DamagedCheckpointError(f"{file} is damaged: {path} is a {found}, not a {kind.__name__}")
    return mapping[key]


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Whatever goes wrong inside comes of a damaged ``file``: pickles and archives raise errors of every kind.

    Raises:
        DamagedCheckpointError: names the file.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise DamagedCheckpointError(f"{file} cannot be read: {type(error).__name__}: {_in_a_line(error)}") from error


def _load_tensors(file: Path) -> dict[str, Any]:
    with reading(file):
        with zipfile.ZipFile(file) as archive:  # torch does not look at the checksums
            broken = archive.testzip()
        if broken is not None:
            raise ValueError(f"the checksum of {broken} differs")
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(tensors, dict):
        raise DamagedCheckpointError(f"{file} is damaged: it holds a {type(tensors).__name__}, not a mapping")
    return tensors


def random_states() -> dict[str, Any]:
    """States of the global generators (Python, NumPy, torch), for reward functions that draw from them."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()  # noqa: NPY002
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    """Undo ``random_states``."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))  # noqa: NPY002
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _write_atomically(path: Path, text: str) -> None:
    """On the disk, name and content, when this returns."""
    temporary = path.with_name(path.name + WRITING)
    temporary.write_text(text)
    sync_path(temporary)
    os.replace(temporary, path)
    sync_path(path.parent)


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as handle:
        while block := handle.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a folder that may not be looked into
        return False


def _refuse_constant(name: str) -> None:
    raise ValueError(f"it holds {name}")


def _in_a_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _is_write_failure(error: BaseException) -> bool:
    """torch and safetensors wrap the system's write error in types of their own; only its text survives."""
    text = f"{error} {error.__context__}"
    return isinstance(error, OSError) or "os error" in text or "iostream error" in text


def _is_full(folder: Path, error: BaseException) -> bool:
    if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error):
        return True
    try:
        return shutil.disk_usage(folder).free < 1 << 20
    except OSError:
        return False
