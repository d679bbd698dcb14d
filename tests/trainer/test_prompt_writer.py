"""Runs with a prompt writer: against runs without one, both sides, checkpoints and processes."""

import json
import os
import shutil
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests_support import (
    TORCHRUN,
    assert_close_rows,
    before_step,
    given_by,
    power_cut,
    rows_of,
    run_process,
    trainer_of,
)
from torch.testing import assert_close

from flowgrpo_rc.batch import Key
from flowgrpo_rc.cli.compose import compose
from flowgrpo_rc.cli.main import main as cli_main
from flowgrpo_rc.data import PromptRecord
from flowgrpo_rc.gap.rescoring import Rescoring
from flowgrpo_rc.models.lora import adapter_state
from flowgrpo_rc.paths import resolve_asset
from flowgrpo_rc.rollout.base import RolloutSyncError
from flowgrpo_rc.rollout.proof import HeldAdapter
from flowgrpo_rc.trainer import FlowGRPOTrainer
from flowgrpo_rc.trainer.checkpoint import CheckpointError
from flowgrpo_rc.trainer.writing import PromptWriting, left_out
from flowgrpo_rc.writer import PromptWriterConfig

WRITER = "algorithm.prompt_writer"
ROLLOUT = "actor_rollout_ref.rollout"
WITH = (
    f"{WRITER}.path=asset:tiny_writer",
    f"{WRITER}.lora_rank=4",
    f"{WRITER}.lora_alpha=8",
    f"{WRITER}.max_new_tokens=40",
    f"{WRITER}.rewrites=2",
    f"{WRITER}.actor.optim.lr=3e-3",
    f"{ROLLOUT}.n=2",
)
REQUESTS = (
    "data.train_files=asset:tiny_requests/train.jsonl",
    "data.val_files=asset:tiny_requests/test.jsonl",
    "reward.functions.ocr=1",
    "reward.custom_reward_function.path=null",
)


def without_writer(row):
    return {name: value for name, value in row.items() if not name.startswith("writer/")}


@pytest.mark.run
@pytest.mark.parametrize("seed", [1, 7])
def test_a_frozen_writer_that_repeats_requests_is_the_run_without_it(small_config, monkeypatch, seed):
    """Digit for digit, validation included."""
    settings = (f"trainer.seed={seed}", "trainer.test_freq=1")
    plain = FlowGRPOTrainer(small_config(*settings, folder="plain")).fit().root
    repeat = PromptWriting._rewrites

    def identity(self, *given):
        found = repeat(self, *given)
        found.drawn[:] = given[0]
        return found

    monkeypatch.setattr(PromptWriting, "_rewrites", identity)
    once = (*WITH[:-3], f"{WRITER}.rewrites=1", f"{WRITER}.learns=images")
    written = FlowGRPOTrainer(small_config(*settings, *once)).fit().root
    rows = rows_of(written)
    assert [without_writer(row) for row in rows] == rows_of(plain)
    assert rows[-1]["writer/unfit_fraction"] == 0
    assert not (written / "writer").exists()


