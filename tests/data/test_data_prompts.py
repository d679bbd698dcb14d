"""Reading prompt files: the three formats, and every refusal with its message."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from flowgrpo_rc.data import PromptRecord, load_prompts

CHAT = [
    {"role": "system", "content": "describe"},
    {"role": "user", "content": "first"},
    {"role": "assistant", "content": "ok"},
    {"role": "user", "content": 'a sign "42"'},
]


def write_lines(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def write_jsonl(path: Path, *rows: Any) -> Path:
    return write_lines(path, *(json.dumps(row) for row in rows))


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def test_txt_skips_blank_lines_and_keeps_line_numbers(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "train.txt", 'the text "1"', "", "   ", '  the text "2"\t', "über\u2028uns")
    assert load_prompts(path) == [
        PromptRecord(prompt='the text "1"', source=f"{path}:1"),
        PromptRecord(prompt='the text "2"', source=f"{path}:4"),
        PromptRecord(prompt="über\u2028uns", source=f"{path}:5"),
    ]


def test_jsonl_strings_chat_and_metadata(tmp_path: Path) -> None:
    path = write_jsonl(
        tmp_path / "train.jsonl",
        {"prompt": "plain", "negative_prompt": "blurry", "id": 7, "tags": ["a"]},
        {"prompt": CHAT, "negative_prompt": [{"role": "user", "content": " "}]},
        {"prompt": "last", "negative_prompt": None},
    )
    first, second, third = load_prompts(path)
    assert first == PromptRecord(
        prompt="plain", negative_prompt="blurry", metadata={"id": 7, "tags": ["a"]}, source=f"{path}:1"
    )
    assert (second.prompt, second.negative_prompt, second.metadata) == ('a sign "42"', " ", {})
    assert (third.prompt, third.negative_prompt) == ("last", None)


def test_parquet_strings_chat_and_metadata(tmp_path: Path) -> None:
    strings = write_parquet(tmp_path / "a.parquet", [{"prompt": "x", "k": 1}, {"prompt": "y", "k": 2}])
    chats = write_parquet(tmp_path / "b.parquet", [{"prompt": CHAT, "reward_model": {"ground_truth": "42"}}])
    records = load_prompts([strings, chats])
    assert [r.prompt for r in records] == ["x", "y", 'a sign "42"']
    assert [r.metadata for r in records] == [{"k": 1}, {"k": 2}, {"reward_model": {"ground_truth": "42"}}]
    assert [r.source for r in records] == [f"{strings}:1", f"{strings}:2", f"{chats}:1"]


def test_other_prompt_key(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "train.jsonl", {"caption": "x", "prompt": "y"})
    (record,) = load_prompts(path, prompt_key="caption")
    assert (record.prompt, record.metadata) == ("x", {"prompt": "y"})


@pytest.mark.parametrize(("limit", "expected"), [(None, 4), (1, 1), (3, 3), (9, 4)])
def test_max_samples_counts_over_files(tmp_path: Path, limit: int | None, expected: int) -> None:
    files = [write_lines(tmp_path / f"{n}.txt", f"{n}a", f"{n}b") for n in range(2)]
    prompts = [record.prompt for record in load_prompts(files, max_samples=limit)]
    assert prompts == ["0a", "0b", "1a", "1b"][:expected]


def refuses(path: Path | list[Path], message: str, **options: Any) -> None:
    with pytest.raises(ValueError, match=message):
        load_prompts(path, **options)


def test_files_without_prompts(tmp_path: Path) -> None:
    refuses([], r"no prompt file given")
    refuses(tmp_path / "gone.txt", r"gone\.txt does not exist or is not a file")
    refuses(write_lines(tmp_path / "a.csv", "x"), r"a\.csv: unknown format '\.csv'; .* \.txt, \.jsonl, \.parquet")
    good = write_lines(tmp_path / "good.txt", "x")
    for name in ("a.txt", "a.jsonl"):
        refuses([good, write_lines(tmp_path / name, "", "  ")], rf"{name} holds no prompts")
    empty = pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())})
    pyarrow.parquet.write_table(empty, tmp_path / "a.parquet")
    refuses(tmp_path / "a.parquet", r"a\.parquet holds no prompts")
    path = write_parquet(tmp_path / "a.parquet", [{"text": "y", "id": 1}])
    refuses(path, r"a\.parquet has no column 'prompt'; it has text, id\.")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "y", "id": 1}, r" has no column 'prompt'; it has text, id\. Set data\.prompt_key"),
        ({"prompt": 3}, ": 'prompt' is a int; it must be a string or a list of chat messages"),
        ({"prompt": {"role": "user"}}, ": 'prompt' is a dict"),
        ({"prompt": []}, ": 'prompt' is a list without a user's text"),
        ({"prompt": [{"role": "system", "content": "x"}]}, ": 'prompt' is a list without a user's text"),
        ({"prompt": [{"role": "user", "content": [{"type": "text"}]}]}, ": 'prompt' is a list without a user's text"),
        ({"prompt": " "}, ": 'prompt' is blank"),
        ({"prompt": "x", "negative_prompt": 3}, ": 'negative_prompt' is a int"),
    ],
)
def test_rows_without_a_prompt(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    refuses(write_jsonl(tmp_path / "a.jsonl", {"prompt": "x"}, row), rf"a\.jsonl:2{message}")


def test_a_line_in_the_table_makes_a_format(tmp_path, monkeypatch):
    """A reader of ``prompt;seed`` lines."""
    from flowgrpo_rc.data.prompts import READERS

    def read(path, prompt_key):
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            prompt, seed = line.split(";")
            yield PromptRecord(prompt=prompt, metadata={"seed": int(seed)}, source=f"{path}:{number}:{prompt_key}")

    path = write_lines(tmp_path / "a.scsv", "a;1", "b;2")
    refuses(path, r"unknown format '\.scsv'; prompt files end in \.txt, \.jsonl, \.parquet$")
    monkeypatch.setitem(READERS, ".scsv", read)
    records = load_prompts([path, path], "caption", max_samples=3)
    assert [(r.prompt, r.metadata) for r in records] == [("a", {"seed": 1}), ("b", {"seed": 2}), ("a", {"seed": 1})]
    assert records[1].source == f"{path}:2:caption"
    refuses(write_lines(tmp_path / "a.csv", "x"), r"end in \.txt, \.jsonl, \.parquet, \.scsv")
