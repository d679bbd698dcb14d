"""The configuration chooses the engine and reaches it."""

import subprocess
import sys
from dataclasses import replace

import pytest

from flowgrpo_rc.models import ModelConfig
from flowgrpo_rc.rollout import DiffusersEngine, RolloutConfig, RolloutEngine, build_engine
from flowgrpo_rc.rollout.build import check_engine
from flowgrpo_rc.rollout.engines import ENGINES, EngineEntry
from flowgrpo_rc.trainer import FlowGRPOTrainer


class DarkEngine(DiffusersEngine):
    """An engine of somebody else's, whose images come out at half their brightness."""

    def generate(self, request):
        trajectories = super().generate(request)
        return replace(trajectories, images=trajectories.images // 2)


def refuse():
    raise ImportError("the package dark is not installed")


@pytest.mark.run
def test_an_engine_is_added_by_one_row(tiny_model, small_config, monkeypatch):
    """The configuration takes its name, ``build_engine`` builds it, and a run samples and proves with it."""
    with pytest.raises(ValueError, match=r"rollout.name: got 'dark'; choose one of diffusers, vllm_omni$"):
        RolloutConfig(name="dark")
    monkeypatch.setitem(ENGINES, "dark", EngineEntry(f"{__name__}:DarkEngine"))
    engine = build_engine(RolloutConfig(name="dark", dtype="float32"), tiny_model, ModelConfig(), "cpu")
    assert isinstance(engine, DarkEngine)
    assert isinstance(engine, RolloutEngine)
    with pytest.raises(ValueError, match="only the diffusers engine rounds its weights"):
        RolloutConfig(name="dark", quantization="fp8")
    rewards = {}
    for name in ("diffusers", "dark"):
        config = small_config(f"actor_rollout_ref.rollout.name={name}", folder=name)
        rewards[name] = FlowGRPOTrainer(config).train_step()["reward/mean"]
    assert rewards["dark"] == pytest.approx(rewards["diffusers"] / 2, rel=0.02)


def test_what_an_engine_needs_is_asked_before_it_is_loaded(monkeypatch):
    monkeypatch.setitem(ENGINES, "dark", EngineEntry("no.such.module:Engine", check=f"{__name__}:refuse"))
    with pytest.raises(ImportError, match="the package dark is not installed"):
        check_engine("dark")
    check_engine("diffusers")


def test_the_tables_of_names_load_no_torch():
    """``--help`` and a configuration's checks ask them."""
    script = """
import sys
from flowgrpo_rc.rollout.config import RolloutConfig
RolloutConfig(dtype="float16")
print(sorted({"torch", "numpy", "diffusers"} & sys.modules.keys()))
"""
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "[]\n"