@pytest.mark.run
def test_what_the_writer_learns_from(small_config, monkeypatch):
    """Each rewrite's images, their mean as its score within its request, and the policy that wrote it as the rollout's.
    Rewards get the request, with the rewrite beside it."""
    trainer = FlowGRPOTrainer(small_config(*REQUESTS, *WITH, f"{WRITER}.rewrites=3", "trainer.total_training_steps=1"))
    writer, seen = trainer.run.writer, {}
    learn, update = writer.learn, writer.actor.update

    def learning(rewrites, rewards, gather):
        seen["rewrites"], seen["rewards"] = rewrites, rewards
        return learn(rewrites, rewards, gather)

    def updating(batch, minis, gap):
        seen["batch"], seen["minis"] = batch, minis
        return update(batch, minis, gap)

    monkeypatch.setattr(writer, "learn", learning)
    monkeypatch.setattr(writer.actor, "update", updating)
    drawn = []
    generate = trainer.run.engine.generate
    monkeypatch.setattr(trainer.run.engine, "generate", lambda request: drawn.append(request) or generate(request))
    folder = trainer.fit()
    row = rows_of(folder.root)[-1]
    assert folder.rows()[-1]["perf/total_num_images"] == 24
    rewrites = seen["rewrites"]
    # Four requests of three rewrites of two images; the first request to the engine is a validation.
    request = next(one for one in drawn if one.window_starts is not None)
    assert request.prompt_index.tolist() == [i for i in range(12) for _ in range(2)]
    assert len(rewrites.drawn) == 12
    expected = trainer.run.encoder([one.prompt for one in rewrites.drawn])
    assert torch.equal(request.conditioning.prompts.embeds, expected.embeds)
    known = [record.prompt for record in trainer.run.train_prompts]
    assert all(one.prompt in known for one in rewrites.scored)
    assert [one.metadata["written_prompt"] for one in rewrites.scored] == rewrites.written.texts
    assert rewrites.request.tolist() == [i for i in range(4) for _ in range(3)]
    means = torch.from_numpy(seen["rewards"]).double().view(12, 2).mean(1)
    assert_close(writer.scores(rewrites, seen["rewards"]), means)
    groups = means.view(4, 3)
    expected = (groups - groups.mean(1, keepdim=True)) / (groups.std(correction=0) + 1e-4)
    assert_close(seen["batch"][Key.ADVANTAGES], expected.flatten().float(), rtol=1e-3, atol=1e-3)
    assert [mini.rows.tolist() for mini in seen["minis"]] == [list(range(6)), list(range(6, 12))]
    assert row["writer/score"] == pytest.approx(float(means.mean()))
    assert row["writer/score"] == pytest.approx(row["reward/mean"])
    assert 0 < row["writer/rollout_corr/logprob_abs_diff_mean"] < 0.1
    assert row["writer/grad_norm"] > 0


def test_a_rewrite_that_is_unfit_gets_the_lowest_score_of_its_request():
    writing = PromptWriting.__new__(PromptWriting)
    fit = torch.tensor([True, False, True, False, True, True])
    writing.config = PromptWriterConfig()
    lacks = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.5]).double()
    request = torch.tensor([0, 0, 0, 5, 5, 5])
    rewrites = SimpleNamespace(drawn=[None] * 6, request=request, fit=fit, left_out=lacks)
    rewards = np.array([0.5, 0.7, 0.9, 0.9, 0.2, 0.4, 0.9, 1.0, 0.1, 0.3, 0.6, 0.6])
    assert_close(writing.scores(rewrites, rewards), torch.tensor([0.6, 0.3, 0.3, 0.2, 0.2, 0.6]).double())
    # The last lacks half of its request's words, and is then the worst.
    writing.config = PromptWriterConfig(request_penalty=1.0)
    assert_close(writing.scores(rewrites, rewards), torch.tensor([0.6, 0.3, 0.3, 0.1, 0.2, 0.1]).double())


@pytest.mark.parametrize(
    ("request_", "rewrite", "share"),
    [
        ("a red Cat", "The CAT, red, on a mat", 0),
        ("a red cat", "a redcat", 2 / 3),
        ("cat cat dog", "a cat", 1 / 2),
        ("a cat", "", 1),
        ("?!", "a cat", 0),
    ],
)
def test_words_of_a_request_that_a_rewrite_leaves_out(request_, rewrite, share):
    assert left_out(request_, rewrite) == share


class Saying:
    """An engine that writes these texts."""

    def __init__(self, texts, ended):
        self.texts = texts
        self.ended = torch.tensor(ended)

    def __call__(self, engine, tokens, requests, seeds):
        return SimpleNamespace(texts=self.texts, ended=self.ended, adapter_version=0, adapter_digest="")


