"""Several processes: they make the same transformer calls, and the first failure of one ends all."""

import json
import os
import re

import pytest
import torch
from tests_support import TORCHRUN, free_port, overrides_of, run_process

from flowgrpo_rc.cli.errors import TRAINING, exit_code
from flowgrpo_rc.trainer import FlowGRPOTrainer
from flowgrpo_rc.trainer.setup import make_accelerator

ONE_EACH = (
    "trainer.resume_mode=disable",
    "algorithm.rollout_correction.bypass_mode=false",
    "actor_rollout_ref.rollout.probe.images=1",
    "actor_rollout_ref.rollout.adapter_lag=1",
    "actor_rollout_ref.rollout.micro_batch_size=1",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=3",
    "data.val_max_samples=3",
)
"""Uneven everywhere: one probed image and three of validation on two processes, and a call for each image sampled."""


def _count_calls(rank, folder, port):
    """Write the figures of one of two processes to ``rank_N.json``."""
    torch.set_num_threads(1)
    launch = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in launch.items()}
    import random

    from flowgrpo_rc.actor import NonFiniteUpdateError
    from flowgrpo_rc.batch import Key
    from flowgrpo_rc.cli.compose import compose
    from flowgrpo_rc.gap.probe import run_probe
    from flowgrpo_rc.trainer.checkpoint import load_run
    from flowgrpo_rc.trainer.validation import validate

    trainer = FlowGRPOTrainer(compose("tiny_qwen_image_ocr", overrides_of(folder / "run", *ONE_EACH)))
    kind = type(trainer.run.model.transformer)
    calls = []
    torch.nn.modules.module.register_module_forward_pre_hook(
        lambda module, _: calls.append(torch.is_grad_enabled()) if isinstance(module, kind) else None
    )
    found = {"calls": {}, "errors": {}}

    def count(stage, work):
        calls.clear()
        try:
            return work()
        except NonFiniteUpdateError as error:
            found["errors"][stage] = [str(error), error.samples]
        finally:
            found["calls"][stage] = list(calls)

    found["metrics"] = count("validation", lambda: validate(trainer.run, trainer.generate)).metrics
    for step in ("first step", "second step"):
        count(step, trainer.train_step)

    random.seed(rank)
    trainer.save()
    saved = random.random()
    random.seed(7)
    load_run(trainer.run, trainer.checkpoints, trainer.checkpoints.latest())
    found["random"] = [saved, random.random()]

    rollout, advantages = trainer._rollout, trainer._advantages

    def broken_latents(*arguments):
        batch, *rest = rollout(*arguments)
        if rank == 1:
            batch[Key.NEXT_LATENTS][1] = torch.nan
        return batch, *rest

    def broken_advantages(*arguments):
        values, metrics = advantages(*arguments)
        if rank == 1:
            values[2] = torch.nan
        return values, metrics

    trainer._rollout = broken_latents
    count("log-prob", trainer.train_step)
    trainer._rollout, trainer._advantages = rollout, broken_advantages
    count("gradient", trainer.train_step)
    found["prompts"] = [record.prompt for record in trainer.run.train_prompts]
    count("probe", lambda: run_probe(trainer.probed_run(), 2))
    trainer.folder.close()
    (folder / f"rank_{rank}.json").write_text(json.dumps(found))
    trainer.accelerator.end_training()


