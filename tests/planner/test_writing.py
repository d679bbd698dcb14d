"""A prompt writer's planned memory against a real writer's, and at the size of a real model."""

import json
from copy import copy
from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict

from flowgrpo_rc.batch import Key, MiniBatch
from flowgrpo_rc.cli.compose import compose
from flowgrpo_rc.models.lora import adapter_parameters, adapter_state
from flowgrpo_rc.planner import writing
from flowgrpo_rc.planner.live_bytes import LiveBytes
from flowgrpo_rc.planner.machines import ENGINE_RUNTIME, GIB, Gpus
from flowgrpo_rc.planner.memory import TEXT_ENCODERS
from flowgrpo_rc.planner.pipeline import PlanError
from flowgrpo_rc.planner.text import describe
from flowgrpo_rc.planner.work import step_flops
from flowgrpo_rc.planner.writing import WriterPlan
from flowgrpo_rc.trainer.memory import planned_run
from flowgrpo_rc.writer import LanguageModel, PromptWriterConfig, WriterActor, WriterEngine
from flowgrpo_rc.writer.engine import INPUT_IDS, REQUEST_LENGTHS

LENGTH = 60
QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}


def config_of(path="asset:tiny_writer", **settings):
    return PromptWriterConfig(path=str(path), max_new_tokens=LENGTH, lora_rank=4, lora_alpha=8, **settings)


def peak_of(network, act):
    with LiveBytes([*network.parameters(), *network.buffers()]) as live:
        act()
    return live.peak


def test_memory_is_that_of_a_real_step(monkeypatch):
    """Weights to the byte. What a step adds is near: of a tiny model, masks and tokens are some of it."""
    config = config_of()
    language = LanguageModel(config, "cpu")
    monkeypatch.setattr(writing, "REQUEST", len(language.tokens.of("forty-two")))
    engine = WriterEngine(language)
    monkeypatch.setattr(engine.network.generation_config, "eos_token_id", None)
    actor = WriterActor(language, 10)
    plan = WriterPlan(config)
    lora = list(adapter_parameters(actor.network).values())
    held = sum(value.nbytes for network in (actor.network, engine.network) for value in network.parameters())
    held += sum(value.nbytes for network in (actor.network, engine.network) for value in network.buffers())
    assert sum(plan.resident(1).values()) == held + 2 * sum(value.nbytes for value in lora)
    assert plan.parameters == sum(p.numel() for p in actor.network.parameters()) - sum(value.numel() for value in lora)

    engine.sync(adapter_state(actor.network), 0)
    wrote = peak_of(engine.network, lambda: engine.write(["forty-two"] * 8, list(range(8))))
    stages = plan.stages(8, 1)
    assert 0.9 * wrote < stages["writing"] < 1.1 * wrote
    batch = TensorDict(
        {
            INPUT_IDS: torch.ones(8, writing.REQUEST + LENGTH, dtype=torch.long),
            REQUEST_LENGTHS: torch.full((8,), writing.REQUEST),
            Key.RESPONSE_MASK: torch.ones(8, LENGTH, dtype=torch.bool),
            Key.ROLLOUT_LOG_PROBS: torch.full((8, LENGTH), -1.0),
            Key.ADVANTAGES: torch.ones(8),
        },
        batch_size=[8],
    )
    learned = peak_of(actor.network, lambda: actor.update(batch, [MiniBatch(torch.arange(8), actor.score(batch))]))
    assert 0.9 * learned < stages["writer's update"] < 1.15 * learned