def test_what_the_image_model_cannot_read_is_told_apart(small_config, tiny_model, monkeypatch):
    """Blank and unended rewrites are unfit. The request is drawn for a blank one; a long one is drawn, and said once
    with line and file."""
    config = small_config(*REQUESTS, *WITH, f"{ROLLOUT}.pipeline.max_sequence_length=8")
    writing = PromptWriting.__new__(PromptWriting)
    writing._model, writing._warns_of_cuts = tiny_model, True
    writing.adapter = SimpleNamespace(held=HeldAdapter(0, ""))
    writing.engine, writing.language = None, SimpleNamespace(tokens=None)
    writing._pipelines = {"pipeline": config.actor_rollout_ref.rollout.pipeline}
    texts = ['the text "1"', " \n", "", 'the text "2"', "a much longer text than eight tokens can hold at all, twice"]
    monkeypatch.setattr("flowgrpo_rc.trainer.writing.write", Saying(texts, [True, True, True, False, True]))
    records = [PromptRecord(prompt=f"request {i}", source=f"train.txt:{i + 1}") for i in range(5)]
    with pytest.warns(UserWarning, match=r"train.txt:5: .* reads 8 of the \d+ tokens of the rewrite 'a much"):
        writing._rewrites(records, [0] * 5, torch.arange(5), "pipeline")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = writing._rewrites(records, [0] * 5, torch.arange(5), "pipeline")
    assert found.fit.tolist() == [True, False, False, False, True]
    assert found.read_whole.tolist() == [True] * 4 + [False]
    assert found.left_out.tolist() == [1.0] * 5
    assert [one.prompt for one in found.drawn] == [texts[0], "request 1", "request 2", texts[3], texts[4]]
    assert [one.metadata["written_prompt"] for one in found.scored] == texts


@pytest.mark.run
@pytest.mark.parametrize("side", ["writer", "images", "both"])
def test_a_side_that_does_not_learn_stays_bit_for_bit(small_config, side):
    trainer = FlowGRPOTrainer(small_config(*REQUESTS, *WITH, f"{WRITER}.learns={side}"))
    run = trainer.run
    networks = {"images": run.actor.transformer, "writer": run.writer.actor.network}
    before = {name: adapter_state(network) for name, network in networks.items()}
    drawn = []
    generate = run.engine.generate
    run.engine.generate = lambda request: drawn.append((request, generate(request))) or drawn[-1][1]
    root = trainer.fit().root
    # Steps are recorded where the image model learns from them.
    recorded = [request.window_starts is not None for request, _ in drawn]
    assert any(recorded) is (side != "writer")
    assert [answer.batch is not None for _, answer in drawn] == recorded
    rows = rows_of(root)
    for name, network in networks.items():
        same = all(torch.equal(value, before[name][key]) for key, value in adapter_state(network).items())
        assert same is (side not in ("both", name)), name
    assert ("actor/grad_norm" in rows[-1]) is (side != "writer")
    assert ("writer/grad_norm" in rows[-1]) is (side != "images")
    assert (root / "writer" / "adapter_model.safetensors").is_file() is (side != "images")
    assert (root / "lora").is_dir() is (side != "writer")


@pytest.mark.run
def test_a_resumed_run_repeats_an_undisturbed_one(small_config):
    settings = (*REQUESTS, *WITH, "trainer.total_training_steps=3")
    whole = FlowGRPOTrainer(small_config(*settings, folder="whole"))
    rows = rows_of(whole.fit().root)
    parts = (*settings, "trainer.resume_mode=auto", "trainer.save_freq=2")
    first = FlowGRPOTrainer(small_config(*parts, folder="parts"))
    before_step(first, 2, power_cut)
    with pytest.raises(ConnectionError):
        first.fit()
    second = FlowGRPOTrainer(small_config(*parts, folder="parts"))
    assert rows_of(second.fit().root) == rows
    for change in (f"{WRITER}.lora_alpha=16", f"{WRITER}.path=null"):
        with pytest.raises(CheckpointError, match="with another prompt writer: .*algorithm.prompt_writer"):
            FlowGRPOTrainer(small_config(*parts, change, folder="parts"))
    own, other = (adapter_state(trainer.run.writer.actor.network) for trainer in (whole, second))
    assert all(torch.equal(value, other[name]) for name, value in own.items())


