"""The command line in processes of its own: what it imports, what it refuses, what the scripts do."""

import os
import sys
from pathlib import Path

import pytest
import torch
from tests_support import run_process

from flowgrpo_rc import trainer
from flowgrpo_rc.cli.main import main
from flowgrpo_rc.correction import NonFiniteLogProbError

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "flowgrpo_trainer"


def run(*command, cwd, **environment):
    bin_folder = str(Path(sys.executable).parent)
    env = os.environ | {"OMP_NUM_THREADS": "1", "PATH": f"{bin_folder}:{os.environ['PATH']}"} | environment
    return run_process(*command, cwd=cwd, env=env)


@pytest.mark.parametrize(
    "code",
    [
        "import flowgrpo_rc",
        "from flowgrpo_rc.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass",
        "from flowgrpo_rc.cli.compose import compose; compose('tiny_qwen_image_ocr')",
        "from flowgrpo_rc import diffusion_loss, RolloutCorrectionConfig, DiffusionActorConfig, group_advantages",
    ],
)
def test_imports_stay_light(code, tmp_path):
    heavy = ("diffusers", "transformers", "vllm", "peft", "accelerate", "rapidocr", "cv2")
    check = f"\nimport sys; bad = [m for m in {heavy!r} if m in sys.modules]; assert not bad, bad"
    done = run(sys.executable, "-c", code + check, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_config_and_help_need_no_torch(tmp_path):
    code = "from flowgrpo_rc.cli.compose import compose; compose('tiny_qwen_image_ocr'); import sys; "
    done = run(sys.executable, "-c", code + "assert 'torch' not in sys.modules", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_help_lists_the_commands(tmp_path):
    done = run("flowgrpo-rc", "--help", cwd=tmp_path)
    assert done.returncode == 0
    for command in ("train", "demo", "prepare-data", "explain-config"):
        assert command in done.stdout


@pytest.fixture
def refused(tmp_path, capsys):
    """``refused(*overrides)``: a run that must stop with exit code 2, one line of error, and no model loaded."""

    def start(*overrides):
        code = main(["demo", f"trainer.default_local_dir={tmp_path / 'run'}", *overrides])
        said = capsys.readouterr()
        assert code == 2, said
        assert "Traceback" not in said.err
        assert "Run folder" not in said.out
        return said.err.strip().splitlines()[-1]

    return start


def test_bad_data_is_refused_before_the_model(tmp_path, refused):
    (tmp_path / "empty.txt").write_text("\n\n")
    (tmp_path / "unquoted.txt").write_text('the text "42"\na cat on a mat\n' + 'the text "7"\n' * 8)
    (tmp_path / "few.txt").write_text('the text "42"\nthe text "43"\n')
    (tmp_path / "wrong").mkdir()
    # the model folder is wrong too: were it looked at first, that would be the error
    assert "missing.txt" in refused(f"data.train_files={tmp_path}/missing.txt")
    assert "empty.txt" in refused(f"data.train_files={tmp_path}/empty.txt")
    unquoted = refused(f"data.train_files={tmp_path}/unquoted.txt")
    assert "unquoted.txt:2" in unquoted
    assert "a cat on a mat" in unquoted
    few = refused(f"data.train_files={tmp_path}/few.txt")
    assert "train_batch_size: got 8, but the data set holds 2 prompts" in few
    assert "holds no model_index.json" in refused(f"actor_rollout_ref.model.path={tmp_path}/wrong")


def test_a_failing_reward_stops_the_run_with_its_name(tmp_path, capsys):
    (tmp_path / "bad.py").write_text(
        "def raises(images, prompts, metadata):\n    raise KeyError('colour')\n"
        "def nan(images, prompts, metadata):\n    return [1.0] * (len(prompts) - 1) + [float('nan')]\n"
        "def short(images, prompts, metadata):\n    return [1.0]\n"
    )
    small = ("trainer.val_before_train=false", "data.train_batch_size=4", "actor_rollout_ref.rollout.n=2")
    for name, message in (
        ("raises", "KeyError"),
        ("nan", "1 non-finite of 8 scores"),
        ("short", "expected (8,)"),
    ):
        path = (
            f"reward.custom_reward_function.path={tmp_path}/bad.py",
            f"reward.custom_reward_function.name={name}",
        )
        code = main(["demo", *small, *path, f"trainer.default_local_dir={tmp_path / name}"])
        said = capsys.readouterr().err
        assert code == 1, said
        assert message in said
        assert "Traceback" not in said


def test_prepare_data_and_explain_config(tmp_path):
    (tmp_path / "train.txt").write_text('a sign that says "stop"\n')
    (tmp_path / "test.txt").write_text('a sign that says "go"\n')
    done = run("flowgrpo-rc", "prepare-data", "ocr", "--input", tmp_path, "--output", tmp_path / "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "train.parquet").is_file()
    done = run("flowgrpo-rc", "explain-config", "bypass_mode=true", "rollout_is=sequence", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "bypass" in done.stdout.lower()
    done = run("flowgrpo-rc", "explain-config", "bypas_mode=true", cwd=tmp_path)
    assert done.returncode == 2
    assert "bypass_mode" in done.stderr


@pytest.mark.slow
def test_the_demo_script(tmp_path):
    script = EXAMPLES / "run_tiny_qwen_image_ocr_lora_rollout_corr.sh"
    done = run(
        "bash",
        script,
        "trainer.total_training_steps=1",
        "actor_rollout_ref.rollout.val_kwargs.n=1",
        cwd=tmp_path,
        OUTPUTS=str(tmp_path / "out"),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    root = tmp_path / "out" / "flowgrpo_rc" / "tiny_qwen_image_ocr"
    assert (root / "samples" / "before_after.png").is_file()
    assert "before_after.png" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen_image", "sd35_medium"])
def test_the_full_size_script_with_the_tiny_model(tmp_path, tiny_sd3_path, family):
    """Every override of the real script stays; the model, sizes and two steps are substituted on top."""
    lines = "".join(f'a sign that says "{n:02d}"\n' for n in range(8))
    for split in ("train", "test"):
        (tmp_path / f"{split}.txt").write_text(lines)
    assert main(["prepare-data", "ocr", "--input", str(tmp_path), "--output", str(tmp_path / "data")]) == 0
    substitutes = (
        "data.train_batch_size=4",
        "data.val_max_samples=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.pipeline.height=32",
        "actor_rollout_ref.rollout.pipeline.width=32",
        "actor_rollout_ref.rollout.val_kwargs.pipeline.num_inference_steps=10",
        "trainer.total_training_steps=2",
        "trainer.device=cpu",
    )
    script = EXAMPLES / f"run_{family}_ocr_lora_rollout_corr.sh"
    done = run(
        *("bash", script, *substitutes),
        cwd=tmp_path,
        MODEL="asset:tiny_qwen_image" if family == "qwen_image" else tiny_sd3_path,
        DATA=str(tmp_path / "data"),
        OUTPUTS=str(tmp_path / "out"),
        NUM_GPUS="1",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    root = tmp_path / "out" / "flow_grpo" / f"{family}_ocr_lora_rollout_corr"
    assert len((root / "metrics.jsonl").read_text().splitlines()) == 3
    assert list(root.rglob("events.out.tfevents.*"))


def test_a_log_prob_that_is_not_finite_ends_a_run_with_its_message(monkeypatch, capsys):
    """From the scoring pass, outside the update: no traceback, exit code 1."""
    bad = torch.tensor([[0.0, torch.nan]])

    class Trainer:
        def __init__(self, config):
            pass

        def fit(self):
            raise NonFiniteLogProbError(bad, torch.zeros(1, 2), None)

    monkeypatch.setattr(trainer, "FlowGRPOTrainer", Trainer)
    assert main(["train", "--config-name", "tiny_qwen_image_ocr"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert "NaN" in said
