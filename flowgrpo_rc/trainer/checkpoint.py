"""Checkpoints: written under a temporary name, renamed when complete, found again through ``latest``."""

import errno
import hashlib
import json
import os
import re
import shutil
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowgrpo_rc.messages import one_line
from flowgrpo_rc.models.lora import give_umask_mode
from flowgrpo_rc.run_folder import WRITING, RunFolder, sync_path, temporary_folder, write_durably

STATE_FILE = "trainer_state.json"
TENSOR_FILE = "optimizer.pt"
_FOLDER = re.compile(r"step_(0|[1-9][0-9]{0,17})")
_REMOVING = ".removing"
"""Ending of a checkpoint that is being removed, so that a kill leaves no half of it under its own name."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, or is not one this run can continue from."""


class DamagedCheckpointError(CheckpointError):
    """A file of a checkpoint is missing, cannot be read or holds what no run has written; the message names it."""


@dataclass(frozen=True)
class CheckpointFile:
    """A file of a checkpoint whose content is being checked; every error names it."""

    path: Path

    def damaged(self, what: str) -> DamagedCheckpointError:
        """The error that the file is damaged: ``what`` is wrong with it."""
        return DamagedCheckpointError(f"{self.path} is damaged: {what}")

    def entry(self, mapping: Any, key: Any, kind: type, where: str = "") -> Any:
        """``mapping[key]``, which is of exactly this type; ``where`` is the dotted place of the mapping in the file.

        Raises:
            DamagedCheckpointError: it is not, or not there, or ``mapping`` is none; names the file and the key.
        """
        path = f"{where}.{key}" if where else str(key)
        if not isinstance(mapping, dict):
            raise self.damaged(f"{where or 'it'} is a {type(mapping).__name__}, not a mapping")
        if key not in mapping:
            raise self.damaged(f"{path} is missing")
        if type(mapping[key]) is not kind:
            raise self.damaged(f"{path} is a {type(mapping[key]).__name__}, not a {kind.__name__}")
        return mapping[key]

    def check(self, saved: Any, like: Mapping[Any, Any], where: str = "") -> None:
        """``saved`` has every entry of ``like``, of the same type; mappings in turn, and tensors of the same shape.

        Raises:
            DamagedCheckpointError: names the file and the first entry that is otherwise.
        """
        for key, example in like.items():
            found = self.entry(saved, key, type(example), where)
            path = f"{where}.{key}" if where else str(key)
            if isinstance(example, dict):
                self.check(found, example, path)
            elif isinstance(example, Tensor):
                self.check_tensor(found, example, path)

    def check_tensor(self, saved: Any, like: Tensor, where: str) -> None:
        """``saved`` is a dense tensor of this shape that holds every one of its values, all of them finite floats."""
        shape = tuple(like.shape)
        if not isinstance(saved, Tensor) or tuple(saved.shape) != shape:
            found = tuple(saved.shape) if isinstance(saved, Tensor) else type(saved).__name__
            raise self.damaged(f"{where} is {found}, not a tensor of shape {shape}")
        # An expanded tensor repeats a few values, and optimizers write into every one.
        if saved.layout is not torch.strided or saved.untyped_storage().nbytes() < saved.numel() * saved.element_size():
            raise self.damaged(f"{where} does not hold every one of its values")
        if not saved.is_floating_point() or not bool(saved.float().isfinite().all()):
            raise self.damaged(f"{where} holds values that are NaN, infinite or no floats")

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Whatever goes wrong inside comes of a damaged file: pickles and archives raise errors of every kind.

        Raises:
            DamagedCheckpointError: names the file.
        """
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            why = f"{type(error).__name__}: {one_line(error, 300)}"
            raise DamagedCheckpointError(f"{self.path} cannot be read: {why}") from error


def check_fingerprint(own: Mapping[str, Any], saved: Any, folder: Path) -> None:
    """Raise ``CheckpointError`` naming the first difference between a run's fingerprint and one that was ``saved``."""
    file = CheckpointFile(folder / STATE_FILE)
    for part, here in own.items():
        if part == "parts" and part not in saved:
            warnings.warn(
                f"{folder} was written before checkpoints recorded text encoders, vocabularies, VAE and schedule: "
                "that these are the same is not checked",
                stacklevel=3,
            )
            continue
        if part == "rewards":
            _check_rewards(here, file.entry(saved, part, dict, "fingerprint") if part in saved else {}, folder)
            continue
        if part == "references":
            _check_references(here, file.entry(saved, part, str, "fingerprint") if part in saved else "", folder)
            continue
        there = file.entry(saved, part, type(here), "fingerprint")
        if isinstance(here, str):
            if there != here:
                raise CheckpointError(f"{folder} is a checkpoint of a {there}, this run trains a {here}")
            continue
        different = sorted(key for key in here.keys() | there.keys() if here.get(key) != there.get(key))
        if different:
            key = different[0]
            raise CheckpointError(
                f"{folder} is a checkpoint of another model: {part} {key} is {there.get(key)!r:.300} there "
                f"and {here.get(key)!r:.300} here. Use trainer.resume_mode=disable to start afresh"
            )


