"""The table of model families: an entry and its adapter's file are all that a family takes."""

import json
import shutil
import sys

import diffusers
import pytest
import torch

from flowgrpo_rc.models import SUPPORTED_PIPELINES, DiffusionModel, check_pipeline, load_model
from flowgrpo_rc.models.registry import FAMILIES, FamilyEntry
from flowgrpo_rc.paths import resolve_asset

SOURCE = '''
from flowgrpo_rc.models.qwen_image import QwenImage

class Inverted(QwenImage):
    """Draws the negative of what Qwen-Image draws."""

    def _decode(self, latents, height, width):
        return -super()._decode(latents, height, width)
'''


@pytest.fixture
def inverted(tmp_path, monkeypatch):
    """A pipeline's folder of a family that this package does not ship, with its adapter and entry."""
    folder = tmp_path / "model"
    shutil.copytree(resolve_asset("asset:tiny_qwen_image"), folder)
    index = json.loads((folder / "model_index.json").read_text()) | {"_class_name": "InvertedPipeline"}
    (folder / "model_index.json").write_text(json.dumps(index))
    (tmp_path / "inverted_family.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    pipeline = type("InvertedPipeline", (diffusers.QwenImagePipeline,), {})
    monkeypatch.setattr(diffusers, "InvertedPipeline", pipeline, raising=False)
    entry = FamilyEntry(adapter="inverted_family:Inverted", guidance_scale_is_cfg=True)
    monkeypatch.setitem(FAMILIES, "InvertedPipeline", entry)
    yield str(folder)
    sys.modules.pop("inverted_family", None)


def test_an_entry_makes_a_family(inverted, tiny_model):
    assert check_pipeline(inverted) == "InvertedPipeline"
    assert "InvertedPipeline" in SUPPORTED_PIPELINES
    model = load_model(inverted)
    assert isinstance(model, DiffusionModel)
    latents = torch.randn(2, *model.latent_shape(32, 32), generator=torch.Generator().manual_seed(0))
    negative = model.decode(latents, 32, 32).int()
    # 255 - x, where rounding to whole grey levels may take the two halves of 255 both up
    assert (negative + tiny_model.decode(latents, 32, 32).int() - 255).abs().max() <= 1
    with pytest.raises(ValueError, match=r"guidance_scale=null and true_cfg_scale=3\.5"):
        model.check_request(32, 32, 3.5)
