"""Whole runs of the tiny Stable Diffusion 3."""

import json

import pytest
from tolerances import LOG_PROB

from flowgrpo_rc.trainer import FlowGRPOTrainer

CFG_SCALE = 4.5
GAPS = {
    "bypass": "actor/log_ratio_abs_mean_first",
    "decoupled": "rollout_corr/logprob_abs_diff_mean",
}


def overrides(path, *more):
    return (
        f"actor_rollout_ref.model.path={path}",
        "actor_rollout_ref.rollout.dtype=float32",
        "actor_rollout_ref.rollout.pipeline.max_sequence_length=24",
        f"actor_rollout_ref.rollout.pipeline.true_cfg_scale={CFG_SCALE}",
        *more,
    )


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.portable
@pytest.mark.parametrize("mode", ["bypass", "decoupled"])
def test_a_run_has_no_gap_and_updates(small_config, tiny_sd3_path, mode):
    bypass = f"algorithm.rollout_correction.bypass_mode={mode == 'bypass'}"
    trainer = FlowGRPOTrainer(small_config(*overrides(tiny_sd3_path, bypass)))
    requests, generate = [], trainer.run.engine.generate

    def watch(request):
        requests.append(request)
        return generate(request)

    trainer.run.engine.generate = watch
    steps = [row for row in rows_of(trainer.fit().root) if "reward/mean" in row]
    assert len(steps) == 2
    for row in steps:
        assert row[GAPS[mode]] < LOG_PROB
        assert row["rollout_sync/engine_gap_abs_mean"] < LOG_PROB
        assert row["actor/grad_norm"] > 0
        assert row["reward/std"] > 0
    for request in requests:
        cond = request.conditioning
        assert cond.true_cfg_scale == CFG_SCALE
        assert cond.prompts.pooled.shape == cond.negative.pooled.shape
        assert cond.prompts.mask is None
    prompts = {p.prompt for p in (*trainer.run.train_prompts, *trainer.run.val_prompts)}
    assert trainer.run.encoding.prompts == len(prompts) + 1


def test_the_embedded_guidance_of_the_pipeline_is_refused_before_training(small_config, tiny_sd3_path, tmp_path):
    config = small_config(*overrides(tiny_sd3_path, "actor_rollout_ref.rollout.pipeline.guidance_scale=4.5"))
    with pytest.raises(ValueError, match="guidance_scale: got 4.5 .* true_cfg_scale=4.5"):
        FlowGRPOTrainer(config)
    assert not (tmp_path / "run").exists()