def test_rows_are_those_of_a_step_at_most():
    plan = WriterPlan(config_of(engine={"micro_batch_size": 4}, actor={"ppo_micro_batch_size_per_gpu": 2}))
    assert plan.stages(100, 1) == plan.stages(4, 1)
    assert plan.stages(2, 1)["writing"] < plan.stages(4, 1)["writing"]
    assert plan.stages(1, 1)["writer's update"] < plan.stages(2, 1)["writer's update"]
    recomputes = WriterPlan(config_of(actor={"enable_gradient_checkpointing": True}))
    assert recomputes.stages(16, 1)["writer's update"] < 0.8 * WriterPlan(config_of()).stages(16, 1)["writer's update"]
    assert recomputes.stages(16, 1)["writing"] == WriterPlan(config_of()).stages(16, 1)["writing"]
    elsewhere = WriterPlan(config_of(engine={"placement": "process", "devices": ["cuda:7"]}))
    assert elsewhere.resident(7)["its engine"] == 0
    assert list(elsewhere.stages(4, 7)) == ["writer's update"]
    # The eighth GPU is one of the trainer's, and the engine's process has a context there.
    assert elsewhere.resident(8)["its engine"] == plan.resident(1)["its engine"] + ENGINE_RUNTIME
    assert elsewhere.stages(4, 8)["writing"] == WriterPlan(config_of()).stages(4, 1)["writing"]
    vllm = WriterPlan(config_of(engine={"name": "vllm", "placement": "process", "kv_cache_gib": 1.5}))
    assert vllm.resident(1)["its engine"] == plan.resident(1)["its engine"] + ENGINE_RUNTIME + 1.5 * GIB
    averages = WriterPlan(config_of(actor={"ema_decay": 0.9})).resident(1)
    assert averages["average of its LoRA"] * 3 == averages["its LoRA and AdamW's moments"]
    frozen = WriterPlan(config_of(learns="images"))
    assert list(frozen.stages(4, 1)) == ["writing"]


@pytest.mark.slow
def test_a_model_of_real_size_needs_its_configuration_alone(tmp_path):
    """Qwen3-0.6B: the published number of parameters, its cache of keys and values, and logits in float64."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_06B))
    plan = WriterPlan(replace(config_of(tmp_path), dtype="bfloat16", max_new_tokens=512))
    assert plan.parameters == 596_049_920
    assert plan.resident(1)["prompt writer"] == pytest.approx(2 * 596_049_920, rel=1e-5)
    kept = 28 * 2 * 8 * 128 * (128 + 512) * 32 * 2
    assert kept < plan.stages(32, 1)["writing"] < kept + 5 * 32 * 151_936 * 8 + kept / 28 * 4


def test_settings_reach_the_plan():
    settings = ("algorithm.prompt_writer.path=asset:tiny_writer", "algorithm.prompt_writer.rewrites=3")
    assert planned_run(compose("tiny_qwen_image_ocr", settings)).writer.rewrites == 3
    assert planned_run(compose("tiny_qwen_image_ocr", [])).writer is None


def test_late_steps_that_are_cut_from_replayed_windows_are_not_counted():
    settings = ["algorithm.replay.batches=4", "algorithm.replay.share=0.75"]
    cut = [*settings, "algorithm.replay.steps=1"]
    window = compose("tiny_qwen_image_ocr", settings).actor_rollout_ref.rollout.window.size
    assert window > 1
    whole, short = (planned_run(compose("tiny_qwen_image_ocr", one)).replayed for one in (settings, cut))
    assert (whole, short) == (3, pytest.approx(3 / window))


def test_a_plan_holds_writer_and_text_encoders(plan, run):
    without = plan.memory(run, 1)
    plan = copy(plan)
    plan.sizes = replace(plan.sizes, text_encoders=1000)
    plan.run = replace(run, writer=config_of())
    plan.writer = WriterPlan(config_of())
    memory = plan.memory(plan.run, 1)
    assert memory.resident.items() >= without.resident.items()
    assert memory.stages.items() >= without.stages.items()
    assert memory.resident[TEXT_ENCODERS] == 1000
    assert memory.resident["prompt writer"] > 4 * 170_784
    assert memory.stages["writing"] == plan.writer.stages(plan.run.prompts, 1)["writing"]
    assert step_flops(plan).update > 0
    alone = copy(plan)
    alone.run = replace(run, writer=config_of(learns="writer"))
    memory = alone.memory(alone.run, 1)
    assert sorted(memory.stages) == ["decoding", "sampling", "writer's update", "writing"]
    assert "AdamW's two moments" not in memory.resident
    flops = step_flops(alone)
    assert (flops.update, flops.recomputed, flops.score) == (0, 0, 0)
    assert flops.rollout == step_flops(plan).rollout
    text = describe(plan, Gpus(1, 24))
    assert "Prompt writer asset:tiny_writer: 170,784 parameters, float32, engine bfloat16" in text
    assert "text encoder, before training" not in text
    # Nothing is drawn ahead with a prompt writer.
    assert "Turns or split" not in describe(plan, Gpus(2, 24))


def test_a_folder_without_a_language_model_cannot_be_planned(tmp_path):
    with pytest.raises(PlanError, match="algorithm.prompt_writer.path: .* has no config.json"):
        WriterPlan(config_of(tmp_path))
