"""Pixels that are NaN or infinite are an error that names images and remedy, wherever a VAE decodes."""

import json
import re
import shutil

import pytest
import torch
from damage import edit_weights
from tests_support import SMALL_RUN

from flowgrpo_rc.cli.main import main
from flowgrpo_rc.models import NonFiniteImageError, UnsupportedModelError, base, load_model
from flowgrpo_rc.paths import resolve_asset

SIZE = 32
TOO_LARGE = 60_000.0
"""Finite in float16, but no longer where the VAE multiplies it."""


def latents_of(model, count, generator=None):
    return torch.randn(count, *model.latent_shape(SIZE, SIZE), generator=generator or torch.Generator().manual_seed(0))


@pytest.fixture
def pipeline_copy(tmp_path):
    return shutil.copytree(resolve_asset("asset:tiny_qwen_image"), tmp_path / "model")


def test_float16_names_count_rows_and_a_wider_precision():
    model = load_model("asset:tiny_qwen_image", dtype="float16")
    latents = latents_of(model, 4)
    latents[1] = TOO_LARGE
    latents[3] = -TOO_LARGE
    with pytest.raises(NonFiniteImageError, match=r"2 of 4 images \(rows \[1, 3\]\) .* in float16; ") as caught:
        model.decode(latents, SIZE, SIZE)
    assert re.search(r"actor_rollout_ref\.model\.dtype=float32 or bfloat16", str(caught.value))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_one_pixel_is_enough(tiny_model, monkeypatch, value):
    pixels = torch.zeros(3, 3, 4, 4)
    pixels[2, 1, 0, 3] = value
    monkeypatch.setattr(tiny_model, "_decode", lambda *arguments: pixels)
    with pytest.raises(NonFiniteImageError, match=r"1 of 3 images \(rows \[2\]\) .* in float32; the latents reach 7"):
        tiny_model.decode(torch.full((3, 1), -7.0), 4, 4)


def overflow(state):
    """Weights are fine in float16, activations are not: infinite, then NaN where they are normalised."""
    state["decoder.conv_in.weight"] = torch.sign(state["decoder.conv_in.weight"]) * TOO_LARGE


def test_a_vae_that_overflows_is_refused_when_it_is_loaded(pipeline_copy):
    edit_weights(pipeline_copy, "vae", overflow)
    load_model(str(pipeline_copy), dtype="float32")
    with pytest.raises(UnsupportedModelError, match=r"the vae decoded 1 of 1 images .*model\.dtype=float32") as caught:
        load_model(str(pipeline_copy), dtype="float16")
    assert "download" not in str(caught.value)


def breaks_down_after(count, monkeypatch):
    """From then on the VAE of every model decodes to NaN."""
    from flowgrpo_rc.models.qwen_image import QwenImage

    decode = QwenImage._decode
    decoded = []

    def breaks_down(self, latents, height, width):
        decoded.append(len(latents))
        pixels = decode(self, latents, height, width)
        return pixels * torch.nan if sum(decoded) > count else pixels

    monkeypatch.setattr(QwenImage, "_decode", breaks_down)


@pytest.mark.run
def test_a_run_that_meets_them_later_keeps_what_it_saved(tmp_path, capsys, monkeypatch):
    breaks_down_after(1 + 16, monkeypatch)  # one image when the model is loaded, 16 in the first step
    settings = ("trainer.val_before_train=false", "data.val_files=null", "trainer.save_freq=1")
    run = tmp_path / "run"
    assert main(["demo", *SMALL_RUN, *settings, f"trainer.default_local_dir={run}"]) == 1
    assert_one_error(capsys)
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [1]
    assert (run / "checkpoints" / "step_1").is_dir()


def assert_one_error(capsys):
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(error) == 1
    assert "pixels that are NaN or infinite" in error[0]


def test_images_are_decoded_a_few_at_a_time(tiny_model, monkeypatch):
    """A chunk's size changes no more than rounding, and rows are counted over all chunks."""
    latents = torch.randn(5, *tiny_model.latent_shape(32, 32), generator=torch.Generator().manual_seed(0))
    whole = tiny_model.decode(latents, 32, 32)
    sizes = []
    decode = tiny_model._decode
    monkeypatch.setattr(tiny_model, "_decode", lambda part, h, w: sizes.append(len(part)) or decode(part, h, w))
    assert torch.equal(tiny_model.decode(latents, 32, 32), whole)  # four images of 512 pixels to a side are many here
    monkeypatch.setattr(base, "PIXELS_DECODED_AT_ONCE", 2 * 32 * 32)
    in_parts = tiny_model.decode(latents, 32, 32)
    monkeypatch.setattr(base, "PIXELS_DECODED_AT_ONCE", 1)
    tiny_model.decode(latents, 32, 32)
    assert sizes == [5, 2, 2, 1, 1, 1, 1, 1, 1]
    assert (in_parts.int() - whole.int()).abs().max() <= 1
    latents[3] = torch.inf
    with pytest.raises(NonFiniteImageError, match=r"the vae decoded 1 of 5 images \(rows \[3\]\) to pixels"):
        tiny_model.decode(latents, 32, 32)
