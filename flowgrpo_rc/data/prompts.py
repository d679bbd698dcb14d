"""Prompt sets: text, JSON-lines and parquet files read into ``PromptRecord`` objects. To add a format, write a reader
and add a line to ``READERS``."""

import json
import os
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any

from flowgrpo_rc.data.config import file_list
from flowgrpo_rc.messages import one_line, reason
from flowgrpo_rc.paths import LFS_POINTER, resolve_asset
from flowgrpo_rc.prompt import ReferenceImage
from flowgrpo_rc.reference_files import IMAGES_KEY, ReferenceReader

NEGATIVE_KEY = "negative_prompt"
PAIR_KEYS = ("chosen", "rejected")
"""Columns of a preference: the better image of a prompt and the worse one."""
COLUMNS_NAMED = 20
"""Columns that a message lists at most."""
_INVISIBLE = {"Cc", "Cf", "Zs", "Zl", "Zp", "Mn", "Me"}
"""Unicode categories without a glyph of their own: controls, formats (zero-width characters), spaces, marks."""
# Tab and line ends are text; a NUL ends a string in some tokenizers, and an escape code would reach the terminal.
# Half of a surrogate pair, as of an emoji that was cut, is no text at all.
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptRecord:
    """One prompt of a data set."""

    prompt: str
    """Text of the image."""
    negative_prompt: str | None = None
    """Negative prompt of classifier-free guidance; None if the data set has none."""
    images: tuple[ReferenceImage, ...] = ()
    """Reference images, for the families that take them."""
    pair: tuple[ReferenceImage, ...] = ()
    """Of a preference the chosen and the rejected image; else empty."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """The other columns of the row, for reward functions, and ``images`` where there are any."""
    source: str = ""
    """Place in the file, for messages: ``train.txt:3`` is line 3, ``train.parquet:3`` is row 3, counted from 1."""


def read_prompt_files(
    files: Any, prompt_key: str, max_samples: int | None, *, pairs: bool = False
) -> list[PromptRecord]:
    """The prompts of the files of a setting, which may be assets; none without files. Raises as ``load_prompts``."""
    paths = [resolve_asset(path) for path in file_list("data", files)]
    return load_prompts(paths, prompt_key=prompt_key, max_samples=max_samples, pairs=pairs) if paths else []


def load_prompts(
    files: str | PathLike[str] | Sequence[str | PathLike[str]],
    prompt_key: str = "prompt",
    max_samples: int | None = None,
    *,
    pairs: bool = False,
) -> list[PromptRecord]:
    """The prompts of one or several files, in order.

    * ``.txt``: a prompt a line.
    * ``.jsonl``: an object a line. ``.parquet``: a row a prompt. The prompt, and the optional ``negative_prompt``,
      is a string or a list of chat messages ``{"role", "content"}``, whose last message of the user counts. The
      optional ``images`` is a path, relative to the prompt file, or a list of paths; in parquet also a file's bytes
      or ``{"bytes", "path"}``. The remaining columns become ``metadata``.

    Blank lines are skipped in both text formats.

    Args:
        files: one path or several.
        prompt_key: column or key of the prompt; ``.txt`` files have none.
        max_samples: stop after this many prompts; None for all.
        pairs: the rows are preferences, with an image each in the columns ``chosen`` and ``rejected``.

    Raises:
        ValueError: a file is missing, empty, damaged or of another format, or a row has no usable prompt (none, a
            blank one, or one with control characters) or an unusable image, or of a pair no image or twice the same.
            The message names the file and the line or row.
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
        # Later files may be large and are not needed.
        if max_samples is not None and len(records) >= max_samples:
            break
    # Images last: an error in a prompt shows before thousands of files are opened.
    images = ReferenceReader()
    records = [_with_images(record, images) for record in records[:max_samples]]
    return [_with_pair(record, images) for record in records] if pairs else records


def _with_images(record: PromptRecord, read: ReferenceReader) -> PromptRecord:
    """The record with the references that its column ``images`` names."""
    if IMAGES_KEY not in record.metadata:
        return record
    metadata = dict(record.metadata)
    images = read(metadata.pop(IMAGES_KEY), record.source)
    if images:
        metadata[IMAGES_KEY] = list(images)
    return replace(record, images=images, metadata=metadata)


def _with_pair(record: PromptRecord, read: ReferenceReader) -> PromptRecord:
    """The record of a preference with its two images."""
    metadata = dict(record.metadata)
    pair: list[ReferenceImage] = []
    for key in PAIR_KEYS:
        images = read(metadata.pop(key, None), record.source, key)
        if len(images) != 1:
            raise ValueError(
                f"{record.source}: {key!r} names {len(images)} images; a preference has one each in the columns "
                f"{' and '.join(PAIR_KEYS)}"
            )
        pair += images
    if pair[0] == pair[1]:
        raise ValueError(f"{record.source}: chosen and rejected are the same image; remove the row")
    return replace(record, pair=tuple(pair), metadata=metadata)


def _read_file(path: Path, prompt_key: str) -> list[PromptRecord]:
    read = READERS.get(path.suffix.lower())
    if read is None:
        raise ValueError(f"{path}: unknown format {path.suffix!r}; prompt files end in {', '.join(READERS)}")
    if os.path.isdir(path):
        raise ValueError(f"{path} is a folder; give the prompt files in it, one or a list of them")
    # Only a regular file is opened: a pipe may never end.
    if not os.path.isfile(path):
        raise ValueError(f"{path} does not exist or is not a file; check the path of the prompt file")
    return list(read(path, prompt_key))


