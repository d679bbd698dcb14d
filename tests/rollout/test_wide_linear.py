"""16-bit linear layers where the processor has no kernel for them."""

import pytest
import torch
import torch.nn.functional as F
from rollout_cases import random_like, request_for
from torch import nn
from torch.testing import assert_close

from flowgrpo_rc.models import ModelConfig
from flowgrpo_rc.models.lora import adapter_state
from flowgrpo_rc.rollout import DiffusersEngine, wide_linear

CPU = torch.device("cpu")


@pytest.fixture
def slow(monkeypatch):
    """A processor without 16-bit kernels."""
    monkeypatch.setattr(wide_linear, "has_fast_linear", lambda dtype, device: dtype == torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_rounds_the_exact_sum_once(slow, dtype, bias):
    torch.manual_seed(0)
    layer = nn.Linear(48, 32, bias=bias).to(dtype)
    x = torch.randn(2, 5, 48).to(dtype)
    with torch.no_grad(), wide_linear.linear_layers(dtype, CPU):
        found = layer(x)
    exact = F.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
    assert found.dtype == dtype
    # Half a digit of 16 bits for the one rounding, and float32's for the sum; a second rounding would double it.
    assert ((found.double() - exact).abs() <= 0.51 * torch.finfo(dtype).eps * exact.abs() + 1e-6).all()


def test_other_precisions_and_places_are_left_alone(slow):
    layer, x = nn.Linear(8, 4), torch.randn(3, 8)
    with wide_linear.linear_layers(torch.bfloat16, CPU):
        inside = layer(x)
    assert torch.equal(inside, layer(x))
    assert inside.requires_grad


def test_a_device_with_kernels_of_its_own_is_fast():
    assert all(wide_linear.has_fast_linear(torch.bfloat16, torch.device(name)) for name in ("cuda", "meta"))
    assert wide_linear.has_fast_linear(torch.float32, CPU)
    same = wide_linear.has_fast_linear(torch.bfloat16, CPU)
    assert same is bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@pytest.mark.run
def test_an_engine_draws_the_same_within_its_precision(tiny_model, slow, monkeypatch):
    """Images of both ways differ by rounding alone: far less than bfloat16 and float32 do."""

    def latents(dtype, shared_kernels):
        monkeypatch.setattr(wide_linear, "has_fast_linear", lambda *_: shared_kernels)
        lora = ModelConfig(lora_rank=4, lora_alpha=4)
        engine = DiffusersEngine(tiny_model, lora, dtype=dtype, micro_batch_size=6, device="cpu")
        state = random_like(adapter_state(engine.transformer, engine.adapter), 0.02)
        engine.sync(state, 0)
        batch = engine.generate(request_for(tiny_model)).batch
        engine.close()
        return batch["next_latents"], batch["rollout_log_probs"]

    wide, plain, exact = (
        latents(*case) for case in ((torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, True))
    )
    apart, rounding = ((a[0] - exact[0]).square().mean().sqrt() for a in (wide, plain))
    assert 0 < apart < 1.5 * rounding
    assert_close(wide[1], plain[1], atol=2e-2, rtol=0)
