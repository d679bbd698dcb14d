"""The real vllm multiplies by plain torch on any processor: each test pretends that this one has every kernel."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("vllm")

from engine_pair import with_amx

LAYERS = """
import torch
from torch import nn
from torch.nn.functional import linear
from vllm import _custom_ops as ops
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm_omni.platforms import current_omni_platform

from flowgrpo_rc.rollout.vllm_omni.pipeline import check_plain_torch

packed = []
ops._supports_onednn = True
ops.create_onednn_mm = lambda weight, cache: packed.append(weight.dtype)
ops.causal_conv1d_weight_pack = lambda weight: packed.append("convolution") or weight


def loaded(method, shape, dtype):
    layer = nn.Module()
    layer.weight = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype))
    before = layer.weight.detach().clone()
    method.process_weights_after_loading(layer)
    assert torch.equal(layer.weight, before), "the weight was packed"
    return layer


METHODS = (UnquantizedLinearMethod(), UnquantizedEmbeddingMethod())
SMALL, LARGE, NARROW = (32, 64), (2048, 512), (8, 64)
CASES = [(m, s, d) for m in METHODS for s in (SMALL, LARGE, NARROW) for d in (torch.bfloat16, torch.float32)]

chosen = []
for case in CASES:
    try:
        chosen.append(getattr(loaded(*case), "cpu_linear", None) is linear)
    except Exception as error:
        chosen.append(str(error))
assert True not in chosen, "without the platform vllm chooses kernels"
assert any("convert_weight_packed" in str(c) for c in chosen), chosen
assert torch.float32 in packed

current_omni_platform.set_device(torch.device("cpu"))
packed.clear()
for method, shape, dtype in CASES:
    layer = loaded(method, shape, dtype)
    x, bias = torch.randn(5, shape[1]).to(dtype), torch.randn(shape[0]).to(dtype)
    assert torch.equal(method.apply(layer, x, bias), linear(x, layer.weight, bias))
    check_plain_torch(nn.Sequential(layer))
loaded(UnquantizedLinearMethod(), (16, 1, 4), torch.bfloat16)
assert packed == []
layer.cpu_linear = lambda x, weight, bias: x
try:
    check_plain_torch(nn.ModuleDict({"one": nn.Linear(2, 2), "two": layer}))
except RuntimeError as error:
    print(error)
"""


def test_layers_of_every_precision_and_size_multiply_by_torch():
    """Layers for AMX, AVX512 and oneDNN, first as vllm itself loads them: it chooses, and a kernel is not there."""
    command = [sys.executable, "-c", LAYERS]
    environment = os.environ | {"PYTHONPATH": with_amx(), "VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "vllm chose a kernel for the layer two by what this processor offers" in done.stdout.splitlines()[-1]
