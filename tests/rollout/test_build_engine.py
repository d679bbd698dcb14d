"""The configuration chooses the engine and reaches it."""

import pytest
import torch

from flowgrpo_rc.cli.compose import compose
from flowgrpo_rc.models import ModelConfig
from flowgrpo_rc.rollout import DiffusersEngine, RolloutConfig, build_engine
from flowgrpo_rc.rollout.config import VllmOmniConfig

SECTION = "actor_rollout_ref.rollout.vllm_omni"


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"start_timeout_s": 0.0}, r"vllm_omni.start_timeout_s: got 0.0; give a number above 0"),
        ({"request_timeout_s": -1.0}, r"vllm_omni.request_timeout_s: got -1.0; give a number above 0"),
        ({"sync_timeout_s": float("nan")}, r"vllm_omni.sync_timeout_s: got nan; give a number above 0"),
        ({"close_timeout_s": float("inf")}, r"vllm_omni.close_timeout_s: got inf; give a number above 0"),
        ({"silence_timeout_s": 1.0}, r"vllm_omni.silence_timeout_s: got 1.0; .* so give at least 3"),
    ],
)
def test_timeouts_that_make_no_sense(values, says):
    with pytest.raises(ValueError, match=f"actor_rollout_ref.rollout.{says}"):
        VllmOmniConfig(**values)


def test_timeouts_come_from_the_command_line():
    overrides = [f"{SECTION}.start_timeout_s=1200", f"{SECTION}.sync_timeout_s=7.5"]
    got = compose("tiny_qwen_image_ocr", overrides).actor_rollout_ref.rollout.vllm_omni
    assert got == VllmOmniConfig(start_timeout_s=1200.0, sync_timeout_s=7.5)


def test_everything_reaches_vllm_omni(tiny_model, monkeypatch):
    """All but the engine itself, which needs another environment."""
    import flowgrpo_rc.rollout.vllm_omni as package

    built = {}

    class Engine(DiffusersEngine):
        adapter_version = -1

        def __init__(self, model, lora, **settings):
            built.update(settings, model=model, lora=lora)

    monkeypatch.setattr(package, "VllmOmniEngine", Engine, raising=False)
    timeouts, lora = VllmOmniConfig(request_timeout_s=11.0), ModelConfig(lora_rank=2)
    config = RolloutConfig(name="vllm_omni", dtype="bfloat16", micro_batch_size=3, vllm_omni=timeouts)
    assert isinstance(build_engine(config, tiny_model, lora, "cpu"), Engine)
    expected = {"dtype": torch.bfloat16, "micro_batch_size": 3, "device": "cpu", "timeouts": timeouts}
    assert built == expected | {"model": tiny_model, "lora": lora}


def test_the_other_engine_is_in_this_process(tiny_model):
    engine = build_engine(RolloutConfig(dtype="float16", quantization="fp8"), tiny_model, ModelConfig(), "cpu")
    assert isinstance(engine, DiffusersEngine)
    assert next(engine.transformer.parameters()).dtype == torch.float16
    assert engine._quantized
