"""Rewards that compare an image with its prompt by CLIP, and the aesthetic score: formulas, what must not matter."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_scorers
import torch
from PIL import Image

from flowgrpo_rc.rewards import AestheticConfig, ScorerConfig
from flowgrpo_rc.rewards.clip.text_image import Aesthetic, CLIPCosine, CLIPScore, PickScore

EPS = np.finfo(np.float32).eps
ROUNDING = 64 * EPS
"""A cosine is a sum of 24 products of values that two layers of 32 columns have rounded; other kernels add them up in
another order."""
PROMPTS = ["a red fox", "two boats", "a red fox", "snow", "two boats"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_scorers.clip(tmp_path_factory.mktemp("scorers") / "clip")


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    """Five smooth pictures, (5, 40, 56, 3) uint8."""
    small = np.random.default_rng(0).integers(0, 256, (5, 5, 7, 3), dtype=np.uint8)
    return np.stack([np.asarray(Image.fromarray(i).resize((56, 40), Image.Resampling.BICUBIC)) for i in small])


def config(folder: Path, **more: Any) -> ScorerConfig:
    return ScorerConfig(model_path=str(folder), device="cpu", **more)


@pytest.fixture(scope="module")
def forward(folder: Path, images: np.ndarray) -> Any:
    """Scores by the model's own forward of the pictures and prompts, in one batch."""
    from transformers import AutoProcessor, CLIPModel

    model = CLIPModel.from_pretrained(folder).eval()
    inputs = AutoProcessor.from_pretrained(folder)(
        text=PROMPTS, images=[Image.fromarray(i) for i in images], return_tensors="pt", padding=True
    )
    with torch.no_grad():
        return model(**inputs), float(model.logit_scale.exp())


# ---------------------------------------------------------------------- formulas


def test_the_formulas_on_the_embeddings(folder: Path, images: np.ndarray, forward: Any) -> None:
    """Independent lines in float64, from the projected features of the model's forward."""
    out, scale = forward
    image, text = (e.double().numpy() for e in (out.image_embeds, out.text_embeds))
    cosine = np.array([np.dot(i, t) / np.sqrt(np.dot(i, i) * np.dot(t, t)) for i, t in zip(image, text, strict=True)])
    expected = {PickScore: scale * cosine / 26, CLIPScore: scale * cosine / 30, CLIPCosine: cosine}
    for reward, scores in expected.items():
        np.testing.assert_allclose(reward(config(folder))(images, PROMPTS), scores, rtol=0, atol=ROUNDING)


# ---------------------------------------------------------------------- what must not matter


@pytest.fixture(scope="module")
def scores(folder: Path, images: np.ndarray) -> np.ndarray:
    return CLIPCosine(config(folder))(images, PROMPTS)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_micro_batches_do_not_matter(folder: Path, images: np.ndarray, scores: np.ndarray, size: int) -> None:
    found = CLIPCosine(config(folder, micro_batch_size=size))(images, PROMPTS)
    np.testing.assert_allclose(found, scores, rtol=0, atol=ROUNDING)


@pytest.mark.gpu
def test_a_gpu_scores_as_the_processor_does(folder: Path, images: np.ndarray, scores: np.ndarray) -> None:
    """``auto`` takes it; in float32 only the order of sums differs."""
    reward = CLIPCosine(ScorerConfig(model_path=str(folder)))
    assert reward.network.device.type == "cuda"
    np.testing.assert_allclose(reward(images, PROMPTS), scores, rtol=0, atol=4 * ROUNDING)


@pytest.mark.portable
def test_golden_values(folder: Path, images: np.ndarray) -> None:
    """Of seeded weights and pictures: a release of transformers or Pillow that prepares images or prompts otherwise is
    seen here. One grey level more in every pixel moves these by 1e-3 to 1.4e-2, another filter by as much or more,
    kernels that add up in another order by less than 1e-6."""
    found = CLIPCosine(config(folder))(images, PROMPTS)
    np.testing.assert_allclose(found, [-0.040755, -0.061445, 0.137569, 0.06526, 0.096716], rtol=0, atol=1e-4)


# ---------------------------------------------------------------------- aesthetic


def head(path: Path, widths: tuple[int, ...] = (24, 16, 8, 4, 2, 1), *, seed: int = 0) -> Path:
    """Linear layers as the published file names them: dropout takes a number between some of them."""
    rng = torch.Generator().manual_seed(seed)
    state = {}
    for number, before, after in zip((0, 2, 4, 6, 7), widths, widths[1:], strict=False):
        state[f"layers.{number}.weight"] = torch.randn(after, before, generator=rng)
        state[f"layers.{number}.bias"] = torch.randn(after, generator=rng)
    torch.save(state, path)
    return path


def test_aesthetic_is_the_layers_on_the_normalised_embedding(
    folder: Path, images: np.ndarray, forward: Any, tmp_path: Path
) -> None:
    state = torch.load(head(tmp_path / "head.pth"), weights_only=True)
    values = forward[0].image_embeds  # normalised by the model's forward
    for number in (0, 2, 4, 6, 7):
        values = torch.nn.functional.linear(values, state[f"layers.{number}.weight"], state[f"layers.{number}.bias"])
    reward = Aesthetic(AestheticConfig(model_path=str(folder), head_path=str(tmp_path / "head.pth"), device="cpu"))
    scale = float(values.abs().max()) + 100  # the layers' gain on an error in the embedding
    np.testing.assert_allclose(reward(images), values[:, 0].numpy(), rtol=0, atol=scale * ROUNDING)
    assert len(reward.weights()) == len(reward.network.state_dict()) + 2


@pytest.mark.parametrize(
    ("state", "told"),
    [
        (None, r"aesthetic\.head_path: is null; download sac\+logos"),
        ((20, 16, 8, 4, 2, 1), r"aesthetic\.head_path: its layers take 20 values, but the embeddings of .* have 24"),
        ((24, 16, 8, 4, 2, 3), r"its last layer gives 3 values; a score is one"),
        ({"layers.0.weight": torch.ones(1, 24), "bias": torch.ones(1)}, r"its tensors are bias, layers.0.weight; exp"),
    ],
)
def test_a_head_that_does_not_fit(folder: Path, tmp_path: Path, state: Any, told: str) -> None:
    path = tmp_path / "head.pth"
    if isinstance(state, tuple):
        head(path, state)
    else:
        torch.save(state, path)
    with pytest.raises(ValueError, match=told):
        Aesthetic(AestheticConfig(model_path=str(folder), head_path=None if state is None else str(path)))


class Boom:
    """A pickle whose reading runs code."""

    def __reduce__(self) -> Any:
        return (Path.touch, (Path("boom"),))


def test_a_head_runs_no_code(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"layers.0.weight": Boom()}, tmp_path / "head.pth")
    told = r"head_path: .*head.pth cannot be used: UnpicklingError: .* Give the file sac\+logos"
    with pytest.raises(ValueError, match=told):
        Aesthetic(AestheticConfig(model_path=str(folder), head_path=str(tmp_path / "head.pth")))
    assert not (tmp_path / "boom").exists()
