"""Whole runs of the tiny model: reproducible, resumable, with everything a run folder promises."""

import errno
import io
import json
import os
import resource
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageChops
from tests_support import (
    ADAPTER,
    TORCHRUN,
    adapter_of,
    assert_close_rows,
    before_step,
    names,
    power_cut,
    recorded,
    rows_of,
    run_process,
    same,
    trainer_of,
)
from tolerances import adam

from flowgrpo_rc.models import load_model
from flowgrpo_rc.models.lora import adapter_state
from flowgrpo_rc.paths import shipped
from flowgrpo_rc.run_folder import RunFolderError
from flowgrpo_rc.run_lock import RunFolderInUseError
from flowgrpo_rc.trainer import FlowGRPOTrainer, checkpoint, outputs
from flowgrpo_rc.trainer import trainer as trainer_module

pytestmark = pytest.mark.run


def file_name(name):
    """The name of an adapter's parameter in its file."""
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
    assert same(adapter_of(again.root), adapter_of(first.root))
    assert rows_of(first.root) != rows_of(other.root)


def test_run_folder_holds_what_it_promises(finished_run):
    folder = finished_run.root
    rows = rows_of(folder)
    assert [r["step"] for r in rows] == [0, 1, 2]
    assert "val/reward/mean" in rows[0]
    for name in ("reward/mean", "actor/pg_loss", "actor/rollout_corr/kl", "actor/grad_norm", "val/reward/mean"):
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
        call = {"height": 32, "width": 32, "num_inference_steps": 4, "true_cfg_scale": 1.0, "output_type": "np"}
        return pipe(prompt='the text "42"', generator=generator, **call).images

    with trainer.run.model.text_encoders():
        trained = draw(trainer.run.model.pipe)
    fresh = load_model("asset:tiny_qwen_image").pipe
    base = draw(fresh)
    fresh.load_lora_weights(str(folder / "lora"))
    assert np.array_equal(draw(fresh), trained)
    assert not np.array_equal(base, trained)


@pytest.mark.parametrize("reference", ["start", "average"])
def test_resumed_run_equals_an_uninterrupted_one(small_config, finished_run, reference):
    """Six steps in one go, and three, stop, three; the average of the adapter too, with the decay that is given now.
    The KL's reference is the adapter that the run started from, whose folder the resumed run has no more, or the
    average."""
    settings = ("trainer.total_training_steps=6", "trainer.test_freq=2", "actor_rollout_ref.actor.ema_decay=0.9")
    settings += ("actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_coef=1.0")
    settings += (f"actor_rollout_ref.actor.kl_reference={reference}",)
    gone = ()
    if reference == "start":
        settings += (f"actor_rollout_ref.model.lora_adapter_path={finished_run.lora}",)
        gone = ("actor_rollout_ref.model.lora_adapter_path=null",)
    whole = FlowGRPOTrainer(small_config(*settings, folder="whole")).fit().root
    auto = (*settings, "trainer.resume_mode=auto", "trainer.save_freq=3")
    first = FlowGRPOTrainer(small_config(*auto, folder="parts"))
    before_step(first, 4, power_cut)
    with pytest.raises(ConnectionError):
        first.fit()
    assert [r["step"] for r in rows_of(first.folder.root)] == [0, 1, 2, 3, 4]
    second = FlowGRPOTrainer(small_config(*auto, *gone, folder="parts"))
    assert second.step == 3
    resumed = second.fit().root
    assert rows_of(resumed) == rows_of(whole)
    assert rows_of(whole)[-1]["actor/kl_loss"] > 0
    for name in ("lora", "lora_ema"):
        assert same(adapter_of(resumed, name), adapter_of(whole, name))
    other = small_config(*auto, *gone, "actor_rollout_ref.actor.ema_decay=0.25", folder="parts")
    average = FlowGRPOTrainer(other).run.actor.average
    assert (average.decay, average.optimization_step) == (0.25, 12)


CLEAN = ("algorithm.rollout_correction=null", "actor_rollout_ref.rollout.dtype=float32")


