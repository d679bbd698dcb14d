"""What only a GPU can show: the gap between vllm-omni's kernels and the trainer's, and that it is rounding."""

import pytest

pytest.importorskip("vllm")

from flowgrpo_rc.trainer import FlowGRPOTrainer

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-4), ("bfloat16", 5e-3)])
def test_the_gap_on_a_gpu_is_rounding(small_config, dtype, limit):
    """Every image of two batches rescored with equal weights; the second batch with an adapter that was pushed."""
    settings = (
        "trainer.device=auto",
        "trainer.total_training_steps=2",
        "actor_rollout_ref.rollout.name=vllm_omni",
        f"actor_rollout_ref.rollout.dtype={dtype}",
        "actor_rollout_ref.rollout.probe.images=1000",
    )
    trainer = FlowGRPOTrainer(small_config(*settings))
    try:
        gaps = [trainer.train_step()["rollout_sync/engine_gap_abs_mean"] for _ in range(2)]
    finally:
        trainer.run.engine.close()
    print(f"{dtype}: mean |log ratio| {gaps[0]:.2g}, after an update {gaps[1]:.2g}")
    assert max(gaps) < limit
