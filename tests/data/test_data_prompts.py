"""Reading prompt files: the formats, and what is damaged or holds what no model can read: one line each, with file and
line or row."""

import json
import re
from pathlib import Path
from typing import Any

import damage
import pyarrow
import pyarrow.parquet
import pytest

from flowgrpo_rc.data import PromptRecord, load_prompts, prepare_ocr

CHAT = [
    {"role": "system", "content": "describe"},
    {"role": "user", "content": "first"},
    {"role": "assistant", "content": "ok"},
    {"role": "user", "content": 'a sign "42"'},
]
INVISIBLE = ("\u200b \ufeff", "\u00a0", "\u0301")
"""Texts that show nothing."""


def write_lines(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def write_jsonl(path: Path, *rows: Any) -> Path:
    return write_lines(path, *(json.dumps(row) for row in rows))


def write_parquet(path: Path, rows: list[dict[str, Any]], **options: Any) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, **options)
    return path


def refused(path: Path | list[Path], *words: str) -> None:
    """`load_prompts` refuses it in one line with the file's name and all of `words`."""
    with pytest.raises(ValueError, match=re.escape(words[0])) as caught:
        load_prompts(path)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    name = path.name if isinstance(path, Path) else ""
    assert [word for word in (name, *words) if word not in message] == []


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


def test_files_without_prompts(tmp_path: Path) -> None:
    refused([], "no prompt file given")
    refused(tmp_path / "gone.txt", "gone.txt does not exist or is not a file")
    refused(write_lines(tmp_path / "a.csv", "x"), "unknown format '.csv'; prompt files end in .txt, .jsonl, .parquet")
    good = write_lines(tmp_path / "good.txt", "x")
    for name in ("a.txt", "a.jsonl"):
        refused([good, write_lines(tmp_path / name, "", "  ")], f"{name} holds no prompts")
    empty = pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())})
    pyarrow.parquet.write_table(empty, tmp_path / "a.parquet")
    refused(tmp_path / "a.parquet", "a.parquet holds no prompts")
    path = write_parquet(tmp_path / "a.parquet", [{"text": "y", "id": 1}])
    refused(path, "a.parquet has no column 'prompt'; it has text, id.")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"prompt": "x"', " is not JSON"),
        ('{"prompt": "x"} {"prompt": "y"}', " is not JSON (Extra data"),
        ("{'prompt': 'x'}", " is not JSON"),
        ("null", " is a JSON NoneType; write one object a line"),
        ('["x"]', " is a JSON list; write one object a line"),
        ("{}", " has no column 'prompt'; it has none"),
        ('{"text": "y", "id": 1}', " has no column 'prompt'; it has text, id. Set data.prompt_key"),
        ('{"prompt": 3}', ": 'prompt' is a int; it must be a string or a list of chat messages"),
        ('{"prompt": true}', ": 'prompt' is a bool"),
        ('{"prompt": {"role": "user"}}', ": 'prompt' is a dict"),
        ('{"prompt": []}', ": 'prompt' is a list without a user's text"),
        ('{"prompt": [{"role": "system", "content": "x"}]}', ": 'prompt' is a list without a user's text"),
        ('{"prompt": [{"role": "user", "content": [{"type": "text"}]}]}', ": 'prompt' is a list without a user's text"),
        ('{"prompt": "x", "negative_prompt": 3}', ": 'negative_prompt' is a int"),
        # Characters that no tokenizer takes, and those that show nothing.
        (r'{"prompt": "a\u0000b"}', ": 'prompt' holds the control character U+0000 at character 2"),
        (r'{"prompt": "a\u001b[31m"}', ": 'prompt' holds the control character U+001B"),
        (r'{"prompt": "cut \ud83d"}', ": 'prompt' holds the half character U+D83D at character 5"),
        (r'{"prompt": "a", "negative_prompt": "\u0007"}', ": 'negative_prompt' holds the control character U+0007"),
        (r'{"prompt": [{"role": "user", "content": "a\u0000"}]}', ": 'prompt' holds the control character U+0000"),
        *((json.dumps({"prompt": f" {text}"}), ": 'prompt' is blank") for text in ("", *INVISIBLE)),
    ],
)
def test_lines_without_a_prompt(tmp_path: Path, line: str, says: str) -> None:
    refused(write_lines(tmp_path / "a.jsonl", '{"prompt": "good"}', line), f"a.jsonl:2{says}")


def test_what_is_text_stays(tmp_path: Path) -> None:
    """A whole pair, tabs and line ends inside a prompt, an emoji of several characters, text from right to left."""
    texts = ["\U0001f600", "a\tb\nc", "\U0001f469‍\U0001f4bb", "שלום", "e\u0301", "\u0085 mojibake"]
    lines = [r'{"prompt": "\ud83d\ude00"}', *(json.dumps({"prompt": text}) for text in texts)]
    records = load_prompts(write_lines(tmp_path / "a.jsonl", *lines))
    assert [record.prompt for record in records] == ["\U0001f600", *texts]


