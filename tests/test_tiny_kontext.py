"""The shipped tiny editing model: what the page and the tests take for granted about it, and that its scripts work."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests_support import adapter_of, built_twice, given_by, last_of_each, rows_of
from tolerances import LATENT
from torch.testing import assert_close

from flowgrpo_rc.cli.compose import compose
from flowgrpo_rc.data import load_prompts
from flowgrpo_rc.models import Conditioning, PromptEncoder, load_model
from flowgrpo_rc.prompt import Prompt
from flowgrpo_rc.rewards import load_function
from flowgrpo_rc.trainer import FlowGRPOTrainer

REPOSITORY = Path(__file__).resolve().parents[1]
MODEL = REPOSITORY / "assets" / "tiny_kontext"
EDITS = REPOSITORY / "assets" / "tiny_edit"
EXAMPLES = REPOSITORY / "examples"
SCRIPT = EXAMPLES / "flowgrpo_trainer" / "run_tiny_kontext_edit.sh"
REWARD = EXAMPLES / "tiny_kontext" / "style_reward.py"
STEPS = 6
TOKENS = 16


@pytest.fixture(scope="module")
def records():
    return load_prompts([EDITS / "train.jsonl", EDITS / "test.jsonl"])


@pytest.fixture(scope="module")
def pipeline():
    from diffusers import FluxKontextPipeline

    pipeline = FluxKontextPipeline.from_pretrained(MODEL)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="module")
def same_style():
    return load_function(str(REWARD), "same_style")


def draw(pipeline, records, seeds=None, output_type="np"):
    """By diffusers' own call, a picture a record, from noise of its seed."""
    references = np.stack([np.asarray(record.images[0], dtype=np.float32) for record in records]) / 255
    return pipeline(
        image=torch.from_numpy(references).permute(0, 3, 1, 2),
        prompt=[record.prompt for record in records],
        height=32,
        width=32,
        max_area=32 * 32,
        _auto_resize=False,
        num_inference_steps=STEPS,
        max_sequence_length=TOKENS,
        generator=[torch.Generator().manual_seed(seed) for seed in seeds or range(len(records))],
        output_type=output_type,
    ).images


@pytest.mark.portable
def test_the_adapter_draws_what_the_pipeline_draws(pipeline, records):
    """Four prompts with a reference each, in one batch; every image from noise of its own."""
    chosen = records[80:84]
    expected = draw(pipeline, chosen, seeds=range(4), output_type="latent")
    model = load_model(str(MODEL))
    prompts = PromptEncoder(model, TOKENS)([Prompt(r.prompt, r.images, 1024) for r in chosen])
    conditioning = Conditioning(prompts, None, 1.0, None, 32, 32)
    schedule = model.schedule(STEPS, 32, 32)
    latents = torch.stack([model.initial_noise(torch.Generator().manual_seed(i), 32, 32) for i in range(4)])
    for t, sigma, following in zip(schedule.timesteps, schedule.sigmas[:-1], schedule.sigmas[1:], strict=True):
        with torch.no_grad():
            velocity = model.velocity(model.transformer, latents, t.expand(4), conditioning)
        latents = latents + (following - sigma) * velocity
    assert_close(latents, expected, atol=LATENT, rtol=0)


def test_an_edit_follows_its_prompt_and_its_reference(pipeline, records, same_style):
    """The number that OCR reads is mostly the one asked for, and the colours are the reference's and no other's."""
    pytest.importorskip("rapidocr")
    from flowgrpo_rc.rewards import OCRReward

    chosen = records[::4]
    images = (draw(pipeline, chosen) * 255).round().astype(np.uint8)
    prompts = [record.prompt for record in chosen]
    scores, _ = OCRReward()(images, prompts)
    assert 0.4 <= scores.mean() <= 0.85
    own = same_style(images, prompts, [record.metadata for record in chosen])
    others = same_style(images, prompts, [record.metadata for record in chosen[1:] + chosen[:1]])
    assert own.mean() > others.mean() + 0.3


@pytest.mark.slow
def test_the_example_script_trains(tmp_path):
    """Two steps on fewer images; the adapter moves, and the grids show the references."""
    command, *overrides = given_by(SCRIPT, tmp_path)
    assert command == "train"
    fewer = (
        "data.val_max_samples=2",
        "data.train_batch_size=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=1",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.val_kwargs.n=1",
        "trainer.total_training_steps=2",
        "trainer.device=cpu",
        f"trainer.default_local_dir={tmp_path / 'run'}",
        f"actor_rollout_ref.model.prompt_store={tmp_path / 'store'}",
    )
    root = FlowGRPOTrainer(compose("flowgrpo_trainer", last_of_each(*overrides, *fewer))).fit().root
    rows = rows_of(root)
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows[1:]:
        assert row["reward/mean"] == pytest.approx(row["reward/ocr"] + row["reward/same_style"])
        assert row["reward/same_style"] > 0.3
    assert any(value.abs().max() > 0 for name, value in adapter_of(root).items() if "lora_B" in name)
    with Image.open(root / "samples" / "step_00000.png") as grid:
        pixels = np.asarray(grid)
    reference = np.asarray(load_prompts(EDITS / "test.jsonl")[0].images[0])
    assert tuple(pixels[8 + 26, 8]) == tuple(reference[0, 0])


@pytest.mark.slow
def test_build_script_runs_and_repeats(tmp_path):
    small = ("--pairs", "100", "--vae-steps", "3", "--flow-steps", "3", "--eval-seeds", "0")
    first = built_twice(EXAMPLES / "tiny_kontext" / "build_tiny_kontext.py", tmp_path, *small, weights=4)
    written = sorted(file.relative_to(EDITS) for file in EDITS.rglob("*") if file.is_file())
    assert len(written) == 38
    for file in written:
        if file.suffix == ".png":  # compressed as the zlib in use does; the pixels are the same
            with Image.open(first / "tiny_edit" / file) as one, Image.open(EDITS / file) as other:
                np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
        else:
            assert (first / "tiny_edit" / file).read_bytes() == (EDITS / file).read_bytes()
