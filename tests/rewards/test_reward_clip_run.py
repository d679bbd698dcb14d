"""CLIP rewards in whole runs: the tiny CLIP trains by the code that PickScore takes, a resume repeats a run exactly."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flowgrpo_rc.paths import resolve_asset
from flowgrpo_rc.trainer import CheckpointError, FlowGRPOTrainer

SCORERS = ("pickscore", "clip_cosine", "hpsv2")
REWARDS = tuple(
    override
    for name in SCORERS
    for override in (f"reward.functions.{name}=1", f"reward.{name}.model_path=asset:tiny_clip")
)
pytestmark = pytest.mark.run
NO_CUSTOM = "reward.custom_reward_function.path=null"


def metrics(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k.startswith(("reward/", "actor/", "step"))} for row in rows]


def test_a_resume_repeats_the_run_with_every_local_scorer(small_config: Callable[..., Any]) -> None:
    """Two steps in one go, and one, then one more."""
    auto = (*REWARDS, NO_CUSTOM, "trainer.resume_mode=auto", "trainer.save_freq=1", "data.val_files=null")
    whole = FlowGRPOTrainer(small_config(*auto, folder="whole")).fit().root
    parts = small_config(*auto, folder="parts")
    first = FlowGRPOTrainer(parts)
    own = first.train_step

    def end_after_one() -> Any:
        if first.step == 1:
            raise ConnectionError("power cut")
        return own()

    first.train_step = end_after_one
    with pytest.raises(ConnectionError):
        first.fit()
    second = FlowGRPOTrainer(parts)
    assert second.step == 1
    rows = metrics(second.fit().root)
    assert rows == metrics(whole)
    adapters = [
        load_file(folder / "lora" / "pytorch_lora_weights.safetensors") for folder in (whole, second.folder.root)
    ]
    assert all(torch.equal(value, adapters[1][name]) for name, value in adapters[0].items())
    assert {f"reward/{name}" for name in SCORERS} <= rows[-1].keys()
    # PickScore is exp(logit_scale) / 26 of the cosine, and so is its mean.
    scale = load_file(Path(resolve_asset("asset:tiny_clip")) / "model.safetensors")["logit_scale"].exp().item()
    assert rows[-1]["reward/pickscore"] == pytest.approx(rows[-1]["reward/clip_cosine"] * scale / 26, rel=1e-5)
    # At the network's own size nothing is resized, and the two preprocessings are one.
    assert rows[-1]["reward/hpsv2"] == pytest.approx(rows[-1]["reward/clip_cosine"], abs=1e-5)


def test_a_scorer_with_other_weights_is_not_resumed_with(small_config: Callable[..., Any], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(resolve_asset("asset:tiny_clip"), tmp_path / "clip"))
    settings = (
        *("reward.functions.clip_cosine=1", f"reward.clip_cosine.model_path={folder}", NO_CUSTOM),
        *("trainer.resume_mode=auto", "trainer.save_freq=1", "data.val_files=null"),
    )
    FlowGRPOTrainer(small_config(*settings, "trainer.total_training_steps=1")).fit()
    tensors = load_file(folder / "model.safetensors")
    tensors["visual_projection.weight"] *= 1.1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError,
        match=r"step_1 was trained with other weights or another dtype of the reward 'clip_cosine' .*clip_cosine's set",
    ):
        FlowGRPOTrainer(small_config(*settings))
    # Other rewards are another setting, which a run may go on with.
    others = ("reward.functions.clip_cosine=0", "reward.functions.jpeg_compressibility=1")
    assert FlowGRPOTrainer(small_config(*settings, *others)).step == 1
