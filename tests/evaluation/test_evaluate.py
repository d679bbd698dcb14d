"""``flowgrpo-rc evaluate``: a run's own rewards to the digit, its exit codes, and what it refuses."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests_support import ADAPTER, TORCHRUN, run_process

from flowgrpo_rc.cli.main import main
from flowgrpo_rc.trainer.setup import Run

DEMO = ("--config-name", "tiny_qwen_image_ocr")
REWARD = "compute_score"


@pytest.fixture
def evaluate(tmp_path, capsys):
    """``evaluate(*arguments)``: exit code, standard output, lines of standard error, and the result's file."""

    def call(*arguments):
        capsys.readouterr()
        code = main(["evaluate", "--out", str(tmp_path / "out"), *map(str, arguments)])
        said = capsys.readouterr()
        file = tmp_path / "out" / "evaluation.json"
        return code, said.out, said.err.splitlines(), json.loads(file.read_text()) if file.exists() else None

    return call


def write_lora(folder, source, change, alpha=1, rank=1):
    """A LoRA's file made of another one's tensors; ``change(name, tensor)`` gives each new one, or None."""
    made = {name: change(name, tensor) for name, tensor in load_file(source / ADAPTER).items()}
    folder.mkdir(parents=True)
    settings = {"lora_adapter_metadata": json.dumps({"transformer.r": rank, "transformer.lora_alpha": alpha})}
    save_file({n: t.contiguous() for n, t in made.items() if t is not None}, folder / ADAPTER, settings)
    return folder


def without_effect(name, tensor):
    return torch.zeros_like(tensor) if "lora_B" in name else tensor


def means(result, model):
    rows = [row for row in result["table"] if row["model"] == model and not row["score"].startswith("images/")]
    return {row["score"]: row["mean"] for row in rows}


@pytest.mark.run
def test_a_run_finds_its_own_rewards_again(evaluate, finished_run, tmp_path):
    """Final LoRA, checkpoint of step 1 and base are the validations of steps 2, 1 and 0; a LoRA of zeros is the base,
    and one of another rank on fewer layers changes no other model's scores."""
    zero = write_lora(tmp_path / "zero", finished_run.lora, without_effect)
    loras = ("--lora", f"first={finished_run.checkpoints / 'step_1'}", "--lora", f"zero={zero}")
    code, said, _, result = evaluate("--run-dir", finished_run.root, *loras)
    assert code == 0
    rows = {row["step"]: row for row in finished_run.rows()}
    for step, model in ((0, "base"), (1, "first"), (2, "lora"), (0, "zero")):
        expected = {name: rows[step][f"val/reward/{name}"] for name in ("mean", REWARD)}
        assert means(result, model) == expected
    assert len({means(result, model)["mean"] for model in ("base", "first", "lora")}) == 3
    same = [row for row in result["table"] if row["model"] == "zero"]
    assert [(row["difference"], row["interval"]) for row in same] == [(0, [0, 0])] * len(same)
    assert said.count("4 images in") == 4
    assert result["loras"]["first"] == {"folder": str(finished_run.checkpoints / "step_1"), "rank": 8, "layers": 32}
    assert len(result["prompts"]) == 4
    assert (tmp_path / "out" / "grid.png").stat().st_size > 5000
    assert "zero" in (tmp_path / "out" / "evaluation.html").read_text()

    def wide(name, tensor):
        if "to_q" not in name:
            return None
        shape = (11, tensor.shape[1]) if "lora_A" in name else (tensor.shape[0], 11)
        return torch.randn(shape, generator=torch.Generator().manual_seed(len(name) + 7))

    loras = ("--lora", f"wide={write_lora(tmp_path / 'wide', finished_run.lora, wide)}")
    # An average of what is drawn with would mix the adapters.
    average = ("algorithm.old_policy_decay=0.9", "algorithm.rollout_correction=null")
    average += ("actor_rollout_ref.actor.diffusion_loss.loss_mode=awm",)
    code, said, _, padded = evaluate("--run-dir", finished_run.root, *loras, "--tolerance", "mean=1", *average)
    assert code == 0
    assert "kept as" in said
    assert means(padded, "base") == means(result, "base")
    assert means(padded, "lora")["mean"] == pytest.approx(means(result, "lora")["mean"], abs=1e-4)
    gain = means(padded, "wide")["mean"] - means(padded, "base")["mean"]
    assert gain > 1e-2
    # With the opposite weight it is a loss.
    tolerance = ("--tolerance", f"mean={0.9 * gain}", "reward.custom_reward_function.weight=-1")
    code, said, _, _ = evaluate("--run-dir", finished_run.root, *loras, *tolerance)
    assert code == 3
    assert "wide is worse than the base by" in said


