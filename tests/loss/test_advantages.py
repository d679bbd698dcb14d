"""Group advantages: hand-worked tables and limits."""

import pytest
import torch
from torch.testing import assert_close

from flowgrpo_rc.loss import group_advantages, normalised_sum

# Two prompts, interleaved. Group 7: 0, 1, 2 (mean 1, population variance 2/3); group 3: 4, 4, 10 (mean 6, variance 8).
REWARDS = torch.tensor([0.0, 4.0, 1.0, 4.0, 2.0, 10.0], dtype=torch.float64)
GROUP = torch.tensor([7, 3, 7, 3, 7, 3])
CENTRED = torch.tensor([-1.0, -2.0, 0.0, -2.0, 1.0, 4.0], dtype=torch.float64)


def test_group_std():
    std = torch.tensor([(2 / 3) ** 0.5, 8**0.5] * 3, dtype=torch.float64)
    result = group_advantages(REWARDS, GROUP, eps=0.5)
    assert_close(result.advantages, CENTRED / (std + 0.5))
    assert_close(result.group_std_mean, ((2 / 3) ** 0.5 + 8**0.5) / 2)
    assert result.zero_std_fraction == 0.0


def test_global_std():
    # all six: mean 3.5, squares 12.25 + .25 + 6.25 + .25 + 2.25 + 42.25 = 63.5, variance 63.5/6
    result = group_advantages(REWARDS, GROUP, global_std=True, eps=0.0)
    assert_close(result.advantages, CENTRED / (63.5 / 6) ** 0.5)


def test_dr_grpo_leaves_the_division_out():
    assert_close(group_advantages(REWARDS, GROUP, norm_by_std=False).advantages, CENTRED)


def test_identical_rewards_give_zero_and_are_counted():
    # 0.1 * 3 does not sum exactly; the advantage must be exactly 0 all the same
    rewards = torch.tensor([0.1, 0.1, 0.1, 0.0, 1.0])
    result = group_advantages(rewards, torch.tensor([0, 0, 0, 1, 1]), eps=1e-8)
    assert result.advantages[:3].tolist() == [0.0, 0.0, 0.0]
    assert result.zero_std_fraction == 0.5


KEEP = torch.tensor([True, True, False, True, True, False])
# Kept: of group 7 the rewards 0 and 2 (mean 1, deviation 1), of group 3 twice 4.


def test_rejected_images_enter_no_mean_and_no_std():
    result = group_advantages(REWARDS, GROUP, eps=0.25, keep=KEEP)
    assert result.advantages.tolist() == [-0.8, 0.0, 0.0, 0.0, 0.8, 0.0]
    assert (result.group_std_mean, result.zero_std_fraction) == (0.5, 0.5)
    # kept rewards 0, 4, 4, 2: mean 2.5, squares 6.25 + 2.25 + 2.25 + .25 = 11, variance 11/4
    over_all = group_advantages(REWARDS, GROUP, eps=0.0, keep=KEEP, global_std=True)
    assert_close(over_all.advantages, torch.tensor([-1.0, 0, 0, 0, 1, 0], dtype=torch.float64) / (11 / 4) ** 0.5)


@pytest.mark.parametrize("global_std", [True, False])
@pytest.mark.parametrize("norm_by_std", [True, False])
def test_rejected_is_never_sampled(norm_by_std, global_std):
    generator = torch.Generator().manual_seed(0)
    rewards, group = torch.rand(40, generator=generator), torch.arange(40) % 4
    keep = torch.rand(40, generator=generator) < 0.6
    settings = {"norm_by_std": norm_by_std, "global_std": global_std}
    result = group_advantages(rewards, group, keep=keep, **settings)
    without = group_advantages(rewards[keep], group[keep], **settings)
    assert torch.equal(result.advantages[keep], without.advantages)
    assert result.advantages[~keep].abs().max() == 0
    assert result[1:] == without[1:]
    everything = group_advantages(rewards, group, keep=torch.ones(40, dtype=torch.bool), **settings)
    assert torch.equal(everything.advantages, group_advantages(rewards, group, **settings).advantages)


@pytest.mark.parametrize("global_std", [True, False])
def test_fewer_than_two_kept_teach_nothing(global_std):
    one = torch.tensor([True, False, False, False, False, False])
    result = group_advantages(REWARDS, GROUP, eps=0.0, global_std=global_std, keep=one | (GROUP == 3))
    assert result.advantages[GROUP == 7].tolist() == [0.0, 0.0, 0.0]
    assert result.zero_std_fraction == 0.5
    nothing = group_advantages(REWARDS, GROUP, global_std=global_std, keep=torch.zeros(6, dtype=torch.bool))
    assert nothing.advantages.tolist() == [0.0] * 6
    assert (nothing.group_std_mean, nothing.zero_std_fraction) == (0.0, 1.0)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32])
