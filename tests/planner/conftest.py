"""One small run and its plan, which tests of memory, advice and splits share."""

import pytest
from small_pipelines import write

from flowgrpo_rc.actor.config import DiffusionActorConfig
from flowgrpo_rc.models.config import ModelConfig
from flowgrpo_rc.planner.memory import MemoryPlan
from flowgrpo_rc.planner.settings import PlannedRun
from flowgrpo_rc.rollout.config import PipelineConfig, RolloutAlgoConfig, RolloutConfig


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """64 images a step, of which an engine draws 4 at a time; rows of 2 steps an image."""
    folder = write(tmp_path_factory.mktemp("models") / "qwen", "qwen")
    return PlannedRun(
        model=ModelConfig(path=folder, dtype="bfloat16", lora_rank=4, target_modules=["to_q"]),
        actor=DiffusionActorConfig(ppo_mini_batch_size=4, ppo_micro_batch_size_per_gpu=4),
        rollout=RolloutConfig(
            dtype="bfloat16",
            n=8,
            micro_batch_size=4,
            algo=RolloutAlgoConfig(sde_window_size=2),
            pipeline=PipelineConfig(height=64, width=64, max_sequence_length=16),
        ),
        prompts=8,
    )


@pytest.fixture(scope="session")
def plan(run):
    return MemoryPlan(run)