@pytest.mark.run
def test_validation_prompts_are_enough(evaluate, finished_run, tmp_path):
    """Prompts of its own, more images of each, another sampler and another reward; no run folder."""
    (tmp_path / "mine.txt").write_text('the text "07"\n')
    settings = ("data.train_files=", "actor_rollout_ref.rollout.val_kwargs.pipeline.num_inference_steps=2")
    rewards = ("reward.functions.ocr=0", "reward.functions.jpeg_compressibility=1")
    code, said, _, result = evaluate(
        *DEMO,
        *("--prompts", tmp_path / "mine.txt", "--images", "3", "--lora", f"run={finished_run.root}"),
        *settings,
        *rewards,
    )
    assert code == 0
    assert "One prompt gives no interval" in said
    assert "run: 3 images in" in said
    assert [row["score"] for row in result["table"]][:4:2] == ["mean", "jpeg_compressibility"]
    assert result["table"][-1]["score"] == "images/diversity"
    assert result["table"][1]["interval"] is None
    assert [one["prompt"] for one in result["prompts"]] == ['the text "07"']
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.txt", "out"]


@pytest.mark.process
def test_two_processes_equal_one(evaluate, finished_run, tmp_path):
    one = evaluate("--run-dir", finished_run.root)[-1]
    shutil.rmtree(tmp_path / "out")
    command = (*TORCHRUN, "-m", "flowgrpo_rc.cli.main", "evaluate", "--run-dir", finished_run.root, "--out")
    done = run_process(*command, tmp_path / "two")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("lora: 4 images in") == 1
    two = json.loads((tmp_path / "two" / "evaluation.json").read_text())
    for mine, other in zip(one["prompts"], two["prompts"], strict=True):
        assert mine["prompt"] == other["prompt"]
        for model, scores in mine["scores"].items():
            assert other["scores"][model] == pytest.approx(scores, rel=0.02, abs=1e-3)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--images=0"], "--images: got 0; give 1 or more images a prompt"),
        (["--lora=x"], "--lora: got 'x'; write NAME=FOLDER"),
        (["--lora=base={lora}"], "--lora: the name 'base' is taken already; give another"),
        (["--lora=a={lora}", "--lora=a={lora}"], "--lora: the name 'a' is taken already; give another"),
        (["--lora=a=nowhere"], "nowhere is no folder; give the one that holds pytorch_lora_weights.safetensors"),
        (["--lora=a={empty}"], "--lora: a: {empty} holds no pytorch_lora_weights.safetensors; give a folder"),
        (["--lora=a={other}"], "4x4, there it is missing; give the configuration of its model"),
        (["--lora=a={shape}"], "--lora: a: the LoRA is another model's than asset:tiny_qwen_image: its layer "),
        (
            ["--run-dir={empty}"],
            "--run-dir: {empty} holds no config.yaml; give a run folder, outputs/PROJECT/EXPERIMENT",
        ),
        (["--run-dir={run}"], "{run} holds no lora/; give one of its checkpoints, checkpoints/step_N"),
        (
            ["--run-dir={run}", *DEMO],
            "--run-dir: the run's config.yaml is used; leave out --config-name and --config-dir",
        ),
        (["--tolerance=ocr=0.1"], "--tolerance: there is no LoRA to compare with the base; give --lora or --run-dir"),
        (["--lora=a={lora}", "--tolerance=ocrr=0"], "--tolerance: no reward 'ocrr'; there are: mean, ocr"),
        (["--lora=a={lora}", "--tolerance=ocr=-1"], "--tolerance: got 'ocr=-1'; give a number from 0"),
        (["--out={file}"], "--out: {file} is not a folder; give one, or a name that is free"),
        (["--prompts=missing.txt"], "missing.txt does not exist or is not a file; check the path"),
        (["--prompts={file}"], "unknown format '.csv'; prompt files end in .txt, .jsonl, .parquet"),
        (["data.val_files="], "data.val_files: is empty; give a .txt, .jsonl or .parquet file of prompts"),
        # It loads a CLIP.
        pytest.param(
            ["reward.functions.clip_similarity=1", "reward.clip_similarity.model_path=asset:tiny_clip"],
            "has no 'images', with whose first image the reward 'clip_similarity'",
            marks=pytest.mark.run,
        ),
    ],
)
def test_what_is_refused_before_the_model_is_loaded(options, says, evaluate, tmp_path, monkeypatch):
    monkeypatch.setattr(Run, "_load_model", lambda _: pytest.fail("the model is loaded"))
    paths = {name: str(tmp_path / name) for name in ("lora", "empty", "other", "shape", "run")}
    layer = "transformer.transformer_blocks.0.attn.to_q"
    for name, key, size in (("lora", layer, 128), ("other", "transformer.blocks.0.q", 4), ("shape", layer, 4)):
        (tmp_path / name).mkdir()
        pair = {f"{key}.lora_A.weight": torch.zeros(2, size), f"{key}.lora_B.weight": torch.zeros(size, 2)}
        save_file(pair, tmp_path / name / ADAPTER)
    for name in ("empty", "run"):
        (tmp_path / name).mkdir()
    (tmp_path / "run" / "config.yaml").write_text("trainer: {seed: 1}\n")
    (tmp_path / "file.csv").write_text("prompt\n")
    paths["file"] = str(tmp_path / "file.csv")
    own = [] if any(option.startswith("--run-dir") for option in options) else DEMO
    code, out, errors, _ = evaluate(*own, *(option.format(**paths) for option in options))
    assert (code, out) == (2, "")
    assert errors[-1].startswith("error: ")
    assert says.format(**paths) in errors[-1]
