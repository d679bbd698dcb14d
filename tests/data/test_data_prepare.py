"""flow_grpo's OCR text files to parquet: the row layout, and the refusals."""

from pathlib import Path

import pyarrow.parquet
import pytest

from flowgrpo_rc.data import load_prompts, prepare_ocr
from flowgrpo_rc.data.prepare import SYSTEM_PROMPT


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "train.txt").write_text('a sign "Spring 2024"\n\na "Cafe" door\n')
    (tmp_path / "in" / "test.txt").write_text('the text "42"\n')
    return tmp_path


def test_row_layout(folder: Path) -> None:
    written = prepare_ocr(folder / "in", folder / "out" / "ocr")
    assert [(f.path.name, f.split, f.num_prompts) for f in written] == [
        ("train.parquet", "train", 2),
        ("test.parquet", "test", 1),
    ]
    assert pyarrow.parquet.read_table(written[0].path).to_pylist()[1] == {
        "data_source": "flow_grpo/ocr",
        "prompt": [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": 'a "Cafe" door'}],
        "negative_prompt": [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": " "}],
        "ability": "ocr",
        "reward_model": {"style": "model", "ground_truth": "Cafe"},
        "extra_info": {"split": "train", "index": 1},
    }
    assert sorted(path.name for path in (folder / "out" / "ocr").iterdir()) == ["test.parquet", "train.parquet"]


def test_round_trip_through_load_prompts(folder: Path) -> None:
    written = prepare_ocr(folder / "in", folder, system_prompt=None, negative_prompt="blurry", data_source="mine")
    text, parquet = load_prompts(folder / "in" / "train.txt"), load_prompts(written[0].path)
    assert [r.prompt for r in text] == [r.prompt for r in parquet]
    assert [r.negative_prompt for r in parquet] == ["blurry", "blurry"]
    assert parquet[0].metadata["data_source"] == "mine"
    assert parquet[0].metadata["reward_model"]["ground_truth"] == "Spring 2024"


def test_test_split_is_optional_and_files_are_replaced(folder: Path) -> None:
    (folder / "in" / "test.txt").unlink()
    for _ in range(2):
        assert [file.split for file in prepare_ocr(folder / "in", folder / "out")] == ["train"]


def test_line_without_target_names_file_and_line_and_writes_nothing(folder: Path) -> None:
    (folder / "in" / "test.txt").write_text('the text "42"\n\na cat\n')
    with pytest.raises(ValueError, match=r"test\.txt:3: 'a cat' has no text in double quotes"):
        prepare_ocr(folder / "in", folder / "out")
    assert not (folder / "out").exists()


def test_missing_train_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"train\.txt does not exist"):
        prepare_ocr(tmp_path, tmp_path / "out")


def test_an_output_that_cannot_be_a_folder_is_named(folder: Path) -> None:
    (folder / "file").touch()
    for output in (folder / "file", folder / "file" / "below"):
        with pytest.raises(ValueError, match=f"{output} cannot be made a folder .*; give another"):
            prepare_ocr(folder / "in", output)
