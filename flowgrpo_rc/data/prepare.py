"""Known data sets turned into the parquet files that training reads."""

import os
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from flowgrpo_rc.data.prompts import PromptRecord, load_prompts
from flowgrpo_rc.messages import reason
from flowgrpo_rc.rewards.ocr import quoted_target

SYSTEM_PROMPT = (
    "Describe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:"
)
"""Qwen-Image's system prompt: rows carry it for trainers that send them through the model's chat template."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedFile:
    """A file that was written."""

    path: Path  # place on the disk
    split: str  # ``train`` or ``test``
    num_prompts: int  # its number of rows


def prepare_ocr(
    input_dir: str | PathLike[str],
    output_dir: str | PathLike[str],
    *,
    data_source: str = "flow_grpo/ocr",
    negative_prompt: str = " ",
    system_prompt: str | None = SYSTEM_PROMPT,
) -> list[PreparedFile]:
    """Turn flow_grpo's OCR data set into parquet, in the row layout of verl-omni.

    ``input_dir`` holds ``train.txt``, and ``test.txt`` if there is one: a prompt a line, the text to draw in double
    quotes. For each, ``output_dir`` gets ``train.parquet`` or ``test.parquet`` with the columns ``data_source``,
    ``prompt`` and ``negative_prompt`` (chat messages), ``ability``, ``reward_model`` (``style``, ``ground_truth``) and
    ``extra_info`` (``split``, ``index``). All lines are checked before anything is written.

    Args:
        output_dir: created when missing; existing files are replaced.
        negative_prompt: text of every negative prompt.
        system_prompt: system message of both prompts; None for none.

    Raises:
        ValueError: ``train.txt`` is missing or empty, or a line has no text in double quotes; names file and
            line. Or ``output_dir`` cannot be made.
    """
    import pyarrow.parquet

    files = {split: Path(input_dir) / f"{split}.txt" for split in ("train", "test")}
    splits = {split: _load_split(file) for split, file in files.items() if split == "train" or file.exists()}
    make_output(output_dir)
    written: list[PreparedFile] = []
    system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    for split, records in splits.items():
        rows = [
            {
                "data_source": data_source,
                "prompt": [*system, {"role": "user", "content": record.prompt}],
                "negative_prompt": [*system, {"role": "user", "content": negative_prompt}],
                "ability": "ocr",
                "reward_model": {"style": "model", "ground_truth": quoted_target(record.prompt)},
                "extra_info": {"split": split, "index": index},
            }
            for index, record in enumerate(records)
        ]
        path = Path(output_dir) / f"{split}.parquet"
        # Renamed when it is whole, so that a reader never sees half a file.
        temporary = path.with_name(path.name + ".tmp")
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), temporary, write_page_checksum=True)
        os.replace(temporary, path)
        written.append(PreparedFile(path=path, split=split, num_prompts=len(rows)))
    return written


def make_output(folder: str | PathLike[str]) -> None:
    """Make the folder where files will be written; ``ValueError`` where it cannot be made."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{folder} cannot be made a folder ({reason(error)}); give another for the output") from error


def _load_split(path: Path) -> list[PromptRecord]:
    records = load_prompts(path)
    for record in records:
        if quoted_target(record.prompt) is None:
            raise ValueError(
                f"{record.source}: {record.prompt!r} has no text in double quotes; write the text to draw in "
                "quotes, or remove the line"
            )
    return records