@pytest.mark.run
def test_a_writer_in_a_collapsing_setting_is_moved_to_decoupled_mode(small_config):
    """From the update after the alarm on it is exactly a decoupled run from the same adapter, also after a resume."""
    correction = f"{WRITER}.actor.rollout_correction"
    settings = (*REQUESTS, *WITH, f"{correction}.guard=fallback", f"{correction}.guard_patience=2")
    settings += (f"{WRITER}.actor.token_loss.clip_ratio=1e-6", f"{WRITER}.actor.optim.lr_scheduler_type=constant")
    settings += ("actor_rollout_ref.actor.optim.lr_scheduler_type=constant",)
    settings += ("trainer.total_training_steps=4", "trainer.save_freq=1")
    run = FlowGRPOTrainer(small_config(*settings, f"{correction}.bypass_mode=true", folder="guarded"))
    rows = run.fit().rows()[1:]
    assert [row["writer/guard/fallback"] for row in rows] == [0, 1, 1, 1]
    assert all(row["writer/pg_clipfrac_first"] > 0.1 for row in rows[:2])
    assert all(row["writer/pg_clipfrac_first"] == 0 for row in rows[2:])

    def resumed(bypass, step):
        place = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={run.folder.checkpoints / step}")
        config = small_config(*settings, f"{correction}.bypass_mode={bypass}", *place, folder=f"from_{step}")
        return FlowGRPOTrainer(config).fit().rows()

    for row, other in zip(rows[2:], resumed("false", "step_2"), strict=True):
        for name in ("writer/pg_loss", "writer/grad_norm", "reward/mean", "writer/rollout_corr/logprob_abs_diff_mean"):
            assert row[name] == pytest.approx(other[name], rel=1e-6), name
    again = resumed("true", "step_3")[-1]
    assert (again["writer/grad_norm"], again["writer/guard/fallback"]) == (rows[-1]["writer/grad_norm"], 1)


@pytest.mark.run
def test_rewrites_ahead_are_those_of_a_late_adapter(small_config, pooled):
    """In every number, both sides' averages and a resume included; the second batch is from the first adapter still."""
    averaged = ("actor_rollout_ref.actor.ema_decay=0.5", f"{WRITER}.actor.ema_decay=0.5", "trainer.test_freq=1")
    settings = (*REQUESTS, *WITH, *averaged, "trainer.total_training_steps=3", "trainer.save_freq=1")
    settings += ("algorithm.rollout_correction.bypass_mode=false", f"{WRITER}.engine.dtype=float32")
    late = FlowGRPOTrainer(small_config(*settings, f"{ROLLOUT}.adapter_lag=1", folder="late")).fit()
    ahead = FlowGRPOTrainer(small_config(*settings, f"{ROLLOUT}.ahead=1", folder="ahead")).fit()
    rows = rows_of(late.root)
    assert rows_of(ahead.root) == rows
    gaps = [row["writer/rollout_corr/logprob_abs_diff_mean"] for row in rows[1:]]
    assert gaps[0] < 1e-5 < 1e-4 < min(gaps[1:])
    resume = ("trainer.resume_mode=auto", f"{ROLLOUT}.ahead=1")
    first = FlowGRPOTrainer(small_config(*settings, *resume, folder="parts"))
    before_step(first, 2, power_cut)
    with pytest.raises(ConnectionError):
        first.fit()
    second = FlowGRPOTrainer(small_config(*settings, *resume, folder="parts"))
    root = second.fit().root
    assert rows_of(root) == rows
    pooled()
    pool = FlowGRPOTrainer(small_config(*settings, f"{ROLLOUT}.ahead=1", folder="pool")).fit()
    assert rows_of(pool.root) == rows
    # Validation is written by the average, which the folder holds.
    own, average = (load_file(root / name / "adapter_model.safetensors") for name in ("writer", "writer_ema"))
    expected = second.run.writer.actor.averaged_state()
    assert set(average) == set(own)
    assert not any(torch.equal(own[name], average[name]) for name in own if ".lora_B." in name)
    assert sorted(v.sum().item() for v in average.values()) == sorted(v.sum().item() for v in expected.values())