@pytest.mark.parametrize("name", ["awm", "diffusion_nft", "dpo"])
def test_a_run_on_clean_images(small_config, name):
    """It learns without a step's log-prob, and a resumed run equals one that was not interrupted."""
    settings = (*CLEAN, f"actor_rollout_ref.actor.diffusion_loss.loss_mode={name}", "trainer.total_training_steps=3")
    whole = FlowGRPOTrainer(small_config(*settings, folder="whole")).fit().root
    rows = rows_of(whole)
    assert all(row["actor/grad_norm"] > 0 for row in rows[1:])
    assert not [key for key in rows[-1] if key.startswith(("rollout_sync/", "rollout_corr/"))]
    assert (rows[-1]["actor/log_ratio_abs_mean_first"], rows[-1]["actor/kept_fraction"]) == (0.0, 1.0)
    auto = (*settings, "trainer.resume_mode=auto", "trainer.save_freq=2")
    first = FlowGRPOTrainer(small_config(*auto, folder="parts"))
    before_step(first, 2, power_cut)
    with pytest.raises(ConnectionError):
        first.fit()
    assert rows_of(FlowGRPOTrainer(small_config(*auto, folder="parts")).fit().root) == rows
    assert same(adapter_of(whole), adapter_of(first.folder.root))


def settings_of(kind):
    """Settings of a run of this kind."""
    settings = ("trainer.resume_mode=disable", *LATE)
    if kind == "bypass":
        settings += ("actor_rollout_ref.rollout.scout.n=6",)
    if kind in ("awm", "dpo"):
        settings += ("algorithm.rollout_correction=null", f"actor_rollout_ref.actor.diffusion_loss.loss_mode={kind}")
        settings += ("algorithm.replay.batches=1",)
    if kind == "awm":
        settings += ("actor_rollout_ref.rollout.scout.n=6", "actor_rollout_ref.rollout.scout.redraw=true")
    elif kind == "decoupled":
        settings += ("algorithm.rollout_correction.bypass_mode=false", *REJECTING_LATE, f"{BASELINE}=true")
    return settings


KINDS = ("bypass", "decoupled", "awm", "dpo")
FOLDERS = {"dpo": "dpo-2"}
"""Folders of runs whose own was in use."""


def main(folder):
    """A run of each kind in this process group; torchrun starts this file."""
    for kind in KINDS:
        trainer_of(Path(folder) / kind, *settings_of(kind)).fit()


