"""Intervals of shares over images: their coverage by simulation, their limits, and how many images would settle one."""

import math
from functools import cache

import numpy as np
import pytest
import torch

from flowgrpo_rc.gap.intervals import (
    CONFIDENCE,
    agresti_coull,
    images_to_settle,
    looks,
    mean_interval,
    share_interval,
    student_quantile,
)


def interval_of(hits, steps, confidence=CONFIDENCE):
    """Of images with ``hits`` of ``steps`` samples each."""
    return _interval(tuple(sorted(int(hit) for hit in hits)), steps, confidence)


@cache
def _interval(hits, steps, confidence):
    counts = torch.tensor(hits)[:, None]
    found = torch.arange(steps).expand(len(hits), steps) < counts
    images = torch.arange(len(hits))[:, None].expand(found.shape)
    return share_interval(found.flatten(), torch.ones_like(found).flatten(), images.flatten(), confidence)


def draws(share, alike, images, steps, times, generator):
    """Hits of each image in beta-binomial experiments: ``alike`` is the correlation of two steps of one image."""
    if alike == 0 or share == 0:
        return generator.binomial(steps, share, (times, images))
    rest = (1 - alike) / alike
    return generator.binomial(steps, generator.beta(share * rest, (1 - share) * rest, (times, images)))


@pytest.mark.parametrize("share", [0.0, 0.02, 0.1, 0.25, 0.5])
@pytest.mark.parametrize("images", [8, 16, 64, 256])
def test_the_interval_holds_the_share_as_often_as_it_says(images, share):
    """Down to the least favourable of these cases, half of 16 single samples, where 95 % of any interval is 92 %."""
    generator = np.random.default_rng(0)
    times = 1500 if images < 64 else 500
    missed_above = []
    for steps, alike in ((1, 0.0), (2, 0.0), (2, 0.3), (3, 0.6), (4, 0.1), (4, 0.4), (4, 0.9)):
        found = [interval_of(hits, steps) for hits in draws(share, alike, images, steps, times, generator)]
        held = np.mean([i.low <= share <= i.high for i in found])
        assert held > 0.915, (steps, alike, held)
        missed_above.append(np.mean([i.high < share for i in found]))
        if share == 0.5 and steps == 4 and alike == 0.1:  # and is no wider than it must be
            assert held < 0.985
    assert np.mean(missed_above) < 0.04  # a share called smaller than it is: the error that costs a run


def test_agresti_and_coull_by_hand():
    """At two standard deviations it adds two successes and two failures: 5 of 10 is 7 of 14 plus or minus 2 se."""
    two = math.erf(2 / math.sqrt(2))
    low, high = agresti_coull(0.5, 10, two)
    assert (low, high) == (pytest.approx(0.5 - 2 * math.sqrt(0.25 / 14)), pytest.approx(0.5 + 2 * math.sqrt(0.25 / 14)))
    low, high = agresti_coull(0.0, 16, two)
    assert (low, high) == (0.0, pytest.approx(0.1 + 2 * math.sqrt(0.09 / 20)))


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("images", [2, 16, 500])
def test_a_share_of_0_or_1_is_not_a_point(images, steps):
    """And all steps of an image count as one there, since nothing tells how alike they are."""
    none = interval_of([0] * images, steps)
    every = interval_of([steps] * images, steps)
    assert none.low == 0.0
    assert 2 / images < none.high < 5 / images or images == 2
    assert none.effective == every.effective == images
    assert every.high == 1.0
    assert every.low == pytest.approx(1 - none.high)


def test_what_is_not_used_does_not_count():
    """Rejected samples leave the share's denominator; images of which nothing is left are no images."""
    hits = torch.tensor([True, False, True, True])
    images = torch.tensor([0, 0, 1, 2])
    used = torch.tensor([True, True, False, True])
    found = share_interval(hits, used, images)
    assert found == share_interval(hits[used], used[used], images[used])
    assert found.effective <= 2
    nothing = share_interval(hits, torch.zeros(4, dtype=torch.bool), images)
    assert (nothing.low, nothing.high, nothing.effective) == (0.0, 1.0, 0.0)


def test_the_interval_of_a_mean_holds_it():
    """Four steps of an image around a value of its own; of one image nothing follows."""
    generator = torch.Generator().manual_seed(0)
    held = 0
    for _ in range(600):
        values = 3 + torch.randn(12, 1, generator=generator) + 0.1 * torch.randn(12, 4, generator=generator)
        images = torch.arange(12)[:, None].expand(12, 4)
        found = mean_interval(values.double().flatten(), images.flatten())
        held += found.low <= 3 <= found.high
    assert 0.925 < held / 600 < 0.975
    alone = mean_interval(torch.tensor([1.0, 2.0]).double(), torch.zeros(2, dtype=torch.long))
    assert (alone.low, alone.high) == (-math.inf, math.inf)


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (7, 2.365), (15, 2.131), (63, 1.998)]
)
def test_student_s_quantiles(freedom, quantile):
    """Printed tables of the two-sided 95 % quantiles."""
    assert student_quantile(0.95, freedom) == pytest.approx(quantile, rel=6e-3)


def test_the_looks_double_and_share_one_chance_of_an_error():
    assert [count for count, _ in looks(16, 128)] == [16, 32, 64, 128]
    assert [count for count, _ in looks(16, 100)] == [16, 32, 64, 100]
    assert looks(16, 16) == [(16, pytest.approx(0.95))]
    for start, end in ((16, 128), (2, 4096), (16, 17)):
        found = looks(start, end)
        assert sum(1 - confidence for _, confidence in found) == pytest.approx(0.05)
        assert all(confidence >= 0.95 for _, confidence in found)


def test_looking_until_it_suits_is_wrong_no_more_often_than_looking_once():
    """At the limit itself every decision is wrong; with 95 % at each of five looks more than one run in ten decides."""
    generator = np.random.default_rng(3)
    wrong = {"spent": 0, "each": 0}
    for _ in range(600):
        hits = generator.binomial(2, 0.25, 256)
        for name in wrong:
            for count, confidence in looks(16, 256):
                found = interval_of(hits[:count], 2, confidence if name == "spent" else 0.95)
                if found.high < 0.25 or found.low > 0.25:
                    wrong[name] += 1
                    break
    assert wrong["spent"] / 600 < 0.05
    assert wrong["each"] / 600 > 0.1


@pytest.mark.parametrize(("share", "limit"), [(0.23, 0.25), (0.31, 0.25), (0.0, 0.25), (0.0, 0.01), (1.0, 0.5)])
def test_as_many_images_as_it_says_settle_it(share, limit):
    images = images_to_settle(share, 20.0, 16, limit, most=4096)
    assert images is not None

    def one_side(count):
        low, high = agresti_coull(share, 20 * count / 16)
        return high < limit or low > limit

    assert one_side(images)
    assert images == 1 or not one_side(images - 1)