@pytest.mark.run
@pytest.mark.process
def test_engines_in_processes_change_no_number(small_config):
    settings = (*REQUESTS, *WITH, f"{WRITER}.engine.micro_batch_size=3")
    elsewhere = (f"{WRITER}.engine.placement=process", f"{WRITER}.engine.devices=[cpu,cpu]")
    here = FlowGRPOTrainer(small_config(*settings, folder="here")).fit().root
    assert rows_of(FlowGRPOTrainer(small_config(*settings, *elsewhere)).fit().root) == rows_of(here)


@pytest.mark.run
@pytest.mark.parametrize("averages", [False, True])
def test_evaluate_compares_base_writer_and_both(small_config, tmp_path, capsys, monkeypatch, averages):
    """The last validation of a run, which averages draw, is found again, to the digit; the base has the first one's."""
    settings = (*REQUESTS[:2], *WITH, f"{WRITER}.actor.optim.lr=0.03")
    if averages:
        settings += ("actor_rollout_ref.actor.ema_decay=0.5", f"{WRITER}.actor.ema_decay=0.5")
    root = FlowGRPOTrainer(small_config(*settings)).fit().root
    capsys.readouterr()
    assert cli_main(["evaluate", "--run-dir", str(root), "--out", str(tmp_path / "out")]) == 0
    result = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    means = {row["model"]: row["mean"] for row in result["table"] if row["score"] == "mean"}
    rows = rows_of(root)
    assert means["base"] == rows[0]["val/reward/mean"]
    assert means["lora_ema" if averages else "lora"] == rows[-1]["val/reward/mean"]
    assert len(set(means.values())) == len(means) == 3 + 2 * averages
    # The same layers with another vocabulary, as where the folder of a model was replaced.
    other = tmp_path / "other"
    shutil.copytree(resolve_asset("asset:tiny_writer"), other)
    words = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(words.replace('"a":', '"\u00e4":'))
    assert (other / "tokenizer.json").read_text() != words
    config = (root / "config.yaml").read_text()
    (root / "config.yaml").write_text(config.replace("asset:tiny_writer", str(other)))
    monkeypatch.setattr("flowgrpo_rc.trainer.validation.validate", lambda *_: pytest.fail("drawn"))
    assert cli_main(["evaluate", "--run-dir", str(root), "--out", str(tmp_path / "again")]) == 1
    assert "its adapter was trained on another tokenizer than that of" in capsys.readouterr().err


@pytest.mark.run
def test_a_writer_that_learned_alone_is_evaluated(small_config, tmp_path, capsys):
    settings = (*REQUESTS[:2], *WITH, f"{WRITER}.actor.optim.lr=0.03", f"{WRITER}.learns=writer")
    settings += (f"{ROLLOUT}.pipeline.num_inference_steps=4", f"{ROLLOUT}.tail.steps=0.5")
    settings += (f"{WRITER}.actor.ema_decay=0.5",)
    root = FlowGRPOTrainer(small_config(*settings)).fit().root
    said = capsys.readouterr().out
    assert "; the image model does not learn" in said
    assert "export-lora" not in said
    evaluate = ["evaluate", "--run-dir", str(root), "--tolerance", "mean=1", "--out", str(tmp_path / "out")]
    assert cli_main(evaluate) == 0
    table = json.loads((tmp_path / "out" / "evaluation.json").read_text())["table"]
    means = {row["model"]: row["mean"] for row in table if row["score"] == "mean"}
    rows = rows_of(root)
    assert rows[-1]["rollout/forwards_per_image"] == 2
    assert list(means) == ["base", "writer", "writer_ema"]
    assert means["base"] == rows[0]["val/reward/mean"]
    # The average has written for validation.
    assert means["writer_ema"] == rows[-1]["val/reward/mean"] != means["writer"]


