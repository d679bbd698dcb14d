"""On a GPU: the gap between vllm-omni's kernels and the trainer's is rounding."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("vllm")

from engine_pair import TIMEOUTS, request_for
from rollout_cases import random_like
from tests_support import alive, descendants, wait_until
from torch.testing import assert_close

from flowgrpo_rc.models import ModelConfig, load_model
from flowgrpo_rc.models.lora import adapter_state, attach_lora
from flowgrpo_rc.rollout import RolloutConfig, build_engine
from flowgrpo_rc.rollout.build import digest_rule
from flowgrpo_rc.rollout.config import ALONE
from flowgrpo_rc.rollout.process import process_handles
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


LORA = ModelConfig(path="asset:tiny_qwen_image", lora_rank=4, lora_alpha=8)


def adapter_of(model):
    """The adapter as it is after some training."""
    attach_lora(model.transformer, model, LORA, dtype=torch.float32)
    return random_like(adapter_state(model.transformer), 0.3, seed=3)


def test_an_engine_that_sleeps_gives_its_memory_back_and_draws_the_same(monkeypatch):
    """Drawn awake, after one sleep and after two, with an adapter that was pushed while it slept."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    model = load_model(LORA.path, device="cuda:0")
    rollout = RolloutConfig(
        name="vllm_omni", dtype="float32", micro_batch_size=6, vllm_omni=replace(TIMEOUTS, sleep=True)
    )
    engine = build_engine(rollout, model, LORA, "cuda:0")
    try:
        state = adapter_of(model)
        request = request_for(model)
        drawn = []
        for version in (1, 2):
            assert engine.sync(state, version) == digest_rule(rollout, LORA)(state)
            drawn += [engine.generate(request), engine.generate(request)]
            memory = engine.memory_metrics()
            print(memory)
            freed = memory["perf/gpu_used_engine_awake_gb"] - memory["perf/gpu_used_engine_asleep_gb"]
            networks = (model.transformer, model.pipe.vae)
            assert freed * 2**30 > 0.5 * sum(p.nbytes for n in networks for p in n.parameters())
        for other in drawn[1:]:
            assert torch.equal(other.images, drawn[0].images)
            assert other.echo.adapter_digest == drawn[0].echo.adapter_digest
    finally:
        engine.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_one_engine_on_two_gpus_draws_what_one_does():
    """Its adapter is read back whole from both, and its processes end with it."""
    model = load_model(LORA.path, device="cuda:0")
    state = adapter_of(model)
    request = request_for(model)
    drawn = []
    for devices in ("cuda:0", "cuda:0+cuda:1"):
        rollout = RolloutConfig(
            name="vllm_omni", dtype="float32", micro_batch_size=6, placement="process", devices=[devices]
        )
        (handle,) = process_handles(rollout, LORA, "cuda:0", ALONE, model)
        try:
            handle.start()
            assert handle.sync(state, 1) == digest_rule(rollout, LORA)(state)
            drawn.append(handle.generate(request))
            processes = [handle.pid, *descendants(handle.pid)]
        finally:
            handle.close()
        wait_until(lambda ended=processes: not any(map(alive, ended)))
    assert_close(drawn[0].batch["next_latents"], drawn[1].batch["next_latents"], atol=1e-3, rtol=0)
