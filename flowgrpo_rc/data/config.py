"""What the `data` section of a configuration may hold. Names follow verl."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flowgrpo_rc.checks import fit_fields, plain
from flowgrpo_rc.field_docs import documented_fields


@documented_fields
@dataclass(kw_only=True, slots=True)
class DataConfig:
    """Where the prompts come from and how many make a step."""

    train_files: Any = ""
    """Training prompts: path of a .txt, .jsonl or .parquet file, or a list of paths."""

    val_files: Any = ""
    """Held-out prompts for validation, in the same formats. Empty: no validation."""

    train_batch_size: int = 8
    """Prompts per step, over all processes; each is sampled `actor_rollout_ref.rollout.n` times."""

    train_max_samples: int | None = None
    """Use at most this many training prompts, the first ones. None: all."""

    val_max_samples: int | None = None
    """Use at most this many validation prompts, the first ones. None: all."""

    prompt_key: str = "prompt"
    """Column (parquet) or key (jsonl) of the prompt: a string, or chat messages (the user's last counts)."""

    shuffle: bool = True
    """Visit the training prompts in a new random order every epoch."""

    seed: int = 42
    """Seed of that order."""

    def __post_init__(self) -> None:
        fit_fields("data", self)
        file_list("data.train_files", self.train_files)
        file_list("data.val_files", self.val_files)
        for name in ("train_batch_size", "train_max_samples", "val_max_samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"data.{name}: got {value}; it must be 1 or more")
        if not self.prompt_key:
            raise ValueError("data.prompt_key: got ''; name the column that holds the prompt")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"data.seed: got {self.seed}; it must be 0 or more and below 2**63")


def file_list(field_name: str, files: str | Sequence[str] | None) -> list[str]:
    """`files`, one path or several, as a list; empty when it is None or an empty string or sequence.

    Raises:
        ValueError: `files` is neither a string nor a sequence of strings, or one holds a NUL character.
    """
    if files is None:
        return []
    files = plain(files)
    if isinstance(files, str):
        paths = [files] if files else []
    elif isinstance(files, Sequence) and all(isinstance(plain(file), str) and file for file in files):
        paths = [plain(file) for file in files]
    else:
        raise ValueError(f"{field_name}: got {files!r}; give a path or a list of paths")
    if any("\0" in path for path in paths):
        raise ValueError(f"{field_name}: got {files!r}; a path cannot hold a NUL character")
    return paths