def _text_records(path: Path, prompt_key: str) -> Iterator[PromptRecord]:
    return (PromptRecord(prompt=_prompt(line, "the prompt", source), source=source) for source, line in _lines(path))


def _json_records(path: Path, prompt_key: str) -> Iterator[PromptRecord]:
    return (row_record(row, prompt_key, source) for source, row in json_rows(path))


def json_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a file of JSON lines, each with its place; a line that is none raises ``ValueError``."""
    for source, line in _lines(path):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{source} is not JSON ({one_line(error, 120)}); write one object a line") from error
        if not isinstance(row, dict):
            raise ValueError(f"{source} is a JSON {type(row).__name__}; write one object a line")
        yield source, row


def _parquet_records(path: Path, prompt_key: str) -> Iterator[PromptRecord]:
    import pyarrow
    import pyarrow.parquet

    # The place of the damage decides pyarrow's error: its own classes, an OSError, or a decoder's error.
    damage = (pyarrow.ArrowException, OSError, EOFError, ValueError, OverflowError, MemoryError)
    try:
        # ``read_table`` would also take columns from the names of the folders above.
        file = pyarrow.parquet.ParquetFile(path, page_checksum_verification=True)
    except damage as error:
        raise ValueError(f"{path} is not a parquet file ({one_line(error, 200)}); write or copy it again") from error
    with file:
        # Before any row is read, so that a large file is refused at once.
        _check_has(prompt_key, file.schema_arrow.names, str(path))
        first = 1
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            try:
                table = file.read_row_group(group)
                table.validate(full=True)
                # pandas writes times in nanoseconds, which Python's times cannot hold.
                for i, column in enumerate(table.schema):
                    if pyarrow.types.is_timestamp(column.type):
                        coarser = table.column(i).cast(pyarrow.timestamp("us", column.type.tz), safe=False)
                        table = table.set_column(i, column.name, coarser)
                found = table.to_pylist()
            except damage as error:
                raise ValueError(
                    f"{path} is damaged in rows {first} to {first + rows - 1} ({one_line(error, 200)}); copy it again"
                ) from error
            for number, row in enumerate(found, start=first):
                yield row_record(row, prompt_key, f"{path}:{number}")
            first += rows


READERS: dict[str, Callable[[Path, str], Iterator[PromptRecord]]] = {
    ".txt": _text_records,
    ".jsonl": _json_records,
    ".parquet": _parquet_records,
}
"""Ending of a file's name -> reader of its prompts, given the path and the column that holds the prompt."""


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, with ``\\n`` as line ends; a file that is none raises ``ValueError``."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({reason(error)}); check its permissions") from error
    if content.startswith(LFS_POINTER):  # three lines, which would be three prompts
        raise ValueError(f"{path} is a Git LFS pointer, not the file itself; run ``git lfs pull``")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        found = f"(line {line}, byte 0x{content[error.start]:02x}: {error.reason})"
        if content.startswith((b"\xff\xfe", b"\xfe\xff")):
            found = "but UTF-16"
        raise ValueError(f"{path} is not UTF-8 text {found}; save it as UTF-8") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Each non-blank line, stripped, with its place: ``train.txt:3``."""
    # str.splitlines would also break at separators inside a prompt. A byte order mark can stand inside a file, where
    # several were put together.
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        stripped = line.lstrip("\ufeff").strip()
        if stripped:
            yield f"{path}:{number}", stripped


def row_record(row: Mapping[str, Any], prompt_key: str, source: str) -> PromptRecord:
    """A row of a prompt file, checked; ``source`` names its place in a ``ValueError``."""
    _check_has(prompt_key, list(row), source)
    negative = row.get(NEGATIVE_KEY)
    return PromptRecord(
        prompt=_prompt(row[prompt_key], repr(prompt_key), source),
        negative_prompt=None if negative is None else _text(negative, repr(NEGATIVE_KEY), source),
        metadata={key: value for key, value in row.items() if key not in (prompt_key, NEGATIVE_KEY)},
        source=source,
    )


def _prompt(value: Any, name: str, source: str) -> str:
    text = _text(value, name, source)
    # A blank prompt has nothing that a reward could check.
    if all(unicodedata.category(character) in _INVISIBLE for character in text):
        raise ValueError(f"{source}: {name} is blank; write a prompt or remove the row")
    return text


def _text(value: Any, name: str, source: str) -> str:
    """A string, or the user's last message in a list of chat messages, without control characters."""
    if not isinstance(value, str | list):
        raise ValueError(
            f"{source}: {name} is a {type(value).__name__}; it must be a string or a list of chat messages"
        )
    text: Any = value
    if isinstance(value, list):
        contents = [one.get("content") for one in value if isinstance(one, dict) and one.get("role") == "user"]
        text = contents[-1] if contents else None
        # Content of several parts (text and image) belongs into the column ``images``.
        if not isinstance(text, str):
            raise ValueError(
                f"{source}: {name} is a list without a user's text; its last message of role 'user' must have a "
                "string as its content"
            )
    found = _CONTROL.search(text)
    if found is not None:
        kind = "control character" if found.group() < "\x80" else "half character"
        raise ValueError(
            f"{source}: {name} holds the {kind} U+{ord(found.group()):04X} at character "
            f"{found.start() + 1}; remove it, or save the file again from its source"
        )
    return text


def _check_has(prompt_key: str, columns: Sequence[str], where: str) -> None:
    if prompt_key not in columns:
        named = ", ".join(columns[:COLUMNS_NAMED]) + (", ..." if len(columns) > COLUMNS_NAMED else "")
        raise ValueError(
            f"{where} has no column {prompt_key!r}; it has {named or 'none'}. Set data.prompt_key to the one that "
            "holds the prompt"
        )