def _check_rewards(here: Mapping[str, str], there: Mapping[str, str], folder: Path) -> None:
    """Raise ``CheckpointError`` where a scorer of both runs has other weights, or the same in another dtype. A run may
    go on with other rewards."""
    for name in sorted(here.keys() & there.keys()):
        if here[name] != there[name]:
            raise CheckpointError(
                f"{folder} was trained with other weights or another dtype of the reward {name!r} "
                f"({there[name]!r:.300} there, {here[name]!r:.300} here). Give the same in reward.{name}'s settings, "
                "or use trainer.resume_mode=disable to start afresh"
            )


def _check_references(here: str, there: str, folder: Path) -> None:
    """Raise ``CheckpointError`` where the training prompts have other reference images; checkpoints that tell of none
    had none."""
    if here != there:
        raise CheckpointError(
            f"{folder} was trained with other reference images ({there or 'none'} there, {here or 'none'} here). Give "
            "the images of data.train_files as they were, or use trainer.resume_mode=disable to start afresh"
        )


class CheckpointStore:
    """The folder ``checkpoints/`` of a run: ``step_N/`` folders and the file ``latest`` with the newest's name.

    Args:
        root: the folder.
        keep: how many checkpoints to keep, the newest; ``None`` keeps all.
    """

    def __init__(self, root: Path, keep: int | None) -> None:
        self.root = root
        self._keep = keep
        self._pointer = root / "latest"

    def latest(self, say: Callable[[str], object] = lambda _text: None) -> Path | None:
        """The checkpoint that ``latest`` names; where it names one that is not complete, ``say`` is told so, and it is
        the newest complete one.

        Raises:
            CheckpointError: ``latest`` cannot be read.
        """
        name = self._name_in_pointer()
        newest = self.newest_complete()
        if name is None or newest is None:
            return newest
        if self.root / name in self.complete():
            return self.root / name
        say(f"{self._pointer} names {name}, which is no complete checkpoint; the newest complete one is {newest}")
        return newest

    def complete(self) -> list[Path]:
        """Complete checkpoints, oldest first. A folder of another name (a user's copy) is none of ours."""
        # The state is written last, so a folder that has it has everything.
        # ``os.path`` answers also where a folder may not be looked into.
        return [folder for folder in self._steps() if os.path.isfile(folder / STATE_FILE)]

    def newest_complete(self) -> Path | None:
        """The complete checkpoint of the largest step, whatever ``latest`` says."""
        return next(reversed(self.complete()), None)

    def set_aside_after(self, step: int, number: int | None = None) -> list[str]:
        """Move the checkpoints of later steps aside: a run resumed at ``step`` goes another way from there.

        Returns what was moved, in words.
        """
        later = [folder for folder, own in self._steps().items() if own > step]
        if not later:
            return []
        kept = [folder for folder in self.complete() if folder not in later]
        # First: a kill after it leaves no ``latest`` that leads to what lies aside.
        if kept:
            write_durably(self._pointer, kept[-1].name.encode())
        else:
            self._pointer.unlink(missing_ok=True)
        aside = self._folder_aside(number)
        for folder in later:
            os.replace(folder, aside / folder.name)
        sync_path(self.root)
        return [f"checkpoints/{', '.join(folder.name for folder in later)} to {aside.name}/"]

    def save(
        self, step: int, state: dict[str, Any], tensors: dict[str, Any], write_lora: Callable[[Path], object]
    ) -> Path:
        """Write ``step_N``; what was there before stays until the new one is complete, and is then moved aside.

        Args:
            step: the number in the folder's name.
            state: JSON-compatible: data position, fingerprint and the like.
            tensors: for ``torch.save``: optimizer, schedule, random states.
            write_lora: called with the folder; writes the adapter.

        Raises:
            CheckpointError: the disk is full or the folder cannot be written; earlier checkpoints are untouched.
        """
        final = self.root / f"step_{step}"
        try:
            for stale in (*self.root.glob(f".*{WRITING}"), *self.root.glob(f".*{_REMOVING}")):  # a kill left them
                shutil.rmtree(stale, ignore_errors=True)
            with temporary_folder(final) as temporary:
                write_lora(temporary)
                digests = {path.name: _digest(path) for path in sorted(temporary.iterdir()) if path.is_file()}
                torch.save(tensors, temporary / TENSOR_FILE)
                (temporary / STATE_FILE).write_text(json.dumps({**state, "digests": digests}, indent=1))
                give_umask_mode(temporary)
                for path in (*temporary.iterdir(), temporary):
                    sync_path(path)
                if final.exists():
                    os.replace(final, self._folder_aside() / final.name)
                os.replace(temporary, final)
            # Last: a kill before it leaves ``latest`` at the checkpoint before this one.
            write_durably(self._pointer, final.name.encode())
        except Exception as error:
            if not _is_write_failure(error):
                raise
            why = "the disk is full" if _is_full(self.root, error) else f"writing failed ({one_line(error, 300)})"
            raise CheckpointError(
                f"cannot save {final}: {why}. The newest complete checkpoint is {self.newest_complete() or 'none'}; "
                "free some space (trainer.max_actor_ckpt_to_keep limits what is kept) and start again to resume from it"
            ) from error
        self._prune()
        return final

    def load(self, folder: Path, fingerprint: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """``(state, tensors)`` of a checkpoint, every file of it read whole.

        Raises:
            DamagedCheckpointError: not a checkpoint, or a file of it is unreadable.
            CheckpointError: of another model.
        """
        file = CheckpointFile(folder / STATE_FILE)
        if not os.path.isfile(file.path):
            raise DamagedCheckpointError(f"{folder} holds no {STATE_FILE}, so it is not a complete checkpoint")
        with file.reading():
            state = json.loads(file.path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
        step = file.entry(state, "step", int)
        numbered = step_of(folder)
        if step < 0:
            raise file.damaged(f"its step is {step}")
        if numbered is not None and step != numbered:
            raise file.damaged(f"its step is {step}, its folder's {numbered}")
        check_fingerprint(fingerprint, file.entry(state, "fingerprint", dict), folder)
        # Checkpoints of the first versions have no digests.
        digests = file.entry(state, "digests", dict) if "digests" in state else {}
        for name, digest in digests.items():
            part = CheckpointFile(folder / name)
            with part.reading():
                unchanged = _digest(part.path) == digest
            if not unchanged:
                raise part.damaged("it is not what was saved (its digest differs)")
        file = CheckpointFile(folder / TENSOR_FILE)
        with file.reading():
            with zipfile.ZipFile(file.path) as archive:  # torch does not look at the checksums
                broken = archive.testzip()
            if broken is not None:
                raise ValueError(f"the checksum of {broken} differs")
            tensors = torch.load(file.path, map_location="cpu", weights_only=True)
        if not isinstance(tensors, dict):
            raise file.damaged(f"it holds a {type(tensors).__name__}, not a mapping")
        return state, tensors

    def _steps(self) -> dict[Path, int]:
        """The folders ``step_N``, complete or not, and their numbers, oldest first."""
        numbers = {folder: step_of(folder) for folder in self.root.glob("step_*")}
        return dict(sorted(((f, n) for f, n in numbers.items() if n is not None), key=lambda item: item[1]))

    def _name_in_pointer(self) -> str | None:
        """What ``latest`` says; ``None`` where there is none, or an empty one."""
        try:
            name = self._pointer.read_bytes()[:200].decode("utf-8-sig").strip()
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            why = one_line(error, 300)
        else:
            if not name or _FOLDER.fullmatch(name):
                return name or None
            why = f"it says {name!r}"
        newest = self.newest_complete()
        follows = f"go on from the newest complete checkpoint, {newest}"
        if newest is None:
            follows = "begin at step 0 (there is no complete checkpoint)"
        raise CheckpointError(
            f"{self._pointer} names no checkpoint ({why}); write step_N into it, or remove it to {follows}"
        )

    def _folder_aside(self, number: int | None = None) -> Path:
        """The folder ``checkpoints.N/``, made where it is missing, for what is moved aside."""
        number = RunFolder(self.root.parent).next_number() if number is None else number
        aside = self.root.with_name(f"{self.root.name}.{number}")
        aside.mkdir(parents=True, exist_ok=True)
        return aside

    def _prune(self) -> None:
        for old in self.complete()[: -self._keep] if self._keep else []:
            doomed = old.with_name(f".{old.name}{_REMOVING}")
            with suppress(OSError):
                os.replace(old, doomed)
                shutil.rmtree(doomed, ignore_errors=True)


def step_of(folder: Path) -> int | None:
    """The number of a folder ``step_N``; ``None`` for any other name."""
    match = _FOLDER.fullmatch(folder.name)
    return None if match is None else int(match[1])


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _refuse_constant(name: str) -> None:
    """JSON has no NaN and no infinity, and no run writes them; Python's reader would take them."""
    raise ValueError(f"it holds {name}")


def _is_write_failure(error: BaseException) -> bool:
    """torch and safetensors wrap the system's write error in types of their own; only its text survives."""
    text = f"{error} {error.__context__}"
    return isinstance(error, OSError) or "os error" in text or "iostream error" in text


def _is_full(folder: Path, error: BaseException) -> bool:
    if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error):
        return True
    with suppress(OSError):
        return shutil.disk_usage(folder).free < 1 << 20
    return False
