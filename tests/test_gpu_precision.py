"""Precision on a GPU: the gap of equal and of other kernels, TF32, compiled blocks, 8 bits. ``make gpu`` runs these."""

import math

import pytest
import torch
from tiny_families import run_overrides

from flowgrpo_rc.dtypes import set_tf32
from flowgrpo_rc.trainer import FlowGRPOTrainer

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
BFLOAT16 = (f"{MODEL}.dtype=bfloat16", f"{ROLLOUT}.dtype=bfloat16")
FAMILIES = ("stable_diffusion_3", "flux_dev", "z_image", "qwen_image_edit")
"""With guidance in one forward and in two, with an embedded one, and with a picture."""


def train(small_config, *overrides):
    """The last metrics of two steps, with gradients that are finite."""
    device = "auto" if DEVICE == "cuda" else DEVICE
    row = FlowGRPOTrainer(small_config(f"trainer.device={device}", *overrides)).fit().rows()[-1]
    assert 0 < row["actor/grad_norm"] < math.inf
    return row


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("at_once", "bound"), [(4, 0.0), (1, 1e-2)])
def test_the_gap_of_equal_rows_is_zero_and_of_others_small(
    small_config, folder_of_family, tmp_path, name, at_once, bound
):
    """Prompts of unequal lengths, guidance as the family has it, a window of one step: the actor's forward has the
    engine's rows, or a quarter of them. Equal kernels leave nothing."""
    row = train(
        small_config,
        *run_overrides(name, folder_of_family(name), tmp_path / "data"),
        *BFLOAT16,
        f"{ROLLOUT}.algo.sde_window_size=1",
        f"{ROLLOUT}.micro_batch_size=4",
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={at_once}",
        f"{ROLLOUT}.probe.images=4",
    )
    assert row["rollout_sync/engine_gap_per_dimension"] <= bound


@pytest.mark.parametrize("engine", ["true", "false"])
def test_compiled_blocks_train(small_config, engine):
    """On both sides they leave float32's rounding; on one also the compiler's."""
    row = train(
        small_config, f"{MODEL}.torch_compile=true", f"{ROLLOUT}.torch_compile={engine}", f"{ROLLOUT}.dtype=float32"
    )
    assert row["rollout_sync/engine_gap_per_dimension"] < 1e-4


@pytest.mark.parametrize("allowed", [False, True])
def test_tf32_is_as_it_is_set(allowed):
    """Products of float32 numbers keep 23 bits after the point, or 10."""
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(512, 512, generator=generator) for _ in range(2))
    exact = one.double() @ other.double()
    set_tf32(allowed)
    try:
        found = (one.to(DEVICE) @ other.to(DEVICE)).cpu()
    finally:
        set_tf32(False)
    error = float((found - exact).norm() / exact.norm())
    assert error < (1e-3 if allowed else 1e-5)
    if allowed and DEVICE == "cuda" and torch.cuda.get_device_capability() >= (8, 0):
        assert error > 1e-5


@pytest.mark.parametrize("quantization", ["int8", "fp8", "nf4"])
def test_a_rounded_base_trains(small_config, quantization):
    """Engine and actor multiply the same numbers."""
    pytest.importorskip("bitsandbytes" if quantization == "nf4" else "torchao")
    row = train(small_config, *BFLOAT16, f"{MODEL}.quantization={quantization}")
    assert row["rollout_sync/engine_gap_per_dimension"] < 1e-2


@pytest.mark.parametrize("more", [(), (f"{ROLLOUT}.merge_adapter=true",), (f"{ROLLOUT}.torch_compile=true",)])
@pytest.mark.parametrize("quantization", ["null", "int8", "fp8", "fp8_emulated"])
def test_an_engine_with_weights_of_its_own_draws(small_config, quantization, more):
    """A gap there is wherever something rounds otherwise."""
    if quantization in ("int8", "fp8"):
        pytest.importorskip("torchao")
    row = train(small_config, *BFLOAT16, f"{ROLLOUT}.quantization={quantization}", *more)
    gap = row["rollout_sync/engine_gap_per_dimension"]
    assert gap < 0.05
    if quantization != "null":
        assert gap > 1e-5
