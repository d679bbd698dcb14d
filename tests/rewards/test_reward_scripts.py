"""The full-size scripts, each run for a step with the tiny model and tiny scorers in their place.

Every setting of the real script stays; what is substituted comes on top, as a user's own overrides do.
"""

import json

import pytest
from fake_judge import FakeJudge
from tests_support import arguments_of

from flowgrpo_rc.cli.main import main

SMALL = (
    "data.train_batch_size=2",
    "data.val_max_samples=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.rollout.probe.images=2",
    "actor_rollout_ref.rollout.pipeline.height=32",
    "actor_rollout_ref.rollout.pipeline.width=32",
    "actor_rollout_ref.rollout.val_kwargs.pipeline.num_inference_steps=2",
    "reward.clip_cosine.model_path=asset:tiny_clip",
    "trainer.total_training_steps=1",
    "trainer.logger=[console]",
    "trainer.device=cpu",
)
UNIFIED = "Alignment Score (1-5): 4\nCoherence Score (1-5): 3\nStyle Score (1-5): 2"


def rows_of(name, tmp_path, model, *overrides, **environment):
    """The lines of ``metrics.jsonl`` of the script's run: before training, and of its one step."""
    for split in ("train", "test"):
        (tmp_path / f"{split}.txt").write_text("".join(f'a sign that says "{n:02d}"\n' for n in range(4)))
    files = {"TRAIN": str(tmp_path / "train.txt"), "VAL": str(tmp_path / "test.txt")}
    choices = {"MODEL": model, "OUTPUTS": str(tmp_path / "out"), "NUM_GPUS": "1", "ENGINE": "diffusers"}
    _, given = arguments_of(f"run_{name}.sh", tmp_path, "python", **choices | files | environment)
    assert main(["train", *given, *SMALL, *overrides]) == 0
    rows = (tmp_path / "out" / "flow_grpo" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(row) for row in rows]


@pytest.mark.slow
def test_ocr_on_the_prompts_of_a_prepared_folder(tmp_path):
    for split in ("train", "test"):
        (tmp_path / f"{split}.txt").write_text("".join(f'a sign that says "{n:02d}"\n' for n in range(8)))
    assert main(["prepare-data", "ocr", "--input", str(tmp_path), "--output", str(tmp_path / "data")]) == 0
    name = "qwen_image_ocr_lora_rollout_corr"
    more = "trainer.logger=[console,tensorboard]"
    rows = rows_of(name, tmp_path, "asset:tiny_qwen_image", more, DATA=str(tmp_path / "data"), TRAIN="", VAL="")
    assert len(rows) == 2
    assert list((tmp_path / "out" / "flow_grpo" / name).rglob("events.out.tfevents.*"))


@pytest.mark.slow
def test_pickscore_on_qwen_image(tmp_path):
    rows = rows_of(
        *("qwen_image_pickscore_lora_rollout_corr", tmp_path, "asset:tiny_qwen_image"),
        "reward.pickscore.model_path=asset:tiny_clip",
    )
    assert rows[1]["reward/mean"] == pytest.approx(rows[1]["reward/pickscore"])
    # One network serves both, so the ratio of the scores is the ratio of the formulas: its scale over 26.
    before = rows[0]["val/reward/pickscore"] / rows[0]["val/reward/clip_cosine"]
    assert before == pytest.approx(rows[1]["val/reward/pickscore"] / rows[1]["val/reward/clip_cosine"], rel=1e-4)


@pytest.mark.slow
def test_hpsv2_and_ocr_on_stable_diffusion(tmp_path, tiny_sd3_path):
    rows = rows_of(
        *("sd35_medium_hpsv2_ocr_lora_rollout_corr", tmp_path, str(tiny_sd3_path)),
        "reward.hpsv2.model_path=asset:tiny_clip",
    )
    assert {"reward/ocr", "reward/hpsv2", "reward/std/hpsv2"} <= rows[1].keys()
    assert {"val/reward/ocr", "val/reward/hpsv2", "val/reward/clip_cosine"} <= rows[1].keys()


TINY_WRITER = {
    "WRITER": "asset:tiny_writer",
    "TRAIN": "asset:tiny_requests/train.jsonl",
    "VAL": "asset:tiny_requests/test.jsonl",
}
WRITES = ("algorithm.prompt_writer.max_new_tokens=40", "algorithm.prompt_writer.rewrites=2")


@pytest.mark.slow
def test_a_prompt_writer_on_stable_diffusion(tmp_path, tiny_sd3_path):
    rows = rows_of(
        *("sd35_medium_prompt_writer", tmp_path, str(tiny_sd3_path)),
        *WRITES,
        "reward.pickscore.model_path=asset:tiny_clip",
        "algorithm.prompt_writer.system_prompt=null",  # a request as the tiny writer knows it
        "algorithm.prompt_writer.prompt_marker=text",
        **TINY_WRITER,
    )
    assert 0 < rows[1]["writer/unfit_fraction"] < 1
    assert rows[1]["writer/grad_norm"] > 0
    assert rows[1]["writer/rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=0.01)
    assert rows[1]["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=0.1)


@pytest.mark.slow
def test_a_prompt_writer_on_qwen_image(tmp_path):
    rows = rows_of("qwen_image_prompt_writer", tmp_path, "asset:tiny_qwen_image", *WRITES, **TINY_WRITER)
    assert rows[1]["writer/kl_loss"] == 0  # before the first update the adapter is the base
    assert rows[1]["writer/score"] == pytest.approx(rows[1]["reward/mean"])


@pytest.mark.slow
def test_a_judge_on_qwen_image(tmp_path):
    with FakeJudge(lambda asked: UNIFIED) as judge:
        rows = rows_of(
            *("qwen_image_judge_lora_rollout_corr", tmp_path, "asset:tiny_qwen_image"), JUDGE=f"{judge.url}/v1"
        )
    # The blank image before training, two validations of two images, and two groups of two.
    assert len(judge.asked) == 1 + 2 * 2 + 2 * 2
    assert rows[1]["reward/judge"] == pytest.approx((3 - 1) / 4)
