"""Whole runs of the tiny model: reproducible, resumable, with everything a run folder promises."""

import json
import os
import signal
import sys

import numpy as np
import pytest
import torch
from tests_support import overrides_of, run_process
from tolerances import RATIO, adam, of_metric

from flowgrpo_rc.models import load_model
from flowgrpo_rc.models.lora import adapter_state
from flowgrpo_rc.paths import shipped
from flowgrpo_rc.trainer import CheckpointError, FlowGRPOTrainer
from flowgrpo_rc.trainer.run_folder import TIMING_PREFIXES


def rows_of(folder):
    """``metrics.jsonl`` without what depends on the machine's speed."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(x).items() if not k.startswith(TIMING_PREFIXES)} for x in lines]


def adapter_of(folder):
    from safetensors.torch import load_file

    return load_file(folder / "lora" / "pytorch_lora_weights.safetensors")


def file_name(name):
    """How a parameter of the adapter is called in its file."""
    return f"transformer.{name.replace('.default', '')}"


def distance(a, b):
    """The norm of the difference of two adapters."""
    assert a.keys() == b.keys()
    return float(torch.cat([(a[name] - b[name]).flatten() for name in a]).norm())


@pytest.mark.portable
def test_same_seed_same_run(small_config):
    first = FlowGRPOTrainer(small_config(folder="a")).fit()
    again = FlowGRPOTrainer(small_config(folder="b")).fit()
    other = FlowGRPOTrainer(small_config("trainer.seed=7", folder="c")).fit()
    assert rows_of(first.root) == rows_of(again.root)
    assert all(torch.equal(v, adapter_of(again.root)[k]) for k, v in adapter_of(first.root).items())
    assert rows_of(first.root) != rows_of(other.root)


def test_run_folder_holds_what_it_promises(finished_run):
    folder = finished_run.root
    rows = rows_of(folder)
    assert [r["step"] for r in rows] == [0, 1, 2]
    assert "val/reward/mean" in rows[0]
    for name in (
        "reward/mean",
        "actor/pg_loss",
        "actor/rollout_corr/kl",
        "actor/grad_norm",
        "val/reward/mean",
    ):
        assert name in rows[2]
    timings = json.loads((folder / "metrics.jsonl").read_text().splitlines()[1])
    stages = ("rollout", "reward", "advantage", "score", "correct", "update", "sync")
    assert all(timings[f"timing_s/{stage}"] >= 0 for stage in stages)
    expected = (
        "summary.png",
        "config.yaml",
        "checkpoints/latest",
        "checkpoints/step_1/trainer_state.json",
        "checkpoints/step_2/pytorch_lora_weights.safetensors",
        "lora/pytorch_lora_weights.safetensors",
        "samples/step_00000.png",
        "samples/before_after.png",
        "plots/reward.png",
        "plots/clip_fraction.png",
        "plots/log_prob_gap.png",
        "plots/rejected_fraction.png",
    )
    assert [name for name in expected if not (folder / name).is_file()] == []
    assert (folder / "checkpoints" / "latest").read_text() == "step_2"


def test_final_lora_draws_the_actors_image_in_plain_diffusers(small_config):
    trainer = FlowGRPOTrainer(small_config("actor_rollout_ref.actor.optim.lr=0.01"))
    folder = trainer.fit().root

    def draw(pipe):
        generator = torch.Generator().manual_seed(0)
        call = {
            "height": 32,
            "width": 32,
            "num_inference_steps": 4,
            "true_cfg_scale": 1.0,
            "output_type": "np",
        }
        return pipe(prompt='the text "42"', generator=generator, **call).images

    trained = draw(trainer.run.model.pipe)
    fresh = load_model("asset:tiny_qwen_image").pipe
    base = draw(fresh)
    fresh.load_lora_weights(str(folder / "lora"))
    assert np.array_equal(draw(fresh), trained)
    assert not np.array_equal(base, trained)


def test_resumed_run_equals_an_uninterrupted_one(small_config):
    """Six steps in one go, and three, stop, three."""
    whole = FlowGRPOTrainer(small_config("trainer.total_training_steps=6", folder="whole")).fit().root
    auto = ("trainer.resume_mode=auto", "trainer.save_freq=3")
    first = FlowGRPOTrainer(small_config("trainer.total_training_steps=6", *auto, folder="parts"))
    original = first.train_step

    def stop_after_four():
        if first.step == 4:
            raise ConnectionError("power cut")
        return original()

    first.train_step = stop_after_four
    with pytest.raises(ConnectionError):
        first.fit()
    assert [r["step"] for r in rows_of(first.folder.root)] == [0, 1, 2, 3, 4]
    second = FlowGRPOTrainer(small_config("trainer.total_training_steps=6", *auto, folder="parts"))
    assert second.step == 3
    resumed = second.fit().root
    strip = [{k: v for k, v in r.items() if not k.startswith("val/")} for r in rows_of(whole)]
    assert [{k: v for k, v in r.items() if not k.startswith("val/")} for r in rows_of(resumed)] == strip
    assert all(torch.equal(v, adapter_of(resumed)[k]) for k, v in adapter_of(whole).items())


KILLED = """
import os, signal, sys
from flowgrpo_rc.cli.compose import compose
from flowgrpo_rc.trainer import FlowGRPOTrainer
import flowgrpo_rc.trainer.resume as module
import torch
torch.set_num_threads(1)
config = compose("tiny_qwen_image_ocr", sys.argv[2:])
trainer = FlowGRPOTrainer(config)
original = module.save_lora
def save_and_die(model, transformer, folder):
    original(model, transformer, folder)
    if trainer.step == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
