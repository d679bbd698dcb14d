"""What only a GPU can show: the same run on CUDA, in float32 and bfloat16. ``make gpu`` runs these."""

import math

import pytest
import torch

from flowgrpo_rc.trainer import FlowGRPOTrainer

pytestmark = pytest.mark.gpu

ON_GPU = ("trainer.device=auto", "trainer.test_freq=1")


def last_row(small_config, *overrides):
    folder = FlowGRPOTrainer(small_config(*ON_GPU, *overrides)).fit()
    return folder.rows()[-1]


def test_float32_first_ratio_is_one(small_config):
    """Engine and actor batch differently; on CUDA kernels then round differently too, so the bound is wider."""
    row = last_row(small_config, "actor_rollout_ref.rollout.dtype=float32")
    assert row["actor/ratio_deviation_first"] < 1e-4
    assert math.isfinite(row["actor/grad_norm"])


@pytest.mark.parametrize("actor", ["float32", "bfloat16"])
@pytest.mark.parametrize("bypass", ["true", "false"])
def test_bfloat16_rollouts_train(small_config, actor, bypass):
    row = last_row(
        small_config,
        f"actor_rollout_ref.model.dtype={actor}",
        f"algorithm.rollout_correction.bypass_mode={bypass}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=true",
    )
    assert 0 < row["actor/grad_norm"] < 1e3


def test_rollouts_equal_the_cpus(small_config):
    """Noise is drawn on the host, so float32 rewards agree to what rounding does to an image."""
    cuda = FlowGRPOTrainer(small_config(*ON_GPU, "actor_rollout_ref.rollout.dtype=float32", folder="cuda")).fit()
    cpu = FlowGRPOTrainer(
        small_config(
            "trainer.device=cpu", "trainer.test_freq=1", "actor_rollout_ref.rollout.dtype=float32", folder="cpu"
        )
    ).fit()
    assert cuda.rows()[0]["val/reward/mean"] == pytest.approx(cpu.rows()[0]["val/reward/mean"], abs=1e-3)
    assert torch.cuda.max_memory_allocated() > 0
