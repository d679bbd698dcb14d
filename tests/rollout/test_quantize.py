"""Rounding through fp8: a row worked by hand, and what must not change."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from flowgrpo_rc.rollout import RolloutConfig
from flowgrpo_rc.rollout.quantize import round_fp8_rows, round_linear_weights


def test_a_row_by_hand():
    """Neighbours in e4m3: 1/64 apart in [1/8, 1/4), 1/32 in [1/4, 1/2), 2 in [16, 32); ties go to the even mantissa.

    The smallest number is 1/512, so half of it and less becomes 0. The second row is the first one over 448, with a
    scale of its own: the same codes.
    """
    row = torch.tensor([448.0, 0.3, -17.0, 19.0, 0.2, 1 / 600, 1 / 1025])
    expected = torch.tensor([448.0, 10 / 32, -16.0, 20.0, 13 / 64, 1 / 512, 0.0])
    rounded = round_fp8_rows(torch.stack([row, row / 448]))
    assert_close(rounded, torch.stack([expected, expected / 448]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_twice_is_rounding_once(dtype):
    weight = torch.randn(64, 257, generator=torch.Generator().manual_seed(0)).to(dtype)
    once = round_fp8_rows(weight)
    assert once.dtype == dtype
    assert torch.equal(round_fp8_rows(once), once)
    assert torch.equal(once.abs().amax(1), weight.abs().amax(1))
    error = (once.float() - weight.float()).abs() / weight.float().abs().amax(1, keepdim=True)
    assert 0.005 < error.max() < 1 / 28 + 1 / 256  # half a step of the top binade, 16 of 448; dtype's own rounding


def test_zero_rows_stay_zero_and_scales_do_not_mix():
    weight = torch.tensor([[0.0, 0.0], [1e-30, -1e-30], [1e6, 1.0]])
    assert_close(round_fp8_rows(weight), torch.tensor([[0.0, 0.0], [1e-30, -1e-30], [1e6, 0.0]]), rtol=1e-6, atol=0)


def test_linear_weights_alone_are_rounded_and_replaced():
    module = nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    nn.init.normal_(module[1].weight, generator=torch.Generator().manual_seed(0))
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    held = dict(module.named_parameters())
    round_linear_weights(module, adapter=True)  # it has no adapter
    assert all(p is held[name] for name, p in module.named_parameters())
    round_linear_weights(module, adapter=False)
    for name, parameter in module.named_parameters():
        rounded = name in ("0.weight", "2.weight")
        assert (parameter is held[name]) is not rounded
        assert torch.equal(parameter, round_fp8_rows(before[name]) if rounded else before[name])
        assert torch.equal(held[name], before[name])


def test_unknown_quantization_names_the_field():
    with pytest.raises(ValueError, match="actor_rollout_ref.rollout.quantization: got 'int4'; choose one of fp8"):
        RolloutConfig(quantization="int4")
    assert RolloutConfig().quantization is None
