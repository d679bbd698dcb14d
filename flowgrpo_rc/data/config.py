"""The section ``data`` of a configuration: prompt files and batch sizes. Names follow verl."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from flowgrpo_rc.field_docs import documented_fields
from flowgrpo_rc.section import Check, Section, complaints, plain

_Count = Annotated[int, Check(lambda number: number >= 1, "it must be 1 or more")]


@documented_fields
@dataclass(kw_only=True, slots=True)
class DataConfig(Section):
    """Prompt files and the number of prompts per step."""

    section = "data"

    train_files: Any = ""
    """Path of the file of training prompts (.txt, .jsonl or .parquet), or a list of paths."""
    preferences: Any = ""
    """Path of a file of preferences (.jsonl or .parquet with the columns of a prompt file, ``chosen`` and
    ``rejected``, an image each), or a list of paths. ``loss_mode=dpo`` then learns from these pairs in place of images
    that it draws, and ``train_files`` is not read."""
    val_files: Any = ""
    """Path of the file of held-out prompts for validation, or a list of paths. Without one there is no validation."""
    train_batch_size: _Count = 8
    """Number of prompts per step, over all processes; each is sampled ``actor_rollout_ref.rollout.n`` times."""
    train_max_samples: _Count | None = None
    """Largest number of training prompts that are used, the first ones; null for all."""
    val_max_samples: _Count | None = None
    """Largest number of validation prompts that are used, the first ones; null for all."""
    prompt_key: Annotated[str, Check(bool, "name the column that holds the prompt")] = "prompt"
    """Column (parquet) or key (jsonl) of the prompt: a string, or chat messages whose last one of the user counts."""
    shuffle: bool = True
    """Visit the training prompts in a new random order every epoch."""
    seed: Annotated[int, Check(lambda seed: seed >= 0, "it must be 0 or more")] = 42
    """Seed of the random order in which the training prompts are visited."""

    def problems(self) -> Iterator[str]:
        """Files that are not named by paths."""
        for name in ("train_files", "preferences", "val_files"):
            yield from complaints(file_list, name, getattr(self, name))


def file_list(field_name: str, files: str | Sequence[str] | None) -> list[str]:
    """``files``, one path or several, as a list; empty when it is None or an empty string or sequence. Raises
    ``ValueError`` for anything but a string or a sequence of strings, and for a NUL character."""
    # YAML's null and an empty override both mean no file.
    if files is None or files == "":
        return []
    # A path object is no sequence, and text is one of characters.
    several = [files] if isinstance(files, str | os.PathLike) else files
    paths: list[Any] = [plain(file) for file in several] if isinstance(several, Sequence) else [None]
    # ``open`` would raise an error without the field's name where a path holds a NUL character.
    if not all(isinstance(path, str) and path and "\0" not in path for path in paths):
        raise ValueError(f"{field_name}: got {files!r}; give a path or a list of paths")
    return paths
