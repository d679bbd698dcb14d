"""Prompt files that are damaged, or hold what no model can read: one line each, with file and line or row."""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from flowgrpo_rc.data import load_prompts, prepare_ocr


def refused(path: Path, *words: str, **options: Any) -> str:
    """`load_prompts` refuses it in one line that names the file and all of `words`."""
    with pytest.raises(ValueError, match=re.escape(path.name)) as caught:
        load_prompts(path, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    for word in (path.name, *words):
        assert word in message
    return message


def jsonl(folder: Path, *lines: str) -> Path:
    path = folder / "a.jsonl"
    path.write_text("\n".join(('{"prompt": "good"}', *lines)) + "\n", encoding="utf-8")
    return path


def parquet(folder: Path, columns: dict[str, Any], **options: Any) -> Path:
    path = folder / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table(columns), path, **options)
    return path


# ------------------------------------------------------------------ characters


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (r'{"prompt": "a\u0000b"}', "'prompt' holds the control character U+0000 at character 2"),
        (r'{"prompt": "a\u001b[31m"}', "the control character U+001B"),
        (r'{"prompt": "a", "negative_prompt": "\u0007"}', "'negative_prompt' holds the control character U+0007"),
        (r'{"prompt": [{"role": "user", "content": "a\u0000"}]}', "'prompt' holds the control character U+0000"),
    ],
)
def test_characters_that_no_tokenizer_takes(tmp_path: Path, line: str, says: str) -> None:
    refused(jsonl(tmp_path, line), "a.jsonl:2", says)


def test_what_is_text_stays(tmp_path: Path) -> None:
    """A whole pair, tabs and line ends inside a prompt, an emoji of several characters, text from right to left."""
    texts = ["\U0001f600", "a\tb\nc", "\U0001f469‍\U0001f4bb", "שלום", "e\u0301", "\u0085 mojibake"]
    path = jsonl(tmp_path, r'{"prompt": "\ud83d\ude00"}', *(json.dumps({"prompt": text}) for text in texts))
    assert [record.prompt for record in load_prompts(path)] == ["good", "\U0001f600", *texts]


@pytest.mark.parametrize("text", ["\u200b \ufeff", "\u00a0", "\u0301"])
def test_prompts_that_show_nothing(tmp_path: Path, text: str) -> None:
    refused(jsonl(tmp_path, json.dumps({"prompt": f" {text}"})), "a.jsonl:2: 'prompt' is blank")
    path = tmp_path / "a.txt"
    path.write_text(f"good\nx {text}\n", encoding="utf-8")
    assert len(load_prompts(path)) == 2


def test_control_characters_in_plain_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"good\n\nbad\x00one\n")
    refused(path, "a.txt:3: the prompt holds the control character U+0000 at character 4")
    path.write_bytes("good\n\u200b\n".encode())
    refused(path, "a.txt:2: the prompt is blank")


def test_characters_in_parquet(tmp_path: Path) -> None:
    refused(parquet(tmp_path, {"prompt": ["a", "b\x00"]}), "a.parquet:2: 'prompt' holds the control character U+0000")
    refused(parquet(tmp_path, {"prompt": ["a", "\u200b"]}), "a.parquet:2: 'prompt' is blank")
    refused(parquet(tmp_path, {"prompt": ["a", None]}), "a.parquet:2: 'prompt' is a NoneType")


# ------------------------------------------------------------------ bytes


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


# ------------------------------------------------------------------ JSON


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"prompt": "x"', "is not JSON"),
        ('{"prompt": "x"} {"prompt": "y"}', "is not JSON (Extra data"),
        ("{'prompt': 'x'}", "is not JSON"),
        ("null", "is a JSON NoneType; write one object a line"),
        ('["x"]', "is a JSON list; write one object a line"),
        ("{}", "has no column 'prompt'; it has none"),
        ('{"prompt": {"a": 1}}', "'prompt' is a dict"),
        ('{"prompt": true}', "'prompt' is a bool"),
    ],
)
def test_lines_that_are_no_usable_json(tmp_path: Path, line: str, says: str) -> None:
    refused(jsonl(tmp_path, line), "a.jsonl:2", says)


# ------------------------------------------------------------------ parquet


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
    prompts = [f"prompt number {i}" for i in range(300)]
    path = parquet(tmp_path, {"prompt": prompts}, row_group_size=100, use_dictionary=False, **options)
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
    path = parquet(tmp_path, {"prompt": [f"prompt {i}" for i in range(1000)]})
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    refused(path, "is not a parquet file (")


# ------------------------------------------------------------------ paths


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_what_git_lfs_leaves_in_a_files_place_is_no_prompts(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 3\n")
    refused(path, "is a Git LFS pointer", "git lfs pull")
