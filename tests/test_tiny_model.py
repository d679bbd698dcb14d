"""The shipped tiny model: what tests and the demo take for granted about it, that its script works."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tests_support import run_side_by_side

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


def test_loads_with_plain_diffusers(pipeline):
    for part in (pipeline.transformer, pipeline.vae, pipeline.text_encoder):
        assert part.dtype == torch.float32
    assert type(pipeline.transformer).__name__ == "QwenImageTransformer2DModel"
    assert type(pipeline.vae).__name__ == "AutoencoderKLQwenImage"
    assert type(pipeline.text_encoder).__name__ == "Qwen2_5_VLForConditionalGeneration"
    assert type(pipeline.tokenizer).__name__ == "Qwen2Tokenizer"


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


def test_same_seed_draws_the_same_picture(pipeline):
    first, second = (draw(pipeline, ALL_PROMPTS[40:42], seed=3) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert first.shape == (2, 32, 32, 3)
    assert (draw(pipeline, ALL_PROMPTS[40:42], seed=4) != first).any()


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
    folders = [tmp_path / name for name in ("first", "second")]
    small = ("--images", "200", "--vae-steps", "3", "--flow-steps", "3", "--eval-seeds", "0")
    script = EXAMPLE / "build_tiny_qwen_image.py"
    run_side_by_side(*([sys.executable, script, "--output", folder / "model", *small] for folder in folders))
    first, second = folders
    weights = sorted(file.relative_to(first) for file in first.rglob("*.safetensors"))
    assert len(weights) == 3
    for file in weights:
        assert (first / file).read_bytes() == (second / file).read_bytes(), file
    for name in ("train.txt", "test.txt"):
        assert (first / "tiny_ocr" / name).read_bytes() == (PROMPTS / name).read_bytes()
    assert "Not measured." in (first / "model" / "README.md").read_text(encoding="utf-8")
    assert draw(load(first / "model"), ALL_PROMPTS[:1]).shape == (1, 32, 32, 3)
