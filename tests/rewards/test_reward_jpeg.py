"""JPEG reward: the formula against PIL's own byte count, and the order of images it must get right."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from flowgrpo_rc.rewards import jpeg_compressibility


def jpeg_size(image: np.ndarray) -> int:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="JPEG", quality=95)
    return len(buffer.getvalue())


@pytest.fixture
def images() -> np.ndarray:
    """Flat, gradient and noise: from the best to the worst compressible; (3, 32, 64, 3)."""
    rng = np.random.default_rng(0)
    flat = np.full((32, 64, 3), 128)
    gradient = np.broadcast_to(np.arange(64)[None, :, None] * 4, (32, 64, 3))
    noise = rng.integers(0, 256, (32, 64, 3))
    return np.stack([flat, gradient, noise]).astype(np.uint8)


def test_value_at_reference_size_is_kilobytes_over_500() -> None:
    image = np.random.default_rng(1).integers(0, 256, (512, 512, 3), dtype=np.uint8)
    scores, info = jpeg_compressibility(image[None])
    expected = jpeg_size(image) / 1000
    assert info["jpeg_kilobytes"] == [expected]
    assert scores[0] == pytest.approx(-expected / 500, rel=1e-6)


def test_area_factor(images: np.ndarray) -> None:
    scores, _ = jpeg_compressibility(images)
    # 512 * 512 / (32 * 64) = 128
    expected = [-jpeg_size(image) / 1000 * 128 / 500 for image in images]
    np.testing.assert_allclose(scores, expected, rtol=1e-6)
    assert scores.dtype == np.float32
    assert scores.shape == (3,)


def test_flat_beats_gradient_beats_noise(images: np.ndarray) -> None:
    flat, gradient, noise = jpeg_compressibility(images)[0]
    assert 0 > flat > gradient > noise


def test_no_images() -> None:
    assert jpeg_compressibility(np.zeros((0, 8, 8, 3), np.uint8))[0].shape == (0,)
