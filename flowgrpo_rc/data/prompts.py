"""Prompt sets: text, JSON-lines and parquet files read into `PromptRecord`s."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from flowgrpo_rc.data.text import fault_of, is_blank, parse_row, undecodable
from flowgrpo_rc.paths import LFS_POINTER

SUFFIXES = (".txt", ".jsonl", ".parquet")
NEGATIVE_KEY = "negative_prompt"
COLUMNS_NAMED = 20
"""How many columns a message lists at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptRecord:
    """One prompt of a data set."""

    prompt: str
    """What to draw."""

    negative_prompt: str | None = None
    """What to steer away from under classifier-free guidance; None when the data set says nothing."""

    metadata: dict[str, Any] = field(default_factory=dict)
    """The other columns of the row, for reward functions."""

    source: str = ""
    """Where it stands, for messages: `train.txt:3` is line 3, `train.parquet:3` is row 3, counted from 1."""


def load_prompts(
    files: str | PathLike[str] | Sequence[str | PathLike[str]],
    prompt_key: str = "prompt",
    max_samples: int | None = None,
) -> list[PromptRecord]:
    """The prompts of one or several files, in order.

    * `.txt`: a prompt a line.
    * `.jsonl`: an object a line. `.parquet`: a row a prompt. The prompt, and the optional `negative_prompt`,
      is a string or a list of chat messages `{"role", "content"}`, of which the user's last counts. The
      remaining columns become `metadata`.

    Blank lines are skipped in both text formats.

    Args:
        files: one path or several.
        prompt_key: column or key of the prompt; `.txt` files have none.
        max_samples: stop after this many prompts; None for all.

    Raises:
        ValueError: a file is missing, empty, damaged, of an unknown format or not what its name says, or a row has
            no usable prompt: none, a blank one, or one that no tokenizer takes. The message names the file and the
            line or row.
    """
    paths = [Path(files)] if isinstance(files, (str, PathLike)) else [Path(file) for file in files]
    if not paths:
        raise ValueError("no prompt file given; name at least one .txt, .jsonl or .parquet file")
    records: list[PromptRecord] = []
    for path in paths:
        read = _read_file(path, prompt_key)
        if not read:
            raise ValueError(f"{path} holds no prompts; give a file with at least one")
        records.extend(read)
        if max_samples is not None and len(records) >= max_samples:
            return records[:max_samples]
    return records


def _read_file(path: Path, prompt_key: str) -> list[PromptRecord]:
    if "\0" in str(path):
        raise ValueError(f"{str(path)!r} holds a NUL character, which no path can; check the path of the prompt file")
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"{path}: unknown format {path.suffix!r}; prompt files end in {', '.join(SUFFIXES)}")
    if os.path.isdir(path):
        raise ValueError(f"{path} is a folder; give the prompt files in it, one or a list of them")
    # os.path, as pathlib raises for paths that are too long; only a regular file is opened, as a pipe may never end.
    if not os.path.isfile(path):
        raise ValueError(f"{path} does not exist or is not a file; check the path of the prompt file")
    if suffix == ".parquet":
        from flowgrpo_rc.data.parquet import parquet_rows

        rows = parquet_rows(path, lambda columns: _check_columns(path, prompt_key, columns))
    elif suffix == ".jsonl":
        rows = _json_rows(path)
    else:
        return [_plain_record(line, f"{path}:{number}") for number, line in _lines(path)]
    return [_record(row, prompt_key, f"{path}:{number}") for number, row in rows]


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The non-blank lines, stripped, with their numbers from 1."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror or error}); check its permissions") from error
    if content.startswith(LFS_POINTER):  # three lines, which would be three prompts
        raise ValueError(f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull`")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{undecodable(path, content, error)}; save it as UTF-8") from error
    # Only line ends end a line: str.splitlines would also break at separators inside a prompt. A byte order mark
    # stands at the beginning, twice where an editor has added its own, and inside where files were put together.
    for number, line in enumerate(text.replace("\r\n", "\n").replace("\r", "\n").split("\n"), start=1):
        stripped = line.lstrip("\ufeff").strip()
        if stripped:
            yield number, stripped


def _json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in _lines(path):
        yield number, parse_row(line, f"{path}:{number}")


def _check_columns(path: Path, prompt_key: str, columns: Sequence[str]) -> None:
    if prompt_key not in columns:
        raise _missing(str(path), prompt_key, columns)


def _plain_record(line: str, source: str) -> PromptRecord:
    _check_prompt(line, "the prompt", source)
    return PromptRecord(prompt=line, source=source)


def _record(row: Mapping[str, Any], prompt_key: str, source: str) -> PromptRecord:
    if prompt_key not in row:
        raise _missing(source, prompt_key, list(row))
    prompt = _text(row[prompt_key], prompt_key, source)
    _check_prompt(prompt, repr(prompt_key), source)
    negative = row.get(NEGATIVE_KEY)
    return PromptRecord(
        prompt=prompt,
        negative_prompt=None if negative is None else _text(negative, NEGATIVE_KEY, source),
        metadata={key: value for key, value in row.items() if key not in (prompt_key, NEGATIVE_KEY)},
        source=source,
    )


def _check_prompt(prompt: str, name: str, source: str) -> None:
    _check_characters(prompt, name, source)
    if is_blank(prompt):
        raise ValueError(f"{source}: {name} is blank; write a prompt or remove the row")


def _check_characters(text: str, name: str, source: str) -> None:
    fault = fault_of(text)
    if fault is not None:
        raise ValueError(f"{source}: {name} holds {fault}; remove it, or save the file again from its source")


def _text(value: Any, key: str, source: str) -> str:
    """A plain string, or what the user says last in a list of chat messages."""
    if isinstance(value, str):
        _check_characters(value, repr(key), source)
        return value
    if not isinstance(value, list):
        raise ValueError(
            f"{source}: {key!r} is a {type(value).__name__}; it must be a string or a list of chat messages"
        )
    messages = [m for m in value if isinstance(m, dict)]
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            _check_characters(content, repr(key), source)
    contents = [m.get("content") for m in messages if m.get("role") == "user"]
    if not contents or not isinstance(contents[-1], str):
        raise ValueError(
            f"{source}: {key!r} is a list without a user's text; its last message of role 'user' must have a "
            "string as its content"
        )
    return contents[-1]


def _missing(where: str, prompt_key: str, columns: Sequence[str]) -> ValueError:
    named = ", ".join(columns[:COLUMNS_NAMED]) + (", ..." if len(columns) > COLUMNS_NAMED else "")
    return ValueError(
        f"{where} has no column {prompt_key!r}; it has {named or 'none'}. Set data.prompt_key to the one that holds "
        "the prompt"
    )
