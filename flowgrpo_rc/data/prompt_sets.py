"""Prompt sets of benchmarks, read from the user's copy of their repositories. To add one, add a line to
``PROMPT_SETS``.

The files written are JSON lines, since a scorer must find a row as its repository has it. Parquet would give every
object the keys of all others, and GenEval's scorer checks the colour of each object that has the key ``color``.
"""

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from flowgrpo_rc.data.prepare import PreparedFile, make_output
from flowgrpo_rc.data.prompts import json_rows, read_text, row_record

Row = tuple[str, dict[str, Any]]
"""A row's place in its file, for messages, and its columns."""


def table_rows(path: Path) -> Iterator[Row]:
    """The rows of a table with a header, separated by tabs or by commas; column names in lower case."""
    text = read_text(path)
    # Only comma-separated tables quote: a prompt of PartiPrompts begins with a quotation mark.
    tabs = "\t" in text.partition("\n")[0]
    dialect: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if tabs else {"strict": True}
    reader = csv.reader((line + "\n" for line in text.split("\n")), **dialect)
    header: list[str] = []
    first = 1
    try:
        for cells in reader:
            source = f"{path}:{first}"
            first = reader.line_num + 1
            if not any(cell.strip() for cell in cells):
                continue
            if not header:
                header = [cell.strip().lower() for cell in cells]
            elif len(cells) != len(header):
                raise ValueError(f"{source} has {len(cells)} cells, and the header {len(header)}")
            else:
                yield source, dict(zip(header, map(str.strip, cells), strict=True))
    except csv.Error as error:
        raise ValueError(f"{path}:{first} cannot be read as a table ({error})") from error


def drawbench_rows(path: Path) -> Iterator[Row]:
    """The sheet's column is ``Prompts``; that of some copies is ``Prompt``."""
    for source, row in table_rows(path):
        yield source, {"prompt" if key == "prompts" else key: value for key, value in row.items()}


def dpg_rows(path: Path) -> Iterator[Row]:
    """A row for each prompt, with its questions: the table has a row for each question."""
    items: dict[str, Row] = {}
    for source, row in table_rows(path):
        _check(row, dict.fromkeys(DPG_COLUMNS, str), source)
        question: dict[str, Any] = {key: row[key] for key in DPG_COLUMNS[2:]}
        for key in ("proposition_id", "dependency"):
            try:
                numbers = [int(part) for part in row[key].split(",")]
            except ValueError:
                raise ValueError(f"{source}: {key} is {row[key]!r}, where a number is expected") from None
            question[key] = numbers if key == "dependency" else numbers[0]
        item = {"prompt": row["text"], "item_id": row["item_id"], "questions": []}
        items.setdefault(row["item_id"], (source, item))[1]["questions"].append(question)
    yield from items.values()


