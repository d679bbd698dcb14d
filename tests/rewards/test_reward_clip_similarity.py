"""Image similarities: the cosine with the reference of a row, in whatever form the row holds it."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_scorers
import torch
from PIL import Image

from flowgrpo_rc.rewards import RewardConfig, ScorerConfig, build_reward
from flowgrpo_rc.rewards.clip.similarity import CLIPSimilarity, DINOSimilarity, SigLIPSimilarity

ROUNDING = 64 * np.finfo(np.float32).eps
"""As in ``test_reward_clip.py``."""
KINDS = {
    "clip_similarity": (CLIPSimilarity, tiny_scorers.clip),
    "dino_similarity": (DINOSimilarity, tiny_scorers.dino),
    "siglip_similarity": (SigLIPSimilarity, tiny_scorers.siglip),
}
PROMPTS = ["make it red", "make it blue", "remove the boat"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("similarity")
    return {name: build(root / name) for name, (_, build) in KINDS.items()}


@pytest.fixture(scope="module")
def pictures() -> np.ndarray:
    """Six smooth pictures, (6, 40, 56, 3) uint8: three results, three references."""
    small = np.random.default_rng(6).integers(0, 256, (6, 5, 7, 3), dtype=np.uint8)
    return np.stack([np.asarray(Image.fromarray(i).resize((56, 40), Image.Resampling.BICUBIC)) for i in small])


def make(folders: dict[str, Path], name: str, **more: Any) -> Any:
    return KINDS[name][0](ScorerConfig(model_path=str(folders[name]), device="cpu", **more))


def embeddings(folder: Path, name: str, pictures: np.ndarray) -> np.ndarray:
    """By the models' own forwards, in float64."""
    from transformers import AutoModel
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    model = AutoModel.from_pretrained(folder).eval()
    pixels = AutoImageProcessor.from_pretrained(folder)(images=list(pictures), return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        if name == "clip_similarity":
            found = model.visual_projection(model.vision_model(pixels).pooler_output)
        elif name == "dino_similarity":
            found = model(pixels).last_hidden_state[:, 0]
        else:
            found = model.vision_model(pixels).pooler_output
    return found.double().numpy()


@pytest.mark.parametrize("name", KINDS)
def test_the_score_is_the_cosine_of_the_embeddings(folders: dict[str, Path], pictures: np.ndarray, name: str) -> None:
    found = embeddings(folders[name], name, pictures)
    expected = [np.dot(a, b) / np.sqrt(np.dot(a, a) * np.dot(b, b)) for a, b in zip(found[:3], found[3:], strict=True)]
    metadata = [{"images": [reference]} for reference in pictures[3:]]
    scores = make(folders, name, micro_batch_size=2)(pictures[:3], PROMPTS, metadata)
    assert np.ptp(expected) > 1e-2
    np.testing.assert_allclose(scores, expected, rtol=0, atol=ROUNDING)


@pytest.mark.portable
@pytest.mark.parametrize(
    ("name", "golden"),
    [
        ("clip_similarity", [0.560919, 0.331557, 0.89714]),
        ("dino_similarity", [0.099052, 0.167855, 0.662709]),
        ("siglip_similarity", [0.720436, 0.696115, 0.850604]),
    ],
)
def test_golden_values(folders: dict[str, Path], pictures: np.ndarray, name: str, golden: list[float]) -> None:
    """As in ``test_reward_clip.py``: one grey level more in every pixel moves these by 2e-3 to 2e-2, kernels that add
    up in another order by less than 1e-6."""
    metadata = [{"images": [reference]} for reference in pictures[3:]]
    np.testing.assert_allclose(make(folders, name)(pictures[:3], PROMPTS, metadata), golden, rtol=0, atol=1e-4)


def test_a_reference_in_every_form(folders: dict[str, Path], pictures: np.ndarray, tmp_path: Path) -> None:
    image = Image.fromarray(pictures[3])
    file = io.BytesIO()
    image.save(file, "PNG")
    (tmp_path / "reference.png").write_bytes(file.getvalue())
    path = str(tmp_path / "reference.png")
    forms = [pictures[3], image, file.getvalue(), path, Path(path), {"bytes": file.getvalue(), "path": None}]
    forms += [{"bytes": None, "path": path}, [path, "another.png"], (image,), [{"path": path}]]
    metadata = [{"images": form} for form in forms]
    reward = make(folders, "clip_similarity")
    rows = [f"row {i}" for i in range(len(forms))]
    reward.check_prompts([""] * len(forms), image_size=None, sources=rows, metadata=metadata)
    scores = reward(np.repeat(pictures[:1], len(forms), 0), [""] * len(forms), metadata)
    np.testing.assert_allclose(scores, scores[0], rtol=0, atol=ROUNDING)


def test_references_of_another_size_and_without_colour(folders: dict[str, Path]) -> None:
    """A grey image counts as one of three equal channels, whatever its size; palettes and alpha are decoded."""
    grey = Image.fromarray(np.linspace(0, 255, 70 * 90).reshape(70, 90).astype(np.uint8))
    image = np.asarray(grey.convert("RGB"))[None].repeat(4, 0)
    metadata = [{"images": form} for form in (grey, np.asarray(grey), grey.convert("RGBA"), grey.convert("P"))]
    scores = make(folders, "dino_similarity")(image, [""] * 4, metadata)
    np.testing.assert_allclose(scores, 1, rtol=0, atol=ROUNDING)


def test_equal_references_are_embedded_once(
    folders: dict[str, Path], pictures: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    reward = make(folders, "siglip_similarity")
    own, sizes = reward.network.get_image_features, []
    monkeypatch.setattr(
        reward.network, "get_image_features", lambda pixel_values: sizes.append(len(pixel_values)) or own(pixel_values)
    )
    reward(pictures, [""] * 6, [{"images": pictures[i // 3].copy()} for i in range(6)])
    assert sizes == [2, 6]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({}, r"train.jsonl:2 has no 'images', with whose first image the reward 'clip_similarity' compares; add it"),
        ({"images": []}, r"train.jsonl:2 has no 'images'"),
        ({"images": None}, r"train.jsonl:2 has no 'images'"),
        ({"images": {"bytes": None}}, r"train.jsonl:2 has no 'images'"),
        ({"images": "gone.png"}, r"train.jsonl:2: 'images' cannot be read as an image \(FileNotFoundError"),
        ({"images": b"no image"}, r"train.jsonl:2: 'images' cannot be read as an image \(UnidentifiedImageError"),
        ({"images": 3}, r"train.jsonl:2: 'images' cannot be read .* type int"),
        ({"images": [[0.5, 1.0]]}, r"train.jsonl:2: 'images' cannot be read .* values of float64"),
    ],
)
def test_a_row_without_a_reference_is_refused_before_training(
    folders: dict[str, Path], pictures: np.ndarray, row: dict[str, Any], told: str
) -> None:
    section = {"model_path": str(folders["clip_similarity"]), "device": "cpu"}
    mix = build_reward(RewardConfig(functions={"clip_similarity": 1.0}, clip_similarity=section))
    with pytest.raises(ValueError, match=told) as caught:
        mix.check_prompts(
            ["a", "b"], sources=["train.jsonl:1", "train.jsonl:2"], metadata=[{"images": pictures[0]}, row]
        )
    assert "\n" not in str(caught.value)
