"""A transformer that vllm-omni divides over two processes: its adapter is read back whole, and it draws the same."""

import socket
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm")

from engine_pair import FAMILIES, request_for
from rollout_cases import random_like
from tests_support import run_side_by_side
from torch.testing import assert_close

from flowgrpo_rc.models import ModelConfig, load_model
from flowgrpo_rc.models.lora import adapter_state
from flowgrpo_rc.paths import resolve_asset
from flowgrpo_rc.rollout import DiffusersEngine
from flowgrpo_rc.rollout.digest import adapter_digest
from flowgrpo_rc.rollout.vllm_omni.adapter import as_held

pytestmark = pytest.mark.process

RANK, ALPHA = 4, 6


@pytest.mark.parametrize("name", ["qwen_image", "flux_dev"])
def test_two_processes_hold_and_draw_what_one_does(tmp_path, monkeypatch, folder_of_family, name):
    """With ``lora_alpha / lora_rank`` = 1.5, and every linear layer that vllm-omni gives an adapter by default."""
    torch.set_num_threads(1)
    family = FAMILIES[name]
    path = resolve_asset("asset:tiny_qwen_image") if family is None else folder_of_family(name)
    model = load_model(path)
    lora = ModelConfig(path=path, lora_rank=RANK, lora_alpha=ALPHA)
    engine = DiffusersEngine(model, lora, dtype=torch.float32, micro_batch_size=6, device="cpu")
    state = random_like(adapter_state(engine.transformer, engine.adapter), 0.3, seed=5)
    engine.sync(state, 1)
    cfg, guidance = (1.0, None) if family is None else family.guidances[0]
    request = request_for(model, family, cfg=cfg, guidance=guidance)
    expected = engine.generate(request)
    asked = {"model": path, "pipeline": type(model.pipe).__name__, "state": state, "alpha": ALPHA, "request": request}
    torch.save(asked, tmp_path / "asked.pt")
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")  # as in the environment that engines get
    with socket.create_server(("localhost", 0)) as probe:
        port = probe.getsockname()[1]
    script = Path(__file__).parent / "tensor_parallel_worker.py"
    run_side_by_side(*([sys.executable, script, rank, port, tmp_path] for rank in (0, 1)))
    held = [torch.load(tmp_path / f"held_{rank}.pt", weights_only=False) for rank in (0, 1)]
    digest = adapter_digest(as_held(state, torch.float32, ALPHA / RANK))
    assert [one["digest"] for one in held] == [digest, digest]
    assert held[0]["divided"] > 0, held[0]["kinds"]
    assert held[0]["kinds"] & {"QKVParallelLinear", "ColumnParallelLinear"}
    assert "RowParallelLinear" in held[0]["kinds"]
    for one in held:
        assert_close(one["record"]["next_latents"], expected.batch["next_latents"], atol=1e-4, rtol=0)
    assert torch.equal(held[0]["images"], held[1]["images"])
    # A part that only one of them holds otherwise is in the digest of both, or they find out that they differ.
    for one in held:
        assert digest not in one["faults"]
    assert held[0]["faults"] == held[1]["faults"]