@pytest.mark.run
def test_the_lora_that_a_writer_alone_started_from_is_evaluated(small_config, tmp_path, capsys):
    """Its last validation is the row ``lora``: the image model has the start all along, and the base has not."""
    start = FlowGRPOTrainer(small_config("actor_rollout_ref.actor.optim.lr=0.03", folder="start")).fit().root / "lora"
    settings = (f"{WRITER}.learns=writer", f"actor_rollout_ref.model.lora_adapter_path={start}")
    root = FlowGRPOTrainer(small_config(*REQUESTS[:2], *WITH, *settings)).fit().root
    capsys.readouterr()
    assert cli_main(["evaluate", "--run-dir", str(root), "--out", str(tmp_path / "out")]) == 0
    table = json.loads((tmp_path / "out" / "evaluation.json").read_text())["table"]
    means = {row["model"]: row["mean"] for row in table if row["score"] == "mean"}
    rows = rows_of(root)
    assert list(means) == ["base", "writer", "lora"]
    assert means["lora"] == pytest.approx(rows[-1]["val/reward/mean"], abs=1e-6)
    assert means["writer"] != means["lora"]


@pytest.mark.run
def test_the_probe_spreads_over_all_rewrites(small_config, monkeypatch):
    """Not over the first requests' alone."""
    probed = []
    choose = Rescoring.rows
    monkeypatch.setattr(Rescoring, "rows", lambda self, *given: probed.append(choose(self, *given)) or probed[-1])
    settings = (f"{ROLLOUT}.probe.images=8", "trainer.total_training_steps=1", f"{WRITER}.rewrites=4")
    FlowGRPOTrainer(small_config(*REQUESTS, *WITH, *settings)).fit()
    assert [rows.tolist() for rows in probed] == [list(range(0, 32, 4))]


def test_a_folder_that_cannot_write_is_refused_before_the_model_is_loaded(small_config, tmp_path, monkeypatch):
    monkeypatch.setattr("flowgrpo_rc.trainer.setup.open_checked", lambda *_: pytest.fail("loaded"))
    with pytest.raises(ValueError, match="algorithm.prompt_writer.path: .* has no config.json"):
        FlowGRPOTrainer(small_config(*REQUESTS, *WITH, f"{WRITER}.path={tmp_path}"))


@pytest.mark.run
def test_rewrites_of_a_stale_adapter_are_refused(small_config):
    trainer = FlowGRPOTrainer(small_config(*REQUESTS, *WITH))
    trainer.run.writer.engine.adapter_version = 7
    with pytest.raises(RolloutSyncError, match="sampled with adapter version 7, expected 0"):
        trainer.fit()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            (f"{WRITER}.engine.devices=[cpu]",),
            r"engine.devices: got \['cpu'\] with placement=trainer; clear it, or set placement=process",
        ),
        (
            (f"{WRITER}.engine.devices=[gpu]", f"{WRITER}.engine.placement=process"),
            "algorithm.prompt_writer.engine.devices: got 'gpu'; a device is cpu or a kind and a number",
        ),
        (
            (f"{WRITER}.engine.devices=[cuda:0+cuda:1]", f"{WRITER}.engine.placement=process"),
            "engine.devices: got cuda:0.cuda:1; an engine of prompts computes on one device",
        ),
        (
            (f"{WRITER}.engine.name=vllm",),
            "engine.name: got vllm with placement=trainer; vllm needs a process of its own",
        ),
        (
            (
                f"{WRITER}.engine.name=vllm",
                f"{WRITER}.engine.placement=process",
                f"{WRITER}.engine.quantization=fp8_emulated",
            ),
            "engine.quantization: got fp8_emulated, which vllm does not have; clear it, or set name=transformers",
        ),
        ((f"{WRITER}.engine.torch_compile=true",), "engine.torch_compile: got true, but transformers compiles nothing"),
        (
            (f"{WRITER}.engine.name=vllm", f"{WRITER}.engine.placement=process", f"{WRITER}.lora_rank=600"),
            "prompt_writer.lora_rank: got 600, but vllm's adapters have at most 512",
        ),
        (("algorithm.replay.batches=2",), "algorithm.replay.batches: got 2 with a prompt writer"),
        (("reward.normalization=group",), "reward.normalization: got group with a prompt writer"),
        (
            (f"{ROLLOUT}.scout.n=4", f"{WRITER}.learns=writer"),
            "rollout.scout.n: got 4 with prompt_writer.learns=writer",
        ),
        (
            (
                f"{WRITER}.engine.placement=process",
                f"{WRITER}.engine.devices=[cuda:1]",
                f"{ROLLOUT}.placement=process",
                f"{ROLLOUT}.devices=[cuda:1,cuda:2]",
            ),
            "engine.devices: names cuda:1, as actor_rollout_ref.rollout.devices does",
        ),
        (
            (f"{ROLLOUT}.algo.init_same_noise=true", f"{WRITER}.learns=writer"),
            "init_same_noise: got true with prompt_writer.learns=writer, whose rollouts have no stochastic step",
        ),
        (("data.preferences=[pairs.jsonl]",), "prompt_writer.path: got a prompt writer with data.preferences"),
        ((f"{WRITER}.engine.dtype=int8",), "prompt_writer.engine.dtype: got 'int8'; choose one of"),
    ],
)
def test_what_does_not_fit_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        compose("tiny_qwen_image_ocr", [*WITH, *settings])