DPG_COLUMNS = (
    *("item_id", "text", "proposition_id", "dependency"),
    *("category_broad", "category_detailed", "tuple", "question_natural_language"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSet:
    """Location and reading of a prompt set."""

    files: Mapping[str, str]
    """Pattern of a file's name in lower case -> ``train`` or ``test``."""
    columns: Mapping[str, type]
    """Columns of the written rows, without which they cannot be scored, and their types."""
    read: Callable[[Path], Iterator[Row]]
    expected: str
    """The form of the file, for messages."""
    place: str
    """The file's location, for messages."""


PROMPT_SETS = {
    "geneval": PromptSet(
        files={"evaluation_metadata.jsonl": "test", "train_metadata.jsonl": "train", "test_metadata.jsonl": "test"},
        columns={"prompt": str, "tag": str, "include": list},
        read=json_rows,
        expected="JSON lines with prompt, tag and include",
        place="prompts/evaluation_metadata.jsonl of github.com/djghosh13/geneval or dataset/geneval of "
        "github.com/yifan123/flow_grpo",
    ),
    "geneval2": PromptSet(
        files={"geneval2_data.jsonl": "test"},
        columns={"prompt": str, "atom_count": int, "vqa_list": list, "skills": list},
        read=json_rows,
        expected="JSON lines with prompt, atom_count, vqa_list and skills",
        place="geneval2_data.jsonl of github.com/facebookresearch/GenEval2",
    ),
    "drawbench": PromptSet(
        files={"drawbench*.csv": "test", "drawbench*.tsv": "test"},
        columns={"prompt": str, "category": str},
        read=drawbench_rows,
        expected="a table with the header Prompts,Category",
        place="the sheet that imagen.research.google links, saved as DrawBench.csv",
    ),
    "partiprompts": PromptSet(
        files={"partiprompts.tsv": "test"},
        columns={"prompt": str, "category": str, "challenge": str},
        read=table_rows,
        expected="a table with the columns Prompt, Category, Challenge and Note, separated by tabs",
        place="PartiPrompts.tsv of github.com/google-research/parti",
    ),
    "dpg": PromptSet(
        files={"dpg_bench.csv": "test"},
        columns={"prompt": str, "item_id": str, "questions": list},
        read=dpg_rows,
        expected="a table with a question a row and the columns " + ", ".join(DPG_COLUMNS),
        place="dpg_bench/dpg_bench.csv of github.com/TencentQQGYLab/ELLA",
    ),
}
"""Name of ``flowgrpo-rc prepare-data`` -> its prompt set."""


def prepare_prompts(name: str, source: str | PathLike[str], output_dir: str | PathLike[str]) -> list[PreparedFile]:
    """Turn a prompt set into ``train.jsonl`` or ``test.jsonl``, with the columns that its scorer reads.

    All rows are checked before anything is written.

    Args:
        name: a key of ``PROMPT_SETS``.
        source: the set's file, or a folder that holds it, at most three folders deep.
        output_dir: created when missing; existing files are replaced.

    Raises:
        ValueError: there is no such file or several, or it has another form; names file and line, the form expected
            and where the file is found. Or ``output_dir`` cannot be made.
    """
    # serve-reward imports this package and runs where filelock is not installed.
    from flowgrpo_rc.run_folder import write_whole

    form = PROMPT_SETS[name]
    splits: dict[str, list[dict[str, Any]]] = {}
    try:
        for split, path in _find(form, Path(source)).items():
            splits[split] = _rows(form, path)
    except ValueError as error:
        raise ValueError(f"{error}; {name} is {form.expected}: {form.place}") from error
    make_output(output_dir)
    written: list[PreparedFile] = []
    for split, rows in splits.items():
        path = Path(output_dir) / f"{split}.jsonl"
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_whole(path, partial(Path.write_text, data=text, encoding="utf-8"))
        written.append(PreparedFile(path=path, split=split, num_prompts=len(rows)))
    return written


def _find(form: PromptSet, source: Path) -> dict[str, Path]:
    """Each split's file."""
    if source.is_file():
        candidates = [source]
    else:
        # Not the whole tree, which may be a home folder.
        candidates = [path for depth in ("*", "*/*", "*/*/*", "*/*/*/*") for path in sorted(source.glob(depth))]
    found: dict[str, Path] = {}
    for path in candidates:
        splits = [split for pattern, split in form.files.items() if fnmatch(path.name.lower(), pattern)]
        if not splits and path != source:
            continue
        # A file that was named is taken by any name.
        split = splits[0] if splits else "test"
        if split in found:
            raise ValueError(f"{source} holds {found[split]} and {path}; give one of them")
        found[split] = path
    if not found:
        raise ValueError(f"{source} {'holds no ' + ' or '.join(form.files) if source.is_dir() else 'does not exist'}")
    return found


def _rows(form: PromptSet, path: Path) -> list[dict[str, Any]]:
    if read_text(path).lstrip()[:1] == "<":
        raise ValueError(f"{path}:1 begins an HTML page; download the raw file")
    rows: list[dict[str, Any]] = []
    for source, row in form.read(path):
        _check(row, form.columns, source)
        row_record(row, "prompt", source)
        rows.append(row)
    if not rows:
        raise ValueError(f"{path} holds no prompts")
    return rows


def _check(row: Mapping[str, Any], columns: Mapping[str, type], source: str) -> None:
    for column, kind in columns.items():
        if column not in row:
            raise ValueError(f"{source} has no {column!r}; it has {', '.join(list(row)[:9])[:200]}")
        if not isinstance(row[column], kind):
            raise ValueError(f"{source}: {column} is a {type(row[column]).__name__}, not a {kind.__name__}")
