"""Checkpoints: written under a temporary name, renamed when complete, found again through ``latest``."""

import errno
import json
import os
import pickle
import random
import shutil
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

STATE_FILE, TENSOR_FILE = "trainer_state.json", "optimizer.pt"


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, or is not one this run can continue from."""


@dataclass(frozen=True)
class Fingerprint:
    """What must agree between a checkpoint and the run that continues it."""

    pipeline: str
    transformer: dict[str, Any]
    lora: dict[str, Any]
    parts: dict[str, Any] = field(default_factory=dict)
    """What else shapes the samples: text encoders, vocabularies, VAE, schedule."""

    def check(self, saved: dict[str, Any], folder: Path) -> None:
        """Raise ``CheckpointError`` naming the first difference to ``saved``."""
        if saved["pipeline"] != self.pipeline:
            raise CheckpointError(
                f"{folder} is a checkpoint of a {saved['pipeline']}, this run trains a {self.pipeline}"
            )
        compared = [("transformer", self.transformer), ("lora", self.lora), ("parts", self.parts)]
        if "parts" not in saved:
            compared.pop()
            warnings.warn(
                f"{folder} was written before checkpoints recorded text encoders, vocabularies, VAE and schedule: that "
                "these are the same is not checked",
                stacklevel=3,
            )
        for part, own in compared:
            names = own.keys() | saved[part].keys()
            different = sorted(k for k in names if own.get(k) != saved[part].get(k))
            if different:
                key = different[0]
                raise CheckpointError(
                    f"{folder} is a checkpoint of another model: {part} {key} is {saved[part].get(key)!r} there and "
                    f"{own.get(key)!r} here. Use trainer.resume_mode=disable to start afresh"
                )


class CheckpointStore:
    """The folder ``checkpoints/`` of a run: ``step_N/`` folders and the file ``latest`` with the newest's name."""

    def __init__(self, root: Path, keep: int | None) -> None:
        self.root, self._keep = root, keep

    def latest(self) -> Path | None:
        """The newest complete checkpoint, or ``None``."""
        pointer, complete = self.root / "latest", self._complete()
        named = self.root / pointer.read_text().strip() if pointer.is_file() else None
        return named if named in complete else (complete[-1] if complete else None)

    def forget_after(self, step: int) -> None:
        """Remove the checkpoints of later steps: a run resumed at ``step`` goes another way from there."""
        for folder in self._complete():
            if _step_of(folder) > step:
                shutil.rmtree(folder)
        kept = self._complete()
        if kept:
            _write_atomically(self.root / "latest", kept[-1].name)
        else:
            (self.root / "latest").unlink(missing_ok=True)

    def _complete(self) -> list[Path]:
        """Complete checkpoints, oldest first. A folder of another name (a user's copy) is none of ours."""
        folders = [p for p in self.root.glob("step_*") if p.name[5:].isdigit() and (p / STATE_FILE).is_file()]
        return sorted(folders, key=_step_of)

    def save(self, step: int, state: dict[str, Any], tensors: dict[str, Any], write_lora: Any) -> Path:
        """Write ``step_N``; what was there before stays until the new one is complete.

        Args:
            step: the number in the folder's name.
            state: JSON-compatible: data position, fingerprint and the like.
            tensors: for ``torch.save``: optimizer, schedule, random states.
            write_lora: called with the folder; writes the adapter.

        Raises:
            CheckpointError: the disk is full or the folder cannot be written; earlier checkpoints are untouched.
        """
        final, temporary = self.root / f"step_{step}", self.root / f".step_{step}.writing"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            for stale in self.root.glob(".*.writing"):
                shutil.rmtree(stale, ignore_errors=True)
            temporary.mkdir()
            write_lora(temporary)
            torch.save(tensors, temporary / TENSOR_FILE)
            (temporary / STATE_FILE).write_text(json.dumps(state, indent=1))
            _sync_folder(temporary)
            if final.exists():
                shutil.rmtree(final)
            os.replace(temporary, final)
            _write_atomically(self.root / "latest", final.name)
        except Exception as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if not _is_write_failure(error):
                raise
            reason = "the disk is full" if _is_full(self.root, error) else f"writing failed ({error})"
            raise CheckpointError(
                f"cannot save {final}: {reason}. The newest complete checkpoint is {self.latest() or 'none'}; free "
                "some space (trainer.max_actor_ckpt_to_keep limits what is kept) and start again to resume from it"
            ) from error
        self._prune()
        return final

    def load(self, folder: Path, fingerprint: Fingerprint) -> tuple[dict[str, Any], dict[str, Any]]:
        """``(state, tensors)`` of a checkpoint.

        Raises:
            CheckpointError: not a checkpoint, unreadable, or of another model.
        """
        if not (folder / STATE_FILE).is_file():
            raise CheckpointError(f"{folder} holds no {STATE_FILE}, so it is not a complete checkpoint")
        try:
            state = json.loads((folder / STATE_FILE).read_text())
            fingerprint.check(state["fingerprint"], folder)
            return state, torch.load(folder / TENSOR_FILE, map_location="cpu", weights_only=True)
        except (OSError, KeyError, EOFError, RuntimeError, pickle.UnpicklingError, json.JSONDecodeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{folder} cannot be read: {type(error).__name__}: {error}") from error

    def _prune(self) -> None:
        for old in self._complete()[: -self._keep] if self._keep else []:
            shutil.rmtree(old, ignore_errors=True)


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


def _step_of(folder: Path) -> int:
    return int(folder.name[5:])


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".writing")
    temporary.write_text(text)
    os.replace(temporary, path)


def _sync_folder(folder: Path) -> None:
    """Have the files' bytes on the disk before the rename, so that a power cut cannot leave an empty checkpoint."""
    for file in folder.iterdir():
        with file.open("rb") as handle:
            os.fsync(handle.fileno())


def _is_write_failure(error: BaseException) -> bool:
    """torch and safetensors wrap the system's write error in types of their own; only its text survives."""
    text = f"{error} {error.__context__}"
    return isinstance(error, OSError) or "os error" in text or "iostream error" in text


def _is_full(folder: Path, error: BaseException) -> bool:
    return (
        getattr(error, "errno", None) == errno.ENOSPC
        or "No space left" in str(error)
        or shutil.disk_usage(folder).free < 1 << 20
    )