def test_other_processes_wait_until_a_writer_s_engine_is_up():
    settings = (f"{WRITER}.engine.placement=process", f"{WRITER}.engine.process.start_timeout_s=2000")
    assert compose("tiny_qwen_image_ocr", [*WITH, *settings]).longest_wait == 2060
    assert compose("tiny_qwen_image_ocr", [*WITH, settings[1]]).longest_wait < 2000


def test_requests_are_the_numbers_of_the_prompts():
    """The lists hold out the same numbers as those of the demo, in words."""
    sys.path.append(str(Path(__file__).resolve().parents[2] / "examples" / "tiny_writer"))
    try:
        from number_requests import in_words
    finally:
        sys.path.pop()
    for part in ("train", "test"):
        prompts = Path(resolve_asset(f"asset:tiny_ocr/{part}.txt")).read_text().splitlines()
        lines = Path(resolve_asset(f"asset:tiny_requests/{part}.jsonl")).read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        assert [f'the text "{row["ocr_target"]}"' for row in rows] == prompts
        assert [row["prompt"] for row in rows] == [in_words(row["ocr_target"]) for row in rows]


@pytest.mark.process
def test_the_example_script_trains_both(tmp_path):
    script = Path(__file__).resolve().parents[2] / "examples" / "flowgrpo_trainer" / "run_tiny_prompt_writer.sh"
    command, *overrides = given_by(script, tmp_path, "trainer.total_training_steps=40")
    config = compose("tiny_qwen_image_ocr", overrides)
    writer = config.algorithm.prompt_writer
    assert command == "demo"
    assert (writer.path, writer.learns, writer.rewrites) == ("asset:tiny_writer", "both", 4)
    assert writer.actor.rollout_correction.rollout_is == "token"
    assert config.trainer.total_training_steps == 40


# A reward without ties: images whose advantage is 0 are left out of metrics, a process more or less of them.
TWO = (
    *REQUESTS[:2],
    *WITH,
    "trainer.resume_mode=disable",
    f"{WRITER}.engine.dtype=float32",
    f"{ROLLOUT}.dtype=float32",
)


def main(folder):
    """A run in this process group; torchrun starts this file."""
    trainer_of(Path(folder) / "run", *TWO).fit()


@pytest.mark.process
def test_two_processes_give_the_update_of_one(small_config, tmp_path):
    one = FlowGRPOTrainer(small_config(*TWO)).fit().root
    two = tmp_path / "two"
    done = run_process(*TORCHRUN, __file__, two, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.returncode == 0, done.stderr[-3000:]
    assert_close_rows(rows_of(two / "run"), rows_of(one))


if __name__ == "__main__":
    main(sys.argv[1])
    torch.distributed.destroy_process_group()
