"""The shipped tiny model: what tests and the demo take for granted about it, that its script works."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tests_support import built_twice

REPOSITORY = Path(__file__).resolve().parents[1]
MODEL = REPOSITORY / "assets" / "tiny_qwen_image"
PROMPTS = REPOSITORY / "assets" / "tiny_ocr"
EXAMPLE = REPOSITORY / "examples" / "tiny_qwen_image"

ALL_PROMPTS = [f'the text "{number:02d}"' for number in range(100)]


def load(folder: Path):
    from diffusers import QwenImagePipeline

    pipeline = QwenImagePipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="module")
def pipeline():
    return load(MODEL)


def draw(pipeline, prompts: list[str], seed: int = 0) -> np.ndarray:
    images = pipeline(
        prompt=prompts,
        height=32,
        width=32,
        num_inference_steps=6,
        true_cfg_scale=1.0,
        generator=torch.Generator().manual_seed(seed),
        output_type="np",
    ).images
    return (images * 255).round().astype(np.uint8)


@pytest.mark.parametrize(
    ("asset", "limit"), [("tiny_qwen_image", 8e6), ("tiny_kontext", 1.8e6), ("tiny_clip", 1e6), ("tiny_edit", 1e5)]
)
def test_files_are_small_and_name_no_absolute_path(asset, limit):
    files = [file for file in (REPOSITORY / "assets" / asset).rglob("*.*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < limit
    for file in files:
        if "config" in file.name or file.name == "model_index.json":
            assert '"/' not in file.read_text(encoding="utf-8"), file


def test_template_prefix_is_as_long_as_the_pipeline_drops(pipeline):
    prompt = 'the text "42"'
    tokens = pipeline.tokenizer(pipeline.prompt_template_encode.format(prompt))["input_ids"]
    first = pipeline.tokenizer(prompt)["input_ids"][0]
    assert pipeline.prompt_template_encode_start_idx == 34
    assert tokens[34] == first
    assert pipeline.tokenizer.decode(tokens[34:]).startswith(prompt)


def test_all_prompts_have_embeddings_of_one_length_and_no_mask(pipeline):
    with torch.no_grad():
        embeddings, mask = pipeline.encode_prompt(ALL_PROMPTS)
    assert mask is None
    assert embeddings.shape == (100, 11, pipeline.transformer.config.joint_attention_dim)
    assert len(torch.unique(embeddings.flatten(1), dim=0)) == 100


def test_draws_numbers_that_ocr_reads_but_not_all(pipeline):
    pytest.importorskip("rapidocr")
    from flowgrpo_rc.rewards import OCRReward

    prompts = ALL_PROMPTS[::5]
    scores, _ = OCRReward()(draw(pipeline, prompts), prompts)
    assert 0.4 <= scores.mean() <= 0.85


def test_prompt_lists_split_the_hundred_numbers():
    train = (PROMPTS / "train.txt").read_text(encoding="utf-8").splitlines()
    test = (PROMPTS / "test.txt").read_text(encoding="utf-8").splitlines()
    assert (len(train), len(test)) == (80, 20)
    assert sorted(train + test) == ALL_PROMPTS


@pytest.mark.slow
def test_build_script_runs_and_repeats(tmp_path):
    small = ("--images", "200", "--vae-steps", "3", "--flow-steps", "3", "--eval-seeds", "0")
    first = built_twice(EXAMPLE / "build_tiny_qwen_image.py", tmp_path, *small, weights=3)
    for name in ("train.txt", "test.txt"):
        assert (first / "tiny_ocr" / name).read_bytes() == (PROMPTS / name).read_bytes()
    assert draw(load(first / "model"), ALL_PROMPTS[:1]).shape == (1, 32, 32, 3)