@pytest.mark.process
def test_every_process_makes_the_same_transformer_calls(tmp_path):
    """A sharded transformer hangs where they do not; counted over everything a run does, with the work dealt unevenly
    and with a sample on one process alone that is not finite."""
    torch.multiprocessing.spawn(_count_calls, (tmp_path, free_port()), nprocs=2)
    first, second = (json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in range(2))
    assert first["calls"] == second["calls"]
    calls = {stage: len(made) for stage, made in first["calls"].items()}
    # 2 images a process, where one has 1: each takes 4 steps
    assert calls["validation"] == 2 * 4
    # 8 images of 4 steps; the probed one; 4 images scored by threes; 2 mini-batches of one micro-batch
    assert calls["first step"] == 8 * 4 + 1 + 2 + 2
    assert calls["second step"] == 8 * 4 + 2 + 2 + 2  # the engine is one step behind, so the probe rescores twice
    assert calls["log-prob"] == 8 * 4 + 2 + 2 + 1
    assert calls["gradient"] == 8 * 4 + 2 + 2 + 1 + 4  # the hunt: one backward for each of 4 samples
    assert first["metrics"] == second["metrics"]
    assert set(first["errors"]) == {"log-prob", "gradient"}
    for stage, row in (("log-prob", 1), ("gradient", 2)):
        (text, none), (same, own) = first["errors"][stage], second["errors"][stage]
        assert text == same
        assert f"non-finite {stage} for 1 samples of the batch (rows [{row}] of process 1)" in text
        assert (none, own) == ([], [row])
        assert any(f"their prompts: {prompt!r}" in text for prompt in first["prompts"])
    assert first["random"][0] == first["random"][1] != second["random"][0] == second["random"][1]


JUDGE = """
import os
asked = 0

def compute_score(images, prompts, metadata):
    global asked
    asked += 1
    if asked == 2 and os.environ["RANK"] == "1":
        raise ConnectionError("the judge is out of reach")
    return images.reshape(len(images), -1).mean(1) / 255
"""


@pytest.mark.process
def test_an_exception_of_one_process_ends_all_and_the_launcher_reports_it(small_config, tmp_path):
    """The run folder is as after a failure of a run of one process: it resumes."""
    (tmp_path / "judge.py").write_text(JUDGE)
    settings = (
        "trainer.total_training_steps=3",
        "trainer.save_freq=1",
        "trainer.val_before_train=false",
        "trainer.resume_mode=auto",
    )
    reward = f"reward.custom_reward_function.path={tmp_path / 'judge.py'}"
    overrides = overrides_of(tmp_path / "run", *settings, reward)
    done = run_process(*TORCHRUN, "-m", "flowgrpo_rc.cli.main", "demo", *overrides)
    assert done.returncode == 1
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("[rank 1] error: ")]
    assert "the judge is out of reach" in error
    report = done.stderr.split("Root Cause")[1]
    assert re.search(r"rank +: 1 ", report)
    assert "the judge is out of reach" in report
    states = torch.load(tmp_path / "run" / "checkpoints" / "step_1" / "optimizer.pt", weights_only=True)["random"]
    assert len(states) == 2
    trainer = FlowGRPOTrainer(small_config(*settings))
    assert trainer.step == 1
    trainer.folder.close()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:4", "has failed or was killed"),
        ("[/gloo/transport/tcp/buffer.cc:81] Timed out waiting 600000ms for recv", "raise actor_rollout_ref.nccl_time"),
    ],
)
def test_gloos_errors_about_other_processes_are_explained(text, says, capsys):
    assert exit_code(RuntimeError(text), phase=TRAINING) == 1
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "seconds"),
    [
        ((), 600),
        (("actor_rollout_ref.nccl_timeout=50",), 50),
        (("actor_rollout_ref.rollout.placement=process",), 960),
        (("actor_rollout_ref.rollout.placement=process", "actor_rollout_ref.rollout.process.start_timeout_s=30"), 600),
        (("actor_rollout_ref.rollout.placement=ray",), 960),
        (("reward.reward_model.enable=true", "reward.reward_model.model_path=m"), 1860),
    ],
)
def test_processes_wait_until_all_that_one_of_them_starts_is_up(small_config, overrides, seconds):
    assert small_config(*overrides).longest_wait == seconds


@pytest.mark.parametrize("allowed", [True, False])
def test_tf32_is_set_for_products_and_convolutions(small_config, allowed):
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    try:
        make_accelerator(small_config(f"actor_rollout_ref.model.allow_tf32={str(allowed).lower()}"))
        assert torch.backends.cuda.matmul.allow_tf32 is torch.backends.cudnn.allow_tf32 is allowed
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
