"""What the planner reads of a whole configuration."""

from flowgrpo_rc.planner.settings import PlannedRun
from flowgrpo_rc.trainer.config import FlowGRPOConfig


def planned_run(config: FlowGRPOConfig) -> PlannedRun:
    """The settings that decide about memory and time."""
    parts = config.actor_rollout_ref
    return PlannedRun(
        model=parts.model,
        actor=parts.actor,
        rollout=parts.rollout,
        prompts=config.data.train_batch_size,
        scored_share=0.0 if config.rollout_correction.bypass_mode else config.scored_share,
        autocast=config.trainer.mixed_precision == "bf16",
    )
