#!/usr/bin/env bash
# FLUX.2-dev with PickScore. The prompts and what is not said here: lora_rollout_corr.sh.
#
# From Flow-Factory's examples/grpo/lora/flux2/t2i: 8 steps of which one of the second to fourth is stochastic (sde,
# 1.0) and trained, guidance 4, 28 steps and 1024 pixels in validation. Chosen here: the LoRA is on the attention alone,
# in which blocks of one stream have their feed-forward layers fused; the GPUs share one copy of the transformer, whose
# weights are 60 GiB, and sample with it, where ENGINE=vllm_omni has a whole one on every GPU.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

export MODEL=${MODEL:-black-forest-labs/FLUX.2-dev}
export NAME=${NAME:-flux2_dev_lora_rollout_corr}
export ENGINE=${ENGINE:-diffusers}

exec bash "$HERE/lora_rollout_corr.sh" \
    actor_rollout_ref.actor.fsdp_config.shard=True \
    actor_rollout_ref.rollout.algo.noise_level=1.0 \
    actor_rollout_ref.rollout.algo.sde_type=sde \
    actor_rollout_ref.rollout.algo.sde_window_size=1 \
    actor_rollout_ref.rollout.algo.sde_window_range="[1,4]" \
    actor_rollout_ref.rollout.pipeline.num_inference_steps=8 \
    actor_rollout_ref.rollout.pipeline.guidance_scale=4.0 \
    actor_rollout_ref.rollout.val_kwargs.pipeline.num_inference_steps=28 \
    actor_rollout_ref.rollout.val_kwargs.pipeline.height=1024 \
    actor_rollout_ref.rollout.val_kwargs.pipeline.width=1024 \
    "$@"
