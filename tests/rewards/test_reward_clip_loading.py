"""Loading a scorer: messages about a folder or a name that will not do, and the device."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_scorers
import torch
from safetensors.torch import load_file, save_file

from flowgrpo_rc.rewards import ScorerConfig
from flowgrpo_rc.rewards.clip.scorer import find_device
from flowgrpo_rc.rewards.clip.similarity import DINOSimilarity
from flowgrpo_rc.rewards.clip.text_image import PickScore


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_scorers.clip(tmp_path / "clip")


def refusal(reward: Any = PickScore, **section: Any) -> str:
    """The error of making the reward; always one line."""
    with pytest.raises(ValueError, match=rf"^reward\.{reward.name}\.") as caught:
        reward(ScorerConfig(**{"device": "cpu", **section}))
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---------------------------------------------------------------------- folders and names


def test_weights_that_cannot_be_downloaded() -> None:
    """The tests run without the hub (``HF_HUB_OFFLINE``)."""
    told = refusal()
    assert told.startswith("reward.pickscore.model_path: yuvalkirstain/PickScore_v1 cannot be used: OSError: ")
    assert told.endswith(
        "hf download yuvalkirstain/PickScore_v1 --local-dir FOLDER; then reward.pickscore.model_path=FOLDER"
    )


@pytest.mark.parametrize("path", ["/nowhere/clip", "a/b/c", "./gone"])
def test_a_folder_that_is_not_there(path: str) -> None:
    told = refusal(model_path=path)
    assert told.startswith(f"reward.pickscore.model_path: {path} cannot be used: ")
    assert told.endswith("There is no such folder, and it is not the name of a repository on the hub (owner/name)")


def shorten(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def lose_a_tensor(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["visual_projection.weight"], tensors["logit_scale"]
    save_file(tensors, file, metadata={"format": "pt"})


def widen(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["projection_dim"] += 1
    (folder / "config.json").write_text(json.dumps(config))


def empty_the_vocabulary(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def more_tokens(folder: Path) -> None:
    tokenizer = tiny_scorers.tokenizer()
    tokenizer.add_tokens(["foxes", "boats"])
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize(
    ("damage", "field", "told"),
    [
        (lambda f: (f / "config.json").unlink(), "model_path", "Give a folder with config.json and the weights"),
        (lambda f: (f / "model.safetensors").unlink(), "model_path", "OSError: Error no file named model.safetensors"),
        (lambda f: (f / "model.safetensors").write_text("<html>"), "model_path", "SafetensorError: Error while"),
        (shorten, "model_path", "SafetensorError: Error while"),
        (lose_a_tensor, "model_path", "2 tensors are missing (logit_scale, visual_projection.weight)"),
        (widen, "model_path", "Error: "),
        (lambda f: (f / "preprocessor_config.json").unlink(), "processor_path", "folder with preprocessor_config.json"),
        (empty_the_vocabulary, "processor_path", "tokenizer.json, or vocab.json and merges.txt"),
        (more_tokens, "processor_path", "it has 192 tokens, but the network knows 190"),
    ],
)
def test_a_folder_with_something_missing_or_damaged(
    folder: Path, damage: Callable[[Path], Any], field: str, told: str
) -> None:
    damage(folder)
    found = refusal(model_path=str(folder))
    assert found.startswith(f"reward.pickscore.{field}: {folder} cannot be used: ")
    assert told in found


def test_a_network_of_another_kind(folder: Path, tmp_path: Path) -> None:
    dino = tiny_scorers.dino(tmp_path / "dino")
    assert "it holds a network of the kind 'dinov2', but this reward takes clip" in refusal(model_path=str(dino))
    told = refusal(DINOSimilarity, model_path=str(folder))
    assert "it holds a network of the kind 'clip', but this reward takes dinov2, dinov2_with_registers" in told


def test_a_processor_of_another_size(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    tiny_scorers.tokenizer().save_pretrained(other)
    side = {"height": 48, "width": 48}
    tiny_scorers.image_processor("CLIPImageProcessor", crop_size=side).save_pretrained(other)
    told = refusal(model_path=str(folder), processor_path=str(other))
    assert told.startswith(f"reward.pickscore.processor_path: what {other} makes of images and prompts does not fit")
    assert told.endswith("give the network's own processor")


# ---------------------------------------------------------------------- device


def test_the_device_of_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_device("reward.x", "auto") == torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert find_device("reward.x", "auto") == torch.device("cuda:3")
    assert find_device("reward.x", "cuda") == torch.device("cuda:3")
    assert find_device("reward.x", "cuda:1") == torch.device("cuda:1")
    with pytest.raises(ValueError, match=r"reward\.x\.device: got cuda:4, but torch sees 4 GPUs here"):
        find_device("reward.x", "cuda:4")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert find_device("reward.x", "auto") == torch.device("cuda:1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match=r"reward\.x\.device: got cuda:0, but torch sees 0 GPUs here"):
        find_device("reward.x", "cuda")
