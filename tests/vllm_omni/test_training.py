"""Training with rollouts in the real vllm-omni: the same run as with the ``diffusers`` engine."""

import json
import os
import signal

import pytest

pytest.importorskip("vllm")

from tiny_families import TINY, run_overrides
from tolerances import LOG_RATIO, adam

from flowgrpo_rc.run_folder import TIMING_PREFIXES
from flowgrpo_rc.trainer import FlowGRPOTrainer

pytestmark = pytest.mark.process

SETTINGS = ("actor_rollout_ref.rollout.dtype=float32", "trainer.total_training_steps=3")


def rows_of(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(x).items() if not k.startswith(TIMING_PREFIXES)} for x in lines]


def test_a_run_is_the_diffusers_engines_even_when_the_engine_is_killed_in_it(small_config):
    """Every metric of three steps; after the first step the engine's process is killed and comes back."""
    expected = rows_of(FlowGRPOTrainer(small_config(*SETTINGS, folder="diffusers")).fit().root)
    name = "actor_rollout_ref.rollout.name=vllm_omni"
    trainer = FlowGRPOTrainer(small_config(*SETTINGS, name, folder="vllm_omni"))
    engine, generate = trainer.run.engine, trainer.run.engine.generate
    calls = []

    def generate_and_kill_once(request):
        calls.append(request)
        if len(calls) == 2:
            os.kill(engine.pid, signal.SIGKILL)
        return generate(request)

    engine.generate = generate_and_kill_once
    with pytest.warns(UserWarning, match="died of signal 9"):
        got = rows_of(trainer.fit().root)
    assert engine.restarts == 1
    assert [row.keys() for row in got] == [row.keys() for row in expected]
    compared = 0
    for row, other in zip(got, expected, strict=True):
        for key, value in other.items():
            if isinstance(value, float) and key.startswith(("reward", "actor", "critic", "rollout")):
                assert row[key] == pytest.approx(value, rel=2 * adam(), abs=1e-4), key
                compared += 1
    assert compared > 20
    gaps = [row["rollout_sync/engine_gap_abs_mean"] for row in got if "reward/mean" in row]  # not of the validation
    assert len(gaps) == 3
    assert max(gaps) < LOG_RATIO


def test_a_run_with_reference_images_is_the_diffusers_engines(small_config, tmp_path):
    """From prompt files with two images a prompt to the update; the second step samples with a pushed adapter."""
    model = str(tmp_path / "model")
    TINY["qwen_image_edit_plus_2511"].build().save_pretrained(model)
    settings = run_overrides("qwen_image_edit_plus_2511", model, tmp_path / "data")
    expected, got = (
        rows_of(
            FlowGRPOTrainer(small_config(*settings, f"actor_rollout_ref.rollout.name={name}", folder=name)).fit().root
        )
        for name in ("diffusers", "vllm_omni")
    )
    assert len(got) == len(expected)
    for row, other in zip(got, expected, strict=True):
        if "reward/mean" in row:
            assert row["rollout_sync/engine_gap_abs_mean"] < LOG_RATIO
            assert row["reward/mean"] == pytest.approx(other["reward/mean"], rel=0, abs=1e-4)
            assert row["actor/grad_norm"] == pytest.approx(other["actor/grad_norm"], rel=2 * adam())
