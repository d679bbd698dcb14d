"""Prompt sets: text, JSON-lines and parquet files read into `PromptRecord`s."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

SUFFIXES = (".txt", ".jsonl", ".parquet")
NEGATIVE_KEY = "negative_prompt"


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
        ValueError: a file is missing, empty, of an unknown format or not what its name says, or a row has no
            usable prompt. The message names the file and the line.
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
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path}: unknown format {path.suffix!r}; prompt files end in {', '.join(SUFFIXES)}")
    if not path.is_file():
        raise ValueError(f"{path} does not exist or is not a file; check the path of the prompt file")
    if path.suffix == ".parquet":
        return _read_parquet(path, prompt_key)
    if path.suffix == ".jsonl":
        return [_record(row, prompt_key, f"{path}:{number}") for number, row in _json_rows(path)]
    return [PromptRecord(prompt=line, source=f"{path}:{number}") for number, line in _lines(path)]


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The non-blank lines, stripped, with their numbers from 1."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}); save it as UTF-8") from error
    # Only line feeds end a line: str.splitlines would also break at separators inside a prompt.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, line.strip()


def _json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in _lines(path):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number} is not JSON ({error}); write one object a line") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}:{number} is a JSON {type(row).__name__}; write one object a line")
        yield number, row


def _read_parquet(path: Path, prompt_key: str) -> list[PromptRecord]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} is not a parquet file ({error})") from error
    if prompt_key not in table.column_names:
        raise _missing(str(path), prompt_key, table.column_names)
    return [_record(row, prompt_key, f"{path}:{number}") for number, row in enumerate(table.to_pylist(), start=1)]


def _record(row: Mapping[str, Any], prompt_key: str, source: str) -> PromptRecord:
    if prompt_key not in row:
        raise _missing(source, prompt_key, list(row))
    prompt = _text(row[prompt_key], prompt_key, source)
    if not prompt.strip():
        raise ValueError(f"{source}: {prompt_key!r} is blank; write a prompt or remove the row")
    negative = row.get(NEGATIVE_KEY)
    return PromptRecord(
        prompt=prompt,
        negative_prompt=None if negative is None else _text(negative, NEGATIVE_KEY, source),
        metadata={key: value for key, value in row.items() if key not in (prompt_key, NEGATIVE_KEY)},
        source=source,
    )


def _text(value: Any, key: str, source: str) -> str:
    """A plain string, or what the user says last in a list of chat messages."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError(
            f"{source}: {key!r} is a {type(value).__name__}; it must be a string or a list of chat messages"
        )
    contents = [m.get("content") for m in value if isinstance(m, dict) and m.get("role") == "user"]
    if not contents or not isinstance(contents[-1], str):
        raise ValueError(
            f"{source}: {key!r} is a list without a user's text; its last message of role 'user' must have a "
            "string as its content"
        )
    return contents[-1]


def _missing(where: str, prompt_key: str, columns: Sequence[str]) -> ValueError:
    return ValueError(
        f"{where} has no column {prompt_key!r}; it has {', '.join(columns) or 'none'}. Set data.prompt_key "
        "to the one that holds the prompt"
    )
