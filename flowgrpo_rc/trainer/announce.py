"""What a run says before it starts: the numbers that its configuration comes to."""

from pathlib import Path

from flowgrpo_rc.correction import RolloutCorrectionConfig
from flowgrpo_rc.correction.options.explanation import in_force
from flowgrpo_rc.sde import SDEWindow
from flowgrpo_rc.trainer.config import FlowGRPOConfig


def announcement(
    config: FlowGRPOConfig, rc: RolloutCorrectionConfig, root: Path, window: SDEWindow, processes: int
) -> list[str]:
    """Batch arithmetic, the rewards, how rollouts are drawn, and the correction ``rc`` in force, a paragraph each."""
    rollout = config.actor_rollout_ref.rollout
    actor = config.actor_rollout_ref.actor
    prompts = config.data.train_batch_size
    mini = actor.ppo_mini_batch_size
    micro = min(actor.ppo_micro_batch_size_per_gpu, mini * rollout.n // processes)
    lag = f", {rollout.adapter_lag} batches behind the actor" if rollout.adapter_lag else ""
    return [
        f"Run folder: {root}",
        f"Each step: {prompts} prompts x {rollout.n} images = {prompts * rollout.n} images of "
        f"{rollout.pipeline.width}x{rollout.pipeline.height} on {processes} process(es); "
        f"{prompts // mini * actor.ppo_epochs} optimizer step(s) of {mini * rollout.n} images, "
        f"micro-batches of {micro} images x {window.size} SDE steps",
        f"Reward: {config.reward.in_words()}",
        f"Rollouts: {rollout.name}, {rollout.dtype}{lag}, {rollout.algo.sde_type}, window {window.size} in "
        f"[{window.first}, {window.stop}) of {rollout.pipeline.num_inference_steps} steps",
        f"Rollout correction: {in_force(rc)}; guard: {rc.guard}",
    ]