def test_advantages_are_float32_or_wider(dtype):
    """In the rewards' own dtype, integers would be cut to -1, 0 and 1, and bools to true."""
    rewards, group = torch.tensor([0, 1, 1, 1, 0, 0], dtype=dtype), torch.tensor([0, 0, 0, 1, 1, 1])
    # group 0: mean 2/3, group 1: mean 1/3; variance 2/9 in both
    expected = torch.tensor([-2.0, 1, 1, 2, -1, -1]) / 3 / ((2 / 9) ** 0.5 + 1e-4)
    made = group_advantages(rewards, group).advantages
    assert made.dtype == torch.float32
    assert_close(made, expected)
    assert_close(group_advantages(rewards.double(), group).advantages, expected.double(), rtol=1e-6, atol=0)
    half = group_advantages(rewards, group, keep=torch.tensor([True, True, False, True, True, False])).advantages
    assert_close(half, torch.tensor([-1.0, 1, 0, 1, -1, 0]) / 2 / (0.5 + 1e-4))


def test_errors():
    with pytest.raises(ValueError, match="1 of 2 groups hold a single image.*rollout.n must be at least 2"):
        group_advantages(torch.zeros(3), torch.tensor([0, 0, 1]))
    with pytest.raises(ValueError, match="2 non-finite values, first at index 1"):
        group_advantages(torch.tensor([0.0, torch.nan, torch.inf]), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"must both be \(B,\) with B >= 1"):
        group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.int64))


# ---------------------------------------------------------------------- several rewards, each normalised in its group

# A second reward beside REWARDS, of another scale. Group 7: 300, 100, 200 (mean 200, variance 20000/3); group 3: all 5.
SECOND = torch.tensor([300.0, 5.0, 100.0, 5.0, 200.0, 5.0], dtype=torch.float64)
PARTS = torch.stack([REWARDS, SECOND], dim=1)
WEIGHTS = torch.tensor([0.75, -0.25])


def test_each_reward_is_normalised_in_its_group_before_it_is_weighted():
    # Group 7 of the second: 100, -100 and 0 over its deviation; group 3 of it is flat and adds exactly 0.
    first = CENTRED / (torch.tensor([(2 / 3) ** 0.5, 8**0.5] * 3, dtype=torch.float64) + 0.5)
    second = torch.tensor([100.0, 0, -100, 0, 0, 0], dtype=torch.float64) / ((20000 / 3) ** 0.5 + 0.5)
    found = normalised_sum(PARTS, WEIGHTS, GROUP, eps=0.5)
    assert found.dtype == torch.float64
    assert_close(found, 0.75 * first - 0.25 * second)
    # A weight of the other sign, or weights that have changed places, are another sum.
    for wrong in (-WEIGHTS, WEIGHTS.flip(0)):
        assert (normalised_sum(PARTS, wrong, GROUP, eps=0.5) - found).abs().max() > 0.5


def test_rejected_images_enter_no_reward_s_mean():
    # Kept: of group 7 the first reward's 0 and 2 and the second's 300 and 200; of group 3 ties alone.
    found = normalised_sum(PARTS, WEIGHTS, GROUP, eps=0.25, keep=KEEP)
    expected = 0.75 * -1 / 1.25 - 0.25 * 50 / 50.25
    assert_close(found, torch.tensor([expected, 0, 0, 0, -expected, 0], dtype=torch.float64))


def test_the_sum_over_the_batch_s_deviation_is_gdpo():
    """Group normalisation of each reward, a weighted sum, and division by the batch's deviation (its mean is 0)."""
    generator = torch.Generator().manual_seed(1)
    parts = torch.rand(24, 3, generator=generator, dtype=torch.float64)
    group = torch.arange(24) % 4
    weights = torch.tensor([1.0, 0.5, 2.0])
    columns = []
    for k in range(3):
        rows = [parts[group == g, k] for g in range(4)]
        z = torch.zeros(24, dtype=torch.float64)
        for g, row in enumerate(rows):
            z[group == g] = (row - row.mean()) / (row.std(correction=0) + 1e-4)
        columns.append(weights[k].double() * z)
    total = torch.stack(columns).sum(0)
    gdpo = (total - total.mean()) / (total.std(correction=0) + 1e-4)
    assert_close(group_advantages(normalised_sum(parts, weights, group), group, global_std=True).advantages, gdpo)
