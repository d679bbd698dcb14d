"""The precision that a transformer computes in, read from its weights."""

import copy

import pytest
import torch

from flowgrpo_rc.models import ModelConfig
from flowgrpo_rc.models.base import compute_dtype
from flowgrpo_rc.models.lora import attach_lora

LORA = ModelConfig(lora_rank=4, lora_alpha=8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["tiny_model", "tiny_sd3_model"])
def test_it_is_what_diffusers_says_whatever_the_adapter_is_in(request, family, dtype):
    model = request.getfixturevalue(family)
    transformer = copy.deepcopy(model.transformer).to(dtype)
    attach_lora(transformer, model, LORA, dtype=torch.float32)
    assert compute_dtype(transformer) == transformer.dtype == dtype


def test_weights_that_a_class_keeps_in_float32_are_not_asked(tiny_sd3_model):
    transformer = copy.deepcopy(tiny_sd3_model.transformer).to(torch.bfloat16)
    first, _ = next(transformer.named_parameters())
    transformer.get_submodule(first.split(".")[0]).float()
    assert compute_dtype(transformer) == torch.float32
    transformer._keep_in_fp32_modules = [first.split(".")[0]]
    assert compute_dtype(transformer) == transformer.dtype == torch.bfloat16
