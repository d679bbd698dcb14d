#!/usr/bin/env bash
# Z-Image with PickScore. The prompts, the engine and what is not said here: lora_rollout_corr.sh.
#
# From Flow-Factory's examples/grpo/lora/z_image: 10 steps of which one of the second to fourth is stochastic (sde, 0.7)
# and trained, guidance 4, which is true_cfg_scale=5 here (docs/families.md), 40 steps and 1024 pixels in validation,
# LoRA layers. UniRL's z_image_trainside.yaml has 16 steps with the same noise and guidance.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

export MODEL=${MODEL:-Tongyi-MAI/Z-Image}
export NAME=${NAME:-z_image_lora_rollout_corr}

exec bash "$HERE/lora_rollout_corr.sh" \
    actor_rollout_ref.model.target_modules="['attention.to_q','attention.to_k','attention.to_v','attention.to_out.0','feed_forward.w1','feed_forward.w2','feed_forward.w3']" \
    actor_rollout_ref.rollout.algo.noise_level=0.7 \
    actor_rollout_ref.rollout.algo.sde_type=sde \
    actor_rollout_ref.rollout.algo.sde_window_size=1 \
    actor_rollout_ref.rollout.algo.sde_window_range="[1,4]" \
    actor_rollout_ref.rollout.pipeline.num_inference_steps=10 \
    actor_rollout_ref.rollout.pipeline.true_cfg_scale=5.0 \
    actor_rollout_ref.rollout.val_kwargs.pipeline.num_inference_steps=40 \
    actor_rollout_ref.rollout.val_kwargs.pipeline.height=1024 \
    actor_rollout_ref.rollout.val_kwargs.pipeline.width=1024 \
    "$@"
