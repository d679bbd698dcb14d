"""The first lines of a run: what the numbers of its configuration amount to."""

from pathlib import Path

from flowgrpo_rc.correction import RolloutCorrectionConfig
from flowgrpo_rc.correction.options.explanation import in_force
from flowgrpo_rc.sde import SDEWindow
from flowgrpo_rc.trainer.config import FlowGRPOConfig


def announcement(
    config: FlowGRPOConfig, rc: RolloutCorrectionConfig, root: Path, window: SDEWindow, processes: int
) -> list[str]:
    """One line each: batch arithmetic, rewards, rollouts, guidance and the rollout correction ``rc``."""
    rollout = config.actor_rollout_ref.rollout
    actor = config.actor_rollout_ref.actor
    prompts = config.data.train_batch_size
    mini = actor.ppo_mini_batch_size
    # Per process, as the micro-batch is.
    images = mini * rollout.n // processes
    micro = f"{min(actor.ppo_micro_batch_size_per_gpu, images)} images x {window.size} SDE steps"
    if actor.ppo_micro_batch_rows is not None:
        micro = f"{min(actor.ppo_micro_batch_rows, images * window.size)} rows (SDE steps of images)"
    # At 1 and below the negative prompt has no weight.
    guidance = "none"
    if rollout.pipeline.true_cfg_scale > 1:
        batched = config.actor_rollout_ref.model.batch_guidance
        forwards = "one forward for both halves" if batched else "a forward for each half"
        gradient = "the update's gradient goes through both halves"
        if actor.detach_unconditional:
            gradient = "the update's gradient leaves the unconditional half out (detach_unconditional)"
        guidance = f"true_cfg_scale={rollout.pipeline.true_cfg_scale:g}, {forwards}; {gradient}"
    lag = f", {rollout.staleness} batches behind the actor" if rollout.staleness else ""
    return [
        f"Run folder: {root}",
        f"Each step: {prompts} prompts x {rollout.n} images = {prompts * rollout.n} images of "
        f"{rollout.pipeline.width}x{rollout.pipeline.height} on {processes} process(es); "
        f"{prompts // mini * actor.ppo_epochs} optimizer step(s) of {mini * rollout.n} images, "
        f"micro-batches of {micro}",
        f"Reward: {config.reward.in_words()}",
        f"Rollouts: {rollout.name}, {rollout.dtype}{lag}, {rollout.algo.sde_type}, window {window.size} in "
        f"[{window.first}, {window.stop}) of {rollout.pipeline.num_inference_steps} steps",
        f"Guidance: {guidance}",
        f"Rollout correction: {in_force(rc)}; guard: {rc.guard}",
    ]