@pytest.fixture(scope="module")
def on_two(tmp_path_factory):
    """The folder of a run of each kind on two gloo processes."""
    folder = tmp_path_factory.mktemp("on_two")
    # An earlier run was here, so that this one has to take another folder.
    (folder / "dpo").mkdir()
    (folder / "dpo" / "metrics.jsonl").write_text("{}\n")
    done = run_process(*TORCHRUN, __file__, folder, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.returncode == 0, done.stderr[-3000:]
    assert " ".join(done.stdout.split()).count("on 2 process(es)") == len(KINDS)
    return folder


@pytest.mark.portable
@pytest.mark.process
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_give_the_update_of_one(small_config, on_two, kind):
    """The same images, the same optimizer steps, dealt out over both."""
    trainer = FlowGRPOTrainer(small_config(*settings_of(kind)))
    start = {file_name(n): v.clone() for n, v in adapter_state(trainer.run.actor.transformer).items()}
    one = trainer.fit().root
    two = on_two / FOLDERS.get(kind, kind)
    single, double = rows_of(one), rows_of(two)
    assert (0.1 < single[-1]["actor/kept_fraction"] < 0.9) is (kind == "decoupled")
    assert_close_rows(double, single)
    learned = adapter_of(one)
    update, apart = distance(start, learned), distance(adapter_of(two), learned)
    assert update > 1e-3
    # the update of other images, or of half of them, would be about as far away as it is long
    assert apart < adam() * update


@pytest.mark.process
def test_processes_keep_one_replay_buffer_also_in_a_folder_of_another_name(on_two):
    """The checkpoint has the rows of both, and the folder that was in use is as it was."""
    newest = (on_two / "dpo-2" / "checkpoints" / "latest").read_text()
    held = names(on_two / "dpo-2" / "checkpoints" / newest / "replay")
    assert held == [f"step_1.{number}.{process}.pt" for number in range(2) for process in range(2)]
    assert names(on_two / "dpo") == ["metrics.jsonl"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_stopping_signal_ends_after_the_step_with_a_checkpoint(small_config, number):
    trainer = FlowGRPOTrainer(small_config("trainer.total_training_steps=50"))
    before_step(trainer, 1, lambda: os.kill(os.getpid(), number))
    before = signal.getsignal(number)
    folder = trainer.fit().root
    assert trainer.interrupted
    assert [r["step"] for r in rows_of(folder)] == [0, 1, 2]
    assert (folder / "checkpoints" / "latest").read_text() == "step_2"
    assert signal.getsignal(number) == before


def test_a_failing_validation_leaves_the_row_of_its_step(small_config, monkeypatch, capsys):
    """The step is done; its row is that of an undisturbed run, without what the validation would have said."""
    settings = ("trainer.total_training_steps=3", "trainer.test_freq=2", "trainer.save_freq=1")
    whole = rows_of(FlowGRPOTrainer(small_config(*settings, folder="whole")).fit().root)

    def fail_after_a_step(run, *functions):
        if trainer.step > 0:
            raise ValueError("the reward is out of reach")
        return validate(run, *functions)

    validate = trainer_module.validate
    monkeypatch.setattr(trainer_module, "validate", fail_after_a_step)
    trainer = FlowGRPOTrainer(small_config(*settings))
    with pytest.raises(ValueError, match="the reward is out of reach"):
        trainer.fit()
    # The command line prints the traceback after this line.
    remains = trainer.checkpoints.root / "step_1"
    line = f"The run failed after step 2 of 3; {remains} remains; continue with trainer.resume_mode=auto"
    assert line in capsys.readouterr().err
    rows = rows_of(trainer.folder.root)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[:2] == whole[:2]
    assert any(name.startswith("val/") for name in whole[2])
    assert rows[2] == {name: value for name, value in whole[2].items() if not name.startswith("val/")}


NO_PROBE = "actor_rollout_ref.rollout.probe.images=0"
"""It has a scoring pass of its own."""


def test_bypass_skips_the_scoring_pass(small_config):
    trainer = FlowGRPOTrainer(small_config("algorithm.rollout_correction.bypass_mode=true", NO_PROBE))
    trainer.run.actor.score = lambda *_: pytest.fail("scored")
    assert rows_of(trainer.fit().root)[-1]["actor/rollout_corr/logprob_abs_diff_mean"] > 0


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
    # The grid of the validation before the first step and of the last one, as they are in the folder.
    images = accumulator.Images("val/samples")
    assert [image.step for image in images] == [0, 2]
    sent = Image.open(io.BytesIO(images[-1].encoded_image_string))
    assert ImageChops.difference(sent.convert("RGB"), Image.open(folder / "samples/step_00002.png")).getbbox() is None
    assert len(list((folder / "wandb").rglob("media/images/val/samples_*.png"))) == 2


def test_a_tracker_that_takes_no_pictures_does_not_end_the_run(small_config, monkeypatch):
    def refuse(*_arguments, **_more):
        raise ValueError("no pictures here")

    monkeypatch.setattr("accelerate.tracking.TensorBoardTracker.log_images", refuse)
    with pytest.warns(UserWarning, match=r"error: tensorboard takes no more metrics \(.*no pictures here"):
        folder = FlowGRPOTrainer(small_config("trainer.logger=[tensorboard]")).fit().root
    assert [row["step"] for row in rows_of(folder)] == [0, 1, 2]


REJECTING = (
    "algorithm.rollout_correction.rollout_rs=seq_mean_k1",
    "algorithm.rollout_correction.rollout_rs_threshold='0.9998_1.0003'",
    "algorithm.rollout_correction.rejection_normalization=kept",
)
LATE = ("actor_rollout_ref.rollout.dtype=float32", "actor_rollout_ref.rollout.adapter_lag=1")
"""A gap in the second batch whose images show an update's rounding no larger than it is."""
REJECTING_LATE = (REJECTING[0], "algorithm.rollout_correction.rollout_rs_threshold='0.999_1.0005'", REJECTING[2])


def decoupled_runs(small_config, *overrides):
    """Rows, score calls and adapter of one decoupled run with ``score=auto`` and ``score=always``; how both started."""
    results = {}
    for score in ("auto", "always"):
        config = small_config(
            "algorithm.rollout_correction.bypass_mode=false",
            f"actor_rollout_ref.actor.score={score}",
            *LATE,
            NO_PROBE,
            *overrides,
            folder=f"{score}{len(overrides)}",
        )
        trainer = FlowGRPOTrainer(config)
        calls = recorded(trainer.run.actor, "score")
        start = {file_name(n): v.clone() for n, v in adapter_state(trainer.run.actor.transformer).items()}
        folder = trainer.fit().root
        scored = sum(len(batch) for (batch, _), _ in calls)
        results |= {score: (rows_of(folder), scored, adapter_of(folder)), "start": start}
    return results


@pytest.mark.parametrize(
    ("settings", "scored"),
    [
        # 2 steps of 16 images; two mini-batches of 8: the first is free
        (("actor_rollout_ref.actor.ppo_epochs=2", *REJECTING_LATE), {"auto": 16, "always": 32}),
        (("actor_rollout_ref.actor.diffusion_loss.loss_mode=grpo_guard",), {"auto": 16, "always": 32}),
        # one optimizer step a batch: decoupled costs no pass at all
        (("actor_rollout_ref.actor.ppo_mini_batch_size=4", *REJECTING_LATE), {"auto": 0, "always": 32}),
        # batch normalisation needs every row first
        (("algorithm.rollout_correction.rollout_is_batch_normalize=true",), {"auto": 32, "always": 32}),
    ],
)
def test_the_old_policy_is_free_for_the_first_mini_batch(small_config, settings, scored):
    """Scoring all and scoring what is needed give the same weights, rejection, update and metrics."""
    results = decoupled_runs(small_config, *settings)
    assert {score: results[score][1] for score in scored} == scored
    (auto, _, adapter), (always, _, expected), start = results["auto"], results["always"], results["start"]
    assert_close_rows(auto, always)
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
    trainer = FlowGRPOTrainer(config)
    scores, updates = recorded(trainer.run.actor, "score"), recorded(trainer.run.actor, "update")
    rewards = recorded(trainer.run.reward, "combine")
    trainer.train_step()
    (((batch, _, mini_batches, *_), _),), ((_, reward),) = updates, rewards
    totals = torch.from_numpy(reward.total)
    assert torch.equal(torch.cat([mini.rows for mini in mini_batches]), torch.arange(16))
    keep = torch.cat([mini.old.keep for mini in mini_batches]).any(1)
    assert [len(scored) for (scored, _), _ in scores] == [16]
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


def test_a_finished_run_does_nothing_and_an_extended_one_keeps_its_adapter(small_config, capsys):
    """The extension learns with the settings given now."""
    settings = ("trainer.resume_mode=auto", "trainer.save_freq=1")
    folder = FlowGRPOTrainer(small_config(*settings)).fit().root
    before = rows_of(folder)
    earlier = (folder / "lora" / ADAPTER).read_bytes()
    finished = FlowGRPOTrainer(small_config(*settings))
    finished.fit()
    assert rows_of(folder) == before
    assert "already at step 2 of 2" in " ".join(capsys.readouterr().out.split())
    assert not (folder / "lora.1").exists()  # the same adapter, no copy of it
    with pytest.raises(RuntimeError, match=r"fit\(\) ends a trainer.*another FlowGRPOTrainer"):
        finished.fit()
    changed = ("actor_rollout_ref.actor.optim.lr=1e-5", "actor_rollout_ref.actor.optim.lr_scheduler_type=constant")
    trainer = FlowGRPOTrainer(small_config(*settings, *changed, "trainer.total_training_steps=3"))
    assert trainer.step == 2
    assert rows_of(trainer.fit().root)[-1]["actor/lr"] == 1e-5
    assert [p.read_bytes() for p in folder.glob(f"lora.*/{ADAPTER}")] == [earlier]
    assert (folder / "lora" / ADAPTER).read_bytes() != earlier


def test_going_back_leaves_nothing_of_the_other_branch(small_config):
    settings = ("trainer.save_freq=1", "trainer.test_freq=1", "trainer.total_training_steps=3")
    folder = FlowGRPOTrainer(small_config("trainer.resume_mode=auto", *settings)).fit().root
    back = f"trainer.resume_from_path={folder / 'checkpoints' / 'step_1'}"
    before = rows_of(folder)
    adapter = adapter_of(folder)
    trainer = FlowGRPOTrainer(small_config("trainer.resume_mode=resume_path", back, *settings))
    assert names(folder / "checkpoints", "step_*") == ["step_1"]
    assert names(folder / "samples", "step_*") == ["step_00000.png", "step_00001.png"]
    assert names(folder / "checkpoints.1") == ["step_2", "step_3"]
    assert names(folder / "samples.1") == ["step_00002.png", "step_00003.png"]
    assert [json.loads(line)["step"] for line in (folder / "metrics.1.jsonl").read_text().splitlines()] == [2, 3]
    assert (folder / "plots.1" / "reward.png").is_file()
    assert same(adapter_of(folder, "lora.1"), adapter)
    assert rows_of(trainer.fit().root) == before
    # config.yaml says otherwise where to resume from, and is moved aside for that
    assert "resume_mode: auto" in (folder / "config.2.yaml").read_text()


def test_a_run_without_a_checkpoint_moves_the_earlier_records_aside(small_config, capsys):
    """``resume_mode=auto`` begins anew where no checkpoint is; what an earlier run left is all there."""
    settings = ("trainer.resume_mode=auto", "trainer.test_freq=1")
    folder = FlowGRPOTrainer(small_config(*settings)).fit().root
    shutil.rmtree(folder / "checkpoints")
    before = {name.replace(".1", ""): (folder / name.replace(".1", "")).read_bytes() for name in ASIDE}
    grids = names(folder / "samples")
    capsys.readouterr()
    trainer = FlowGRPOTrainer(small_config(*settings, "trainer.total_training_steps=1"))
    said = " ".join(capsys.readouterr().out.split())
    assert "Moved aside in" in said
    assert "metrics.jsonl to metrics.1.jsonl" in said
    assert "samples to samples.1" in said
    assert names(folder) == [".lock", *sorted((*ASIDE, "plots.1", "samples.1", "lora.1"))]
    assert {name.replace(".1", ""): (folder / name).read_bytes() for name in ASIDE} == before
    assert names(folder / "samples.1") == grids
    assert [r["step"] for r in rows_of(trainer.fit().root)] == [0, 1]


ASIDE = ("config.1.yaml", "metrics.1.jsonl", "summary.1.png", "timeline.1.jsonl")


def test_a_checkpoint_of_elsewhere_begins_a_record_of_its_own(small_config):
    """The rows that lie here belong to another run."""
    settings = ("trainer.save_freq=1", "trainer.total_training_steps=2")
    other = FlowGRPOTrainer(small_config(*settings, folder="other")).fit().root
    folder = FlowGRPOTrainer(small_config("trainer.resume_mode=auto", *settings)).fit().root
    there = f"trainer.resume_from_path={other / 'checkpoints' / 'step_1'}"
    before = {p: p.read_bytes() for p in other.rglob("*") if p.is_file()}
    again = FlowGRPOTrainer(small_config("trainer.resume_mode=resume_path", there, *settings)).fit().root
    assert again == folder
    assert [r["step"] for r in rows_of(folder)] == [2]
    assert names(folder / "checkpoints.1") == ["latest", "step_1", "step_2"]
    assert {p: p.read_bytes() for p in other.rglob("*") if p.is_file()} == before


def test_a_run_holds_its_folder_from_before_loading_to_its_end(small_config, monkeypatch):
    first = FlowGRPOTrainer(small_config("trainer.resume_mode=auto"))
    with monkeypatch.context() as patch:
        patch.setattr(trainer_module, "Run", lambda *_: pytest.fail("loaded before it was refused"))
        with pytest.raises(RunFolderInUseError, match=f"in use by process {os.getpid()} on host"):
            FlowGRPOTrainer(small_config("trainer.resume_mode=auto"))
    beside = FlowGRPOTrainer(small_config("trainer.resume_mode=disable"))
    assert beside.folder.root.name == "run-2"
    root = first.fit().root
    assert not (root / ".lock").exists()
    FlowGRPOTrainer(small_config("trainer.resume_mode=auto"))


def full(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


def broken(*args, **kwargs):
    raise RuntimeError("Could not save font cache: no writable cache directory")


@pytest.mark.parametrize(
    ("failures", "lost"),
    [
        ({"save_lora": full, "save_grid": full}, ("run/lora/", "run/samples/step_00000.png")),
        (
            {"write_plots": broken, "stack_pictures": full, "save_run": full},
            ("run/plots/", "run/samples/before_after.png", "the last checkpoint"),
        ),
    ],
)
def test_what_cannot_be_written_keeps_nothing_else_from_it(small_config, monkeypatch, failures, lost):
    """The run trains to its end, everything else is written, and the error at the end names both."""
    for function, failure in failures.items():
        home = checkpoint if function == "save_run" else outputs
        monkeypatch.setattr(home, "save_lora" if function == "save_run" else function, failure)
    trainer = FlowGRPOTrainer(small_config())
    with pytest.raises(RunFolderError, match="trained to step 2, but could not write ") as caught:
        trainer.fit()
    root = trainer.folder.root
    assert "\n" not in str(caught.value)
    assert [r["step"] for r in rows_of(root)] == [0, 1, 2]
    missing, kept = str(caught.value).split("Kept: ")
    assert [what for what in lost if what not in missing] == []
    adapter = root / "lora" / ADAPTER
    assert (str(adapter) in kept) == adapter.is_file() == ("save_lora" not in failures)
    assert (str(root / "checkpoints" / "step_2") in kept) == ("save_run" not in failures)
    assert (root / "plots" / "overview.png").is_file() == ("write_plots" not in failures)
    assert not list(root.rglob("*.writing"))


def test_a_full_disk_under_the_metrics_stops_with_what_was_kept(small_config, monkeypatch):
    """The row that did not fit leaves no part of itself, and the run goes on from its checkpoint."""
    whole = FlowGRPOTrainer(small_config("trainer.total_training_steps=3", folder="whole")).fit().root
    settings = ("trainer.resume_mode=auto", "trainer.save_freq=1", "trainer.total_training_steps=3")
    trainer = FlowGRPOTrainer(small_config(*settings))

    def fill_the_disk():
        size = trainer.folder.metrics.stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, hard))

    before_step(trainer, 2, fill_the_disk)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    message = r"metrics.jsonl: the row of step 3 cannot be written: File too large.*Kept: .*checkpoints/step_2"
    try:
        with pytest.raises(RunFolderError, match=message):
            trainer.fit()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    content = trainer.folder.metrics.read_text()
    assert content.endswith("}\n")
    assert [r["step"] for r in rows_of(trainer.folder.root)] == [0, 1, 2]
    assert rows_of(FlowGRPOTrainer(small_config(*settings)).fit().root) == rows_of(whole)


def test_a_tracker_that_fails_costs_a_line(small_config, capsys):
    trainer = FlowGRPOTrainer(small_config("trainer.logger=[console,tensorboard]"))
    start = trainer.logger.start

    def start_broken(*args):
        start(*args)
        trainer.accelerator.trackers[0].writer.flush = full

    trainer.logger.start = start_broken
    folder = trainer.fit().root
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("error: tensorboard takes no more metrics ([Errno 28] No space left on device)") == 1
    assert [r["step"] for r in rows_of(folder)] == [0, 1, 2]


def test_refused_runs_leave_no_folder(small_config, tmp_path, monkeypatch):
    """A pipeline of which only the index has arrived, and compilation without a compiler."""
    (tmp_path / "broken").mkdir()
    index = shipped("assets") / "tiny_qwen_image" / "model_index.json"
    (tmp_path / "broken" / "model_index.json").write_text(index.read_text())
    path = f"actor_rollout_ref.model.path={tmp_path / 'broken'}"
    with pytest.raises(ValueError, match="cannot be loaded; is the download complete"):
        FlowGRPOTrainer(small_config(path, folder="never"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ImportError, match="torch_compile: got true, but the C.. compiler no-such-compiler is not on"):
        FlowGRPOTrainer(small_config("actor_rollout_ref.model.torch_compile=true", folder="never"))
    with pytest.raises(ImportError, match="rollout.torch_compile: got true, but the C.. compiler no-such-compiler"):
        FlowGRPOTrainer(small_config("actor_rollout_ref.rollout.torch_compile=true", folder="never"))
    assert not (tmp_path / "never").exists()


if __name__ == "__main__":
    main(sys.argv[1])
    torch.distributed.destroy_process_group()
