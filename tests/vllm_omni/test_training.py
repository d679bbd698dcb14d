"""Training with rollouts in the real vllm-omni: the same run as with the ``diffusers`` engine."""

import os
import signal
import sys

import pytest

pytest.importorskip("vllm")

from tests_support import overrides_of, rows_of, run_process
from tiny_families import TINY, run_overrides
from tolerances import LOG_PROB, LOG_RATIO, adam, of_metric

from flowgrpo_rc.trainer import FlowGRPOTrainer

pytestmark = pytest.mark.process

VLLM_OMNI = "actor_rollout_ref.rollout.name=vllm_omni"
SETTINGS = ("actor_rollout_ref.rollout.dtype=float32", "trainer.total_training_steps=3")


def trained(config):
    return rows_of(FlowGRPOTrainer(config).fit().root)


def test_a_run_is_the_diffusers_engines_even_when_the_engine_is_killed_in_it(small_config):
    """Every metric of three steps; after the first step the engine's process is killed and comes back."""
    expected = trained(small_config(*SETTINGS, folder="diffusers"))
    trainer = FlowGRPOTrainer(small_config(*SETTINGS, VLLM_OMNI, folder="vllm_omni"))
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
    expected = trained(small_config(*settings, folder="diffusers"))
    got = trained(small_config(*settings, VLLM_OMNI, folder="vllm_omni"))
    assert len(got) == len(expected)
    for row, other in zip(got, expected, strict=True):
        if "reward/mean" in row:
            assert row["rollout_sync/engine_gap_abs_mean"] < LOG_RATIO
            assert row["reward/mean"] == pytest.approx(other["reward/mean"], rel=0, abs=1e-4)
            assert row["actor/grad_norm"] == pytest.approx(other["actor/grad_norm"], rel=2 * adam())


def test_two_processes_with_an_engine_each_are_the_run_of_one(small_config, tmp_path):
    """Two gloo processes start two engines, push the adapter to both, prove both, and learn what one process learns."""
    settings = (
        "trainer.resume_mode=disable",
        "trainer.total_training_steps=2",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "actor_rollout_ref.rollout.dtype=float32",
    )
    single = trained(small_config(*settings, folder="one"))
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"),
        *("-m", "flowgrpo_rc.cli.main", "demo", *overrides_of(tmp_path / "two", *settings, VLLM_OMNI)),
    ]
    done = run_process(*command, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    got = rows_of(tmp_path / "two")
    assert [row["step"] for row in got] == [row["step"] for row in single]
    for row, other in zip(got, single, strict=True):
        assert row["rollout_sync/engine_gap_abs_max"] <= LOG_PROB
        for name in ("reward/mean", "actor/pg_loss", "actor/grad_norm", "actor/ppo_kl", "actor/pg_clipfrac"):
            bound = of_metric(name, other, dimensions=512, pixels=3072, steps=2)
            assert row[name] == pytest.approx(other[name], rel=0, abs=bound), name