module.save_lora = save_and_die
trainer.fit()
"""


@pytest.mark.slow
def test_twenty_steps_survive_a_kill_in_the_middle_of_a_checkpoint(small_config, tmp_path):
    """``kill -9`` while step 15's checkpoint is being written: step 10's is intact, and the run ends the same."""
    whole = FlowGRPOTrainer(small_config("trainer.total_training_steps=20", folder="whole")).fit().root
    settings = ("trainer.total_training_steps=20", "trainer.save_freq=5", "trainer.resume_mode=auto")
    command = [sys.executable, "-c", KILLED, "15", *overrides_of(tmp_path / "killed", *settings)]
    killed = run_process(*command)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    root = tmp_path / "killed"
    assert (root / "checkpoints" / "latest").read_text() == "step_10"
    assert (root / "checkpoints" / ".step_15.writing").is_dir()
    trainer = FlowGRPOTrainer(small_config(*settings, folder="killed"))
    assert trainer.step == 10
    trainer.fit()
    assert rows_of(root) == rows_of(whole)
    assert all(torch.equal(v, adapter_of(root)[k]) for k, v in adapter_of(whole).items())
    assert not (root / "checkpoints" / ".step_15.writing").exists()


@pytest.mark.portable
@pytest.mark.slow
@pytest.mark.parametrize("decoupled", [False, True])
def test_two_processes_give_the_update_of_one(small_config, tmp_path, decoupled):
    """The same images, the same optimizer steps, dealt out over two gloo processes."""
    settings = ("trainer.resume_mode=disable", "actor_rollout_ref.rollout.dtype=float32")
    if decoupled:  # the second batch is drawn with a late adapter, so that rejection has something to reject
        band = "algorithm.rollout_correction.rollout_rs_threshold='0.999_1.0005'"
        lag = "actor_rollout_ref.rollout.adapter_lag=1"
        settings += ("algorithm.rollout_correction.bypass_mode=false", *REJECTING, band, f"{BASELINE}=true", lag)
    trainer = FlowGRPOTrainer(small_config(*settings, folder="one"))
    start = {file_name(n): v.clone() for n, v in adapter_state(trainer.run.actor.transformer).items()}
    one = trainer.fit().root
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"),
        *("-m", "flowgrpo_rc.cli.main", "demo"),
        *overrides_of(tmp_path / "two", *settings),
    ]
    done = run_process(*command, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    assert "on 2 process(es)" in " ".join(done.stdout.split())
    single, double = rows_of(one), rows_of(tmp_path / "two")
    assert [r["step"] for r in single] == [r["step"] for r in double]
    assert (0.1 < single[-1]["actor/kept_fraction"] < 0.9) is decoupled
    for a, b in zip(single, double, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            bound = of_metric(name, a, dimensions=512, pixels=3072, steps=2)
            assert b[name] == pytest.approx(a[name], rel=0, abs=bound), name
    learned = adapter_of(one)
    update, apart = distance(start, learned), distance(adapter_of(tmp_path / "two"), learned)
    assert update > 1e-3
    # the update of other images, or of half of them, would be about as far away as it is long
    assert apart < adam() * update


def test_stopping_signal_ends_after_the_step_with_a_checkpoint(small_config):
    trainer = FlowGRPOTrainer(small_config("trainer.total_training_steps=50"))
    original = trainer.train_step

    def interrupted():
        if trainer.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return original()

    trainer.train_step = interrupted
    before = signal.getsignal(signal.SIGTERM)
    folder = trainer.fit().root
    assert [r["step"] for r in rows_of(folder)] == [0, 1, 2]
    assert (folder / "checkpoints" / "latest").read_text() == "step_2"
    assert signal.getsignal(signal.SIGTERM) == before


def test_checkpoint_of_another_model_is_refused(small_config):
    first = FlowGRPOTrainer(small_config("trainer.save_freq=1", "trainer.total_training_steps=1")).fit().root
    path = f"trainer.resume_from_path={first / 'checkpoints' / 'step_1'}"
    other = small_config("actor_rollout_ref.model.lora_rank=4", "trainer.resume_mode=resume_path", path, folder="other")
    with pytest.raises(CheckpointError, match="checkpoint of another model: lora rank is 8 there and 4 here"):
        FlowGRPOTrainer(other)
    state = first / "checkpoints" / "step_1" / "trainer_state.json"
    edited = json.loads(state.read_text())
    edited["fingerprint"]["transformer"]["num_layers"] = 60
    state.write_text(json.dumps(edited))
    with pytest.raises(CheckpointError, match="another model: transformer num_layers is 60 there and 4 here"):
        FlowGRPOTrainer(small_config("trainer.resume_mode=resume_path", path, folder="third"))
    state.unlink()
    with pytest.raises(CheckpointError, match="holds no trainer_state.json, so it is not a complete checkpoint"):
        FlowGRPOTrainer(small_config("trainer.resume_mode=resume_path", path, folder="fourth"))


def test_a_state_of_another_version_is_refused(small_config):
    first = FlowGRPOTrainer(small_config("trainer.save_freq=1", "trainer.total_training_steps=1")).fit().root
    checkpoint = first / "checkpoints" / "step_1"
    state = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    del state["guard"]["returns"]
    torch.save(state, checkpoint / "optimizer.pt")
    path = f"trainer.resume_from_path={checkpoint}"
    with pytest.raises(CheckpointError, match="step_1: its state of guard is of another version .KeyError: 'returns'"):
        FlowGRPOTrainer(small_config("trainer.resume_mode=resume_path", path, folder="other"))


def test_finished_run_says_so_and_does_nothing(small_config, capsys):
    settings = ("trainer.resume_mode=auto", "trainer.save_freq=1", "trainer.total_training_steps=1")
    folder = FlowGRPOTrainer(small_config(*settings)).fit().root
    before = rows_of(folder)
    FlowGRPOTrainer(small_config(*settings)).fit()
    assert rows_of(folder) == before
    assert "already at step 1 of 1" in " ".join(capsys.readouterr().out.split())


def test_fresh_runs_do_not_overwrite_each_other(small_config):
    one = "trainer.total_training_steps=1"
    first = FlowGRPOTrainer(small_config(one)).fit().root
    second = FlowGRPOTrainer(small_config(one)).fit().root
    assert second.name == f"{first.name}-2"
    assert rows_of(first) == rows_of(second)


NO_PROBE = "actor_rollout_ref.rollout.probe.images=0"
"""It has a scoring pass of its own."""


def test_bypass_skips_the_scoring_pass(small_config):
    calls = {}
    for mode in ("true", "false"):
        bypass = f"algorithm.rollout_correction.bypass_mode={mode}"
        trainer = FlowGRPOTrainer(small_config(bypass, NO_PROBE, folder=mode))
        original, calls[mode] = trainer.run.actor.score, 0

        def counted(*args, _original=original, _mode=mode):
            calls[_mode] += 1
            return _original(*args)

        trainer.run.actor.score = counted
        folder = trainer.fit().root
        prefix = "actor/rollout_corr/" if mode == "true" else "rollout_corr/"
        assert rows_of(folder)[-1][f"{prefix}logprob_abs_diff_mean"] > 0
    assert calls == {"true": 0, "false": 2}


def test_trackers_receive_the_metrics(small_config, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    folder = FlowGRPOTrainer(small_config("trainer.logger=[tensorboard,wandb]")).fit().root
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = next(folder.rglob("events.out.tfevents.*"))
    accumulator = EventAccumulator(str(events.parent)).Reload()
    rewards = [e.value for e in accumulator.Scalars("reward/mean")]
    assert rewards == pytest.approx([r["reward/mean"] for r in rows_of(folder) if "reward/mean" in r])
    assert list((folder / "wandb").glob("offline-run-*"))


def test_time_of_a_step_is_the_sum_of_its_stages(finished_run):
    row = finished_run.rows()[1]
    stages = [v for k, v in row.items() if k.startswith("timing_s/") and k != "timing_s/step"]
    assert row["timing_s/step"] == pytest.approx(sum(stages))


@pytest.mark.parametrize("bypass", ["true", "false"])
@pytest.mark.parametrize("mode", ["grpo_guard", "flow_dppo"])
def test_objectives_that_compare_means_train_in_both_modes(small_config, mode, bypass):
    """With float32 rollouts the engine's means are the actor's, so the first ratio is 1 in either mode."""
    config = small_config(
        f"actor_rollout_ref.actor.diffusion_loss.loss_mode={mode}",
        f"algorithm.rollout_correction.bypass_mode={bypass}",
        "actor_rollout_ref.rollout.dtype=float32",
    )
    row = FlowGRPOTrainer(config).fit().rows()[-1]
    assert row["actor/ratio_deviation_first"] < RATIO
    assert row["actor/grad_norm"] > 0


def decoupled_runs(small_config, *overrides):
    """Rows, score calls and adapter of one decoupled run with ``score=auto`` and ``score=always``; how both started."""
    results = {}
    for score in ("auto", "always"):
        config = small_config(
            "algorithm.rollout_correction.bypass_mode=false",
            f"actor_rollout_ref.actor.score={score}",
            NO_PROBE,
            *overrides,
            folder=f"{score}{len(overrides)}",
        )
        trainer, images = FlowGRPOTrainer(config), []
        start = {file_name(n): v.clone() for n, v in adapter_state(trainer.run.actor.transformer).items()}
        original = trainer.run.actor.score
        trainer.run.actor.score = lambda batch, cond, o=original, n=images: (n.append(len(batch)), o(batch, cond))[1]
        folder = trainer.fit().root
        results |= {score: (rows_of(folder), sum(images), adapter_of(folder)), "start": start}
    return results


REJECTING = (
    "algorithm.rollout_correction.rollout_rs=seq_mean_k1",
    "algorithm.rollout_correction.rollout_rs_threshold='0.9998_1.0003'",
    "algorithm.rollout_correction.rejection_normalization=kept",
)


@pytest.mark.parametrize(
    ("settings", "scored"),
    [
        # 2 steps of 16 images; two mini-batches of 8: the first is free
        ((), {"auto": 16, "always": 32}),
        (REJECTING, {"auto": 16, "always": 32}),
        (("actor_rollout_ref.actor.ppo_epochs=2",), {"auto": 16, "always": 32}),
        (("actor_rollout_ref.actor.diffusion_loss.loss_mode=grpo_guard",), {"auto": 16, "always": 32}),
        # one optimizer step a batch: decoupled costs no pass at all
        (("actor_rollout_ref.actor.ppo_mini_batch_size=4", *REJECTING), {"auto": 0, "always": 32}),
        # batch normalisation needs every row first
        (("algorithm.rollout_correction.rollout_is_batch_normalize=true",), {"auto": 32, "always": 32}),
    ],
)
def test_the_old_policy_is_free_for_the_first_mini_batch(small_config, settings, scored):
    """Scoring all and scoring what is needed give the same weights, rejection, update and metrics."""
    results = decoupled_runs(small_config, *settings)
    assert {score: results[score][1] for score in scored} == scored
    (auto, _, adapter), (always, _, expected), start = results["auto"], results["always"], results["start"]
    for a, b in zip(auto, always, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            bound = of_metric(name, b, dimensions=512, pixels=3072, steps=2)
            assert a[name] == pytest.approx(b[name], rel=0, abs=bound), name
    assert distance(adapter, expected) < adam() * distance(start, expected)
    if settings[-1:] == REJECTING[-1:]:
        assert 0.05 < auto[-1]["rollout_corr/rollout_rs_masked_fraction"] < 0.95


BASELINE = "algorithm.rejection_aware_baseline"


def test_a_rejected_image_does_not_move_its_group(small_config):
    """Advantages are those of the kept images alone, and every image is scored for it, once."""
    config = small_config(
        "algorithm.rollout_correction.bypass_mode=false",
        *REJECTING,
        f"{BASELINE}=true",
        "algorithm.global_std=false",
        NO_PROBE,
    )
    trainer, updates, images, rewards = FlowGRPOTrainer(config), [], [], []
    actor, reward = trainer.run.actor, trainer.run.reward
    score, update = actor.score, actor.update
    actor.score = lambda batch, cond: (images.append(len(batch)), score(batch, cond))[1]
    actor.update = lambda batch, *args, **kw: (updates.append((batch.clone(), kw)), update(batch, *args, **kw))[1]
    trainer.run.reward = lambda *args: (rewards.append(reward(*args)), rewards[-1])[1]
    trainer.train_step()
    (batch, settings), totals = updates[0], torch.from_numpy(rewards[0].total)
    keep = batch["rollout_keep"].any(1)
    assert images == [16]
    assert settings["first_is_old"] is False
    assert 0 < keep.sum() < 16
    assert batch["advantages"][~keep].tolist() == [0.0] * int((~keep).sum())
    for group in batch["group"].unique():
        rows = (batch["group"] == group) & keep
        kept = totals[rows].double()
        expected = (kept - kept.mean()) / (kept.std(correction=0) + 1e-4)
        torch.testing.assert_close(batch["advantages"][rows].double(), expected, atol=1e-6, rtol=1e-5)


def test_a_baseline_that_knows_of_rejection_needs_decoupled_mode(small_config):
    with pytest.raises(ValueError, match=f"{BASELINE}: got true with rollout_correction.bypass_mode=true.*Set algo"):
        small_config(f"{BASELINE}=true")


def test_progressive_windows_move_with_the_step(small_config):
    """Every group of a step trains the same timesteps; the next step the next ones."""
    config = small_config(
        "actor_rollout_ref.rollout.algo.sample_strategy=progressive",
        "actor_rollout_ref.rollout.algo.sde_window_range=[0,4]",
    )
    rows = rows_of(FlowGRPOTrainer(config).fit().root)
    seen = [{k.rsplit("_", 1)[1] for k in row if "/ts_" in k} for row in rows[1:]]
    assert seen == [{"1000", "750"}, {"500", "250"}]


def test_resume_goes_on_with_the_settings_given_now(small_config):
    base = ("trainer.resume_mode=auto", "trainer.save_freq=1")
    FlowGRPOTrainer(small_config(*base)).fit()
    changed = ("actor_rollout_ref.actor.optim.lr=1e-5", "actor_rollout_ref.actor.optim.lr_scheduler_type=constant")
    trainer = FlowGRPOTrainer(small_config(*base, *changed, "trainer.total_training_steps=3"))
    assert trainer.step == 2
    assert rows_of(trainer.fit().root)[-1]["actor/lr"] == 1e-5


def test_going_back_leaves_nothing_of_the_other_branch(small_config):
    settings = ("trainer.save_freq=1", "trainer.test_freq=1", "trainer.total_training_steps=3")
    folder = FlowGRPOTrainer(small_config("trainer.resume_mode=auto", *settings)).fit().root
    back = f"trainer.resume_from_path={folder / 'checkpoints' / 'step_1'}"
    trainer = FlowGRPOTrainer(small_config("trainer.resume_mode=resume_path", back, *settings))
    assert [p.name for p in sorted((folder / "checkpoints").glob("step_*"))] == ["step_1"]
    assert [p.name for p in sorted((folder / "samples").glob("step_*"))] == ["step_00000.png", "step_00001.png"]
    assert [r["step"] for r in rows_of(trainer.fit().root)] == [0, 1, 2, 3]


def test_same_architecture_other_weights_is_another_model(small_config, tmp_path):
    model = load_model("asset:tiny_qwen_image")
    for parameter in model.transformer.parameters():
        parameter.data *= 0.9
    model.pipe.save_pretrained(tmp_path / "other")
    FlowGRPOTrainer(small_config("trainer.resume_mode=auto", "trainer.total_training_steps=1")).fit()
    path = f"actor_rollout_ref.model.path={tmp_path / 'other'}"
    with pytest.raises(CheckpointError, match="checkpoint of another model: transformer weights"):
        FlowGRPOTrainer(small_config("trainer.resume_mode=auto", path))


def test_non_finite_update_names_the_prompts(small_config):
    from flowgrpo_rc.actor import NonFiniteUpdateError

    trainer = FlowGRPOTrainer(small_config("data.shuffle=false"))
    rollout = trainer._rollout

    def broken(*args):
        batch, images, cond = rollout(*args)
        batch["next_latents"][5] = torch.nan
        return batch, images, cond

    trainer._rollout = broken
    prompt = trainer.run.train_prompts[1].prompt
    with pytest.raises(NonFiniteUpdateError, match=rf"step 1: .*rows \[5\].*their prompts: '{prompt}'"):
        trainer.train_step()


def test_refused_runs_leave_no_folder(small_config, tmp_path):
    """A pipeline of which only the index has arrived."""
    (tmp_path / "broken").mkdir()
    index = shipped("assets") / "tiny_qwen_image" / "model_index.json"
    (tmp_path / "broken" / "model_index.json").write_text(index.read_text())
    path = f"actor_rollout_ref.model.path={tmp_path / 'broken'}"
    with pytest.raises(ValueError, match="cannot be loaded; is the download complete"):
        FlowGRPOTrainer(small_config(path, folder="never"))
    assert not (tmp_path / "never").exists()


def test_compilation_without_a_compiler_is_refused_before_loading(small_config, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    config = small_config("actor_rollout_ref.model.torch_compile=true", folder="never")
    with pytest.raises(ImportError, match="torch_compile: got true, but the C.. compiler no-such-compiler is not on"):
        FlowGRPOTrainer(config)
    assert not (tmp_path / "never").exists()
