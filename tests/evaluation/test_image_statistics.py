"""Statistics of images: hand-worked pictures, and the spread of groups against loops over pairs."""

import io
import itertools

import numpy as np
import pytest
from PIL import Image

from flowgrpo_rc.evaluation.image_statistics import SPREADS, STATISTICS, image_statistics, spread, thumbnails


def constant(red, green, blue, side=8):
    return np.broadcast_to(np.array([red, green, blue], np.uint8), (side, side, 3))


def grey(levels):
    """An image of one channel repeated."""
    return np.repeat(np.asarray(levels, np.uint8)[..., None], 3, axis=2)


BOARD = grey(255 * (np.indices((8, 8)).sum(0) % 2))
COLUMNS = grey(np.broadcast_to(np.arange(8) * 20, (8, 8)))
# luminance, contrast, saturation, sharpness, dark_share, clipped_share
HAND_WORKED = {
    "black": (constant(0, 0, 0), 0, 0, 0, 0, 1, 1),
    "white": (constant(255, 255, 255), 1, 0, 0, 0, 0, 1),
    # 0.299 * 255 = 76; two of its channels are 0
    "red": (constant(255, 0, 0), 76 / 255, 0, 1, 0, 0, 1),
    # 25 / 255 is dark, 26 / 255 is not
    "dark grey": (constant(25, 25, 25), 25 / 255, 0, 0, 0, 1, 0),
    "grey": (constant(26, 26, 26), 26 / 255, 0, 0, 0, 0, 0),
    # a blue of 200 has a luminance of 22.8: dark, and saturated by 200 - 20
    "blue": (constant(20, 20, 200), 41 / 255, 0, 180 / 255, 0, 0, 0),
    # every neighbour is the other colour
    "checkerboard": (BOARD, 0.5, 0.5, 0, 1, 0.5, 1),
    # 0, 20, ..., 140: mean 70, variance 20^2 * 63 / 12; 20 a pixel to the right and 0 down; 0 and 20 are dark
    "gradient": (COLUMNS, 70 / 255, 20 * np.sqrt(63 / 12) / 255, 0, 10 / 255, 2 / 8, 1 / 8),
}


@pytest.mark.parametrize("name", HAND_WORKED)
def test_hand_worked_statistics(name):
    image, *expected = HAND_WORKED[name]
    found = image_statistics(image[None])
    assert tuple(found) == STATISTICS
    np.testing.assert_allclose([found[key][0] for key in STATISTICS[:-1]], expected, atol=1e-12)


def test_jpeg_bits_per_pixel():
    """The size that Pillow writes; of a large flat image its fixed part counts less."""
    noise = np.random.default_rng(0).integers(0, 256, (24, 40, 3)).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, format="JPEG", quality=95)
    assert image_statistics(noise[None])["jpeg_bits"] == pytest.approx(8 * len(buffer.getvalue()) / 960)
    small, large = (image_statistics(constant(9, 9, 9, side)[None])["jpeg_bits"][0] for side in (32, 256))
    assert large < 0.1 * small


def test_each_image_alone_and_none_at_all():
    images = np.random.default_rng(1).integers(0, 256, (5, 12, 20, 3)).astype(np.uint8)
    together = image_statistics(images)
    for name, values in together.items():
        assert values.shape == (5,)
        assert values.dtype == np.float64
        assert values.tolist() == [image_statistics(one[None])[name][0] for one in images]
    assert all(values.shape == (0,) for values in image_statistics(images[:0]).values())
    assert thumbnails(images[:0]).shape == (0, 768)


def test_thumbnails_are_means_over_boxes():
    image = np.random.default_rng(2).integers(0, 256, (64, 32, 3)).astype(np.uint8)
    boxes = image.reshape(16, 4, 16, 2, 3).mean((1, 3))
    # Pillow rounds after each direction.
    np.testing.assert_allclose(thumbnails(image[None])[0], boxes.ravel(), atol=1.01)


def test_spread_equals_loops_over_pairs():
    rng = np.random.default_rng(3)
    group = np.array([4, 0, 4, 4, 0, 7])  # one image has no partner
    features = rng.normal(size=(6, 5)) + 100 + group[:, None]
    squares = {(a, b): np.mean((features[a] - features[b]) ** 2) for a, b in itertools.combinations(range(6), 2)}
    within = np.mean([square for (a, b), square in squares.items() if group[a] == group[b]])
    between = np.mean([square for (a, b), square in squares.items() if group[a] != group[b]])
    found = spread(features, group)
    assert tuple(found) == SPREADS
    assert found["diversity"] == pytest.approx(np.sqrt(within), rel=1e-12)
    assert found["prompt_share"] == pytest.approx(1 - within / between, rel=1e-12)


def test_spread_of_bytes_counts_from_black_to_white():
    # Two groups of two: 0 and 255 in the first half of the features, equal in the second: sqrt(1 / 2).
    features = np.array([[0, 9], [255, 9], [0, 9], [255, 9]], np.uint8)
    assert spread(features, [0, 0, 1, 1])["diversity"] == pytest.approx(np.sqrt(0.5))
    # Between groups: 0, 1, 1, 0 (halved): a mean square of 1/4; within 1/2.
    assert spread(features, [0, 0, 1, 1])["prompt_share"] == pytest.approx(-1)


def test_spread_at_its_ends():
    rng = np.random.default_rng(4)
    group = np.repeat(np.arange(40), 10)
    assert abs(spread(rng.normal(size=(400, 50)), group)["prompt_share"]) < 0.01
    of_prompt = np.repeat(rng.normal(size=(40, 50)), 10, axis=0)
    assert spread(of_prompt, group) == pytest.approx({"diversity": 0.0, "prompt_share": 1.0}, abs=1e-12)
    # Half of the variance is the prompt's.
    assert spread(of_prompt + rng.normal(size=(400, 50)), group)["prompt_share"] == pytest.approx(0.5, abs=0.03)
    assert spread(np.zeros((4, 3)), [0, 0, 1, 1]) == {"diversity": 0.0, "prompt_share": 0.0}
    assert spread(np.zeros((2, 3)), [0, 1]) == {}
    assert set(spread(np.zeros((2, 3)), [0, 0])) == {"diversity"}
