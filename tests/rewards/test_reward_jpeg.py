"""JPEG reward: the formula against PIL's own byte count, and the order of images it must get right."""

import io

import numpy as np
from PIL import Image

from flowgrpo_rc.rewards import jpeg_compressibility


def jpeg_size(image: np.ndarray) -> int:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="JPEG", quality=95)
    return len(buffer.getvalue())


def test_area_factor_and_order() -> None:
    """Flat, gradient and noise: from the best to the worst compressible."""
    flat = np.full((32, 64, 3), 128)
    gradient = np.broadcast_to(np.arange(64)[None, :, None] * 4, (32, 64, 3))
    noise = np.random.default_rng(0).integers(0, 256, (32, 64, 3))
    images = np.stack([flat, gradient, noise]).astype(np.uint8)
    scores, info = jpeg_compressibility(images)
    assert info["jpeg_kilobytes"] == [jpeg_size(image) / 1000 for image in images]
    # 512 * 512 / (32 * 64) = 128
    expected = [-jpeg_size(image) / 1000 * 128 / 500 for image in images]
    np.testing.assert_allclose(scores, expected, rtol=1e-6)
    assert scores.dtype == np.float32
    assert 0 > scores[0] > scores[1] > scores[2]
    assert jpeg_compressibility(images[:0])[0].shape == (0,)
