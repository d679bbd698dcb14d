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
        f"Guidance: {_guidance_in_words(config)}",
        f"Rollout correction: {in_force(rc)}; guard: {rc.guard}",
    ]


def _guidance_in_words(config: FlowGRPOConfig) -> str:
    """Classifier-free guidance of rollouts and updates: scale, number of forwards, gradient."""
    parts = config.actor_rollout_ref
    scale = parts.rollout.pipeline.true_cfg_scale
    # At 1 and below the negative prompt has no weight.
    if scale <= 1:
        return "none"
    if parts.actor.detach_unconditional:
        gradient = "the update's gradient leaves the unconditional half out (detach_unconditional)"
    else:
        gradient = "the update's gradient goes through both halves"
    forwards = "one forward for both halves" if parts.model.batch_guidance else "a forward for each half"
    return f"true_cfg_scale={scale:g}, {forwards}; {gradient}"
