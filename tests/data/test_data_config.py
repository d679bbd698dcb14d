"""The data section: composition, and every refusal with its message."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from omegaconf import OmegaConf

from flowgrpo_rc.data import DataConfig, file_list


@dataclass(kw_only=True, slots=True)
class Root:
    data: DataConfig = field(default_factory=DataConfig)


def test_composes_with_one_path_or_several() -> None:
    merged = OmegaConf.merge(
        OmegaConf.structured(Root),
        OmegaConf.create({"data": {"train_files": ["a.txt", "b.jsonl"], "val_files": "c.parquet"}}),
    )
    config = OmegaConf.to_object(merged).data  # type: ignore[union-attr]
    assert file_list("data.train_files", config.train_files) == ["a.txt", "b.jsonl"]
    assert file_list("data.val_files", config.val_files) == ["c.parquet"]
    assert file_list("data.val_files", DataConfig().val_files) == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"train_files": 3}, r"data\.train_files: got 3; give a path or a list of paths"),
        ({"val_files": ["a", 1]}, r"data\.val_files: got \['a', 1\]"),
        ({"train_batch_size": 0}, r"data\.train_batch_size: got 0; it must be 1 or more"),
        ({"train_max_samples": 0}, r"data\.train_max_samples: got 0"),
        ({"val_max_samples": -1}, r"data\.val_max_samples: got -1"),
        ({"prompt_key": ""}, r"data\.prompt_key: got ''"),
        ({"seed": -1}, r"data\.seed: got -1; it must be 0 or more"),
    ],
)
def test_refusals(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataConfig(**values)
