"""The model card beside the final LoRA: metadata for a hub, held-out rewards, and lines that draw with it."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
from huggingface_hub import ModelCard
from tests_support import rows_of

from flowgrpo_rc.cli.compose import compose
from flowgrpo_rc.models.registry import FAMILIES
from flowgrpo_rc.rollout.config import PipelineConfig
from flowgrpo_rc.trainer.model_card import _arguments, model_card

EMA = "actor_rollout_ref.actor.ema_decay=0.5"


def code_of(card):
    (code,) = re.findall(r"^```python\n(.*?)^```$", card, re.M | re.S)
    return code


@pytest.mark.run
def test_the_card_of_a_run_loads_its_lora(trained_run, monkeypatch):
    folder = trained_run(EMA, "trainer.test_freq=1")
    rows = [row for row in rows_of(folder.root) if "val/reward/mean" in row]
    for lora, averaged in ((folder.lora, False), (folder.lora_ema, True)):
        card = ModelCard.load(lora / "README.md")
        assert card.data.library_name == "diffusers"
        assert card.data.pipeline_tag == "text-to-image"
        assert "lora" in card.data.tags
        assert ("moving averages" in card.text) == averaged
        assert f"| mean | {rows[0]['val/reward/mean']:.4g} | {rows[-1]['val/reward/mean']:.4g} |" in card.text
    # As from the hub: the folder of the card is named lora.
    monkeypatch.chdir(folder.root)
    scope = {}
    exec(code_of(ModelCard.load(folder.lora / "README.md").text), scope)
    assert np.asarray(scope["image"]).shape == (32, 32, 3)
    assert scope["pipe"].get_active_adapters() == ["default_0"]


def test_a_hub_model_is_named_for_the_hub():
    config = compose(
        "tiny_qwen_image_ocr",
        ["actor_rollout_ref.model.path=Qwen/Qwen-Image", "trainer.experiment_name=posters"],
    )
    pipe = type("QwenImagePipeline", (), {"load_lora_weights": None})()
    content = model_card(config, SimpleNamespace(pipe=pipe), [], 7, averaged=False)
    card = ModelCard(content)
    assert card.data.base_model == "Qwen/Qwen-Image"
    assert "# posters: LoRA" in card.text
    assert "7 from train.txt" in card.text
    assert "The run had no validation." in card.text
    compile(code_of(content), "card", "exec")


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("StableDiffusion3Pipeline", {"true_cfg_scale": 4.5}, "guidance_scale=4.5"),
        # Its pipeline counts from the conditional velocity.
        ("ZImagePipeline", {"true_cfg_scale": 4.0}, "guidance_scale=3.0"),
        ("QwenImagePipeline", {"true_cfg_scale": 4.0}, "true_cfg_scale=4.0"),
        ("FluxPipeline", {"guidance_scale": 3.5}, "true_cfg_scale=1.0, guidance_scale=3.5"),
        ("Flux2Pipeline", {"guidance_scale": 2.5}, "num_inference_steps=10, guidance_scale=2.5"),
        ("FluxKontextPipeline", {"guidance_scale": 2.5}, 'image=picture, prompt="a prompt"'),
    ],
)
def test_guidance_has_the_name_and_scale_of_the_pipeline(name, settings, says):
    assert name in FAMILIES
    assert says in _arguments(name, PipelineConfig(**settings))
