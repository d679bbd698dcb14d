"""vllm-omni with compiled blocks draws what the ``diffusers`` engine draws, with every adapter that it is given."""

import shutil
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from engine_pair import make_pair, random_adapter, zero_adapter
from test_parity import assert_parity
from torch import nn

from flowgrpo_rc.rollout.proof import HeldAdapter, check_rollout
from flowgrpo_rc.rollout.vllm_omni.lora import RolloutWorker

pytestmark = pytest.mark.process


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_compiled_blocks_take_every_adapter(tmp_path, monkeypatch):
    """A graph that had kept the first adapter's weights would draw with them again."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    pair = make_pair(torch_compile=True)
    for adapter in (random_adapter(pair), zero_adapter(pair), random_adapter(pair, seed=3)):
        digest = pair.sync(adapter, 3)
        request = pair.request()
        check_rollout(request, pair.vllm.generate(request), pair.model, HeldAdapter(3, digest), "float32")
        assert_parity(pair, request)
    assert list(tmp_path.rglob("*.so"))
    pair.vllm.close()


def test_blocks_that_are_not_compiled_are_no_silent_matter():
    """vllm-omni goes on eagerly where it cannot compile."""
    prepared = []
    pipeline = SimpleNamespace(transformer=nn.Sequential(nn.Linear(2, 2)), prepare=lambda *_: prepared.append(1))
    for eager in (True, False):
        runner = SimpleNamespace(od_config=SimpleNamespace(enforce_eager=eager), pipeline=pipeline)
        worker = SimpleNamespace(model_runner=runner, lora_manager=None)
        if eager:
            RolloutWorker.flowgrpo_prepare(worker, "float32", True)
            continue
        with pytest.raises(RuntimeError, match="rollout.torch_compile: got true, but vllm-omni has compiled no block"):
            RolloutWorker.flowgrpo_prepare(worker, "float32", True)
    assert prepared == [1]