def test_plain_text_of_control_characters_or_of_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"good\n\nbad\x00one\n")
    refused(path, "a.txt:3: the prompt holds the control character U+0000 at character 4")
    for text in INVISIBLE:
        assert len(load_prompts(write_lines(path, "good", f"x {text}"))) == 2
    path.write_bytes("good\n\u200b\n".encode())
    refused(path, "a.txt:2: the prompt is blank")


@pytest.mark.parametrize(
    ("prompt", "says"),
    [("b\x00", "holds the control character U+0000"), ("\u200b", "is blank"), (None, "is a NoneType")],
)
def test_characters_in_parquet(tmp_path: Path, prompt: str | None, says: str) -> None:
    path = write_parquet(tmp_path / "a.parquet", [{"prompt": "a"}, {"prompt": prompt}])
    refused(path, f"a.parquet:2: 'prompt' {says}")


@pytest.mark.parametrize(("name", "mark"), [("a.txt", "\ufeff"), ("a.jsonl", "\ufeff\ufeff")])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_byte_order_marks_and_line_ends(tmp_path: Path, name: str, mark: str, end: str) -> None:
    lines = ["one", "two"] if name == "a.txt" else ['{"prompt": "one"}', '{"prompt": "two"}']
    (tmp_path / name).write_bytes(f"{mark}{lines[0]}{end}\ufeff{lines[1]}{end}".encode())
    read = load_prompts(tmp_path / name)
    assert [(r.prompt, r.source.rsplit(":")[-1]) for r in read] == [("one", "1"), ("two", "2")]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_other_encodings(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text("über", encoding="utf-16")
    refused(path, "is not UTF-8 text but UTF-16", "save it as UTF-8")
    path.write_bytes(b"good\nbad \xe9\n" if name == "a.txt" else b'{"prompt": "good"}\n{"prompt": "\xe9"}\n')
    refused(path, "is not UTF-8 text (line 2, byte 0xe9")


def damage_page(path: Path, group: int) -> None:
    """Overwrite the last bytes of the first column's data in a row group."""
    column = pyarrow.parquet.ParquetFile(path).metadata.row_group(group).column(0)
    end = (column.dictionary_page_offset or column.data_page_offset) + column.total_compressed_size
    content = bytearray(path.read_bytes())
    content[end - 4 : end] = bytes(b ^ 0xFF for b in content[end - 4 : end])
    path.write_bytes(content)


@pytest.mark.parametrize(
    "options",
    [{"compression": "snappy"}, {"compression": "zstd"}, {"compression": "none", "write_page_checksum": True}],
)
def test_a_corrupt_page_is_named_by_its_rows(tmp_path: Path, options: dict[str, Any]) -> None:
    """Without compression a flipped bit would be another letter, were there no checksum."""
    rows = [{"prompt": f"prompt number {i}"} for i in range(300)]
    path = write_parquet(tmp_path / "a.parquet", rows, row_group_size=100, use_dictionary=False, **options)
    assert len(load_prompts(path)) == 300
    damage_page(path, group=1)
    refused(path, "is damaged in rows 101 to 200", "copy it again")


def test_our_own_files_have_checksums(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("".join(f'the text "number {i}"\n' for i in range(50)))
    (file,) = prepare_ocr(tmp_path, tmp_path / "out")
    assert len(load_prompts(file.path)) == 50
    damage_page(file.path, group=0)
    refused(file.path, "is damaged in rows 1 to 50", "CRC checksum")


@pytest.mark.parametrize("share", [0.0, 0.9])
def test_a_file_that_is_cut_off(tmp_path: Path, share: float) -> None:
    path = write_parquet(tmp_path / "a.parquet", [{"prompt": f"prompt {i}"} for i in range(1000)])
    damage.cut(path, share)
    refused(path, "a.parquet is not a parquet file (")


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_what_git_lfs_leaves_in_a_files_place_is_no_prompts(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 3\n")
    refused(path, "is a Git LFS pointer", "git lfs pull")


def test_a_line_in_the_table_makes_a_format(tmp_path, monkeypatch):
    """A reader of ``prompt;seed`` lines."""
    from flowgrpo_rc.data.prompts import READERS

    def read(path, prompt_key):
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            prompt, seed = line.split(";")
            yield PromptRecord(prompt=prompt, metadata={"seed": int(seed)}, source=f"{path}:{number}:{prompt_key}")

    path = write_lines(tmp_path / "a.scsv", "a;1", "b;2")
    refused(path, "unknown format '.scsv'; prompt files end in .txt, .jsonl, .parquet")
    monkeypatch.setitem(READERS, ".scsv", read)
    records = load_prompts([path, path], "caption", max_samples=3)
    assert [(r.prompt, r.metadata) for r in records] == [("a", {"seed": 1}), ("b", {"seed": 2}), ("a", {"seed": 1})]
    assert records[1].source == f"{path}:2:caption"
    refused(write_lines(tmp_path / "a.csv", "x"), "end in .txt, .jsonl, .parquet, .scsv")
