#!/usr/bin/env bash
# FLUX.2-klein-4B, which is distilled to 4 steps, or the model that it was distilled from, with PickScore. The prompts,
# the engine and what is not said here: lora_rollout_corr.sh.
#
#   BASE       1: the base model, with guidance  (default: 0, the distilled one)
#
# From Flow-Factory's examples/grpo/lora/flux2_klein: 4 steps of which the second or third is stochastic (sde, 0.5) and
# trained, no guidance, 10 steps in validation; and flux2_klein_base: 8 steps of which one of the second to fourth is
# (sde, 0.7), guidance 4 (true_cfg_scale here), 28 steps. Both are on 9B and edit images of 384 pixels; 4B from prompts
# alone at 512 is chosen here, as in RTDMD's configs/rtdmd/flux2_4b.yaml, which samples with cps and 0.9 in the first
# two of 4 steps. The LoRA is on the attention, in which blocks of one stream have their feed-forward layers fused.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

if [ "${BASE:-0}" = 1 ]; then
    export MODEL=${MODEL:-black-forest-labs/FLUX.2-klein-base-4B}
    export NAME=${NAME:-flux2_klein_base_lora_rollout_corr}
    STEPS=(
        actor_rollout_ref.rollout.algo.noise_level=0.7
        actor_rollout_ref.rollout.algo.sde_window_range="[1,4]"
        actor_rollout_ref.rollout.pipeline.num_inference_steps=8
        actor_rollout_ref.rollout.pipeline.true_cfg_scale=4.0
        actor_rollout_ref.rollout.val_kwargs.pipeline.num_inference_steps=28
    )
else
    export MODEL=${MODEL:-black-forest-labs/FLUX.2-klein-4B}
    export NAME=${NAME:-flux2_klein_lora_rollout_corr}
    STEPS=(
        actor_rollout_ref.rollout.algo.noise_level=0.5
        actor_rollout_ref.rollout.algo.sde_window_range="[1,3]"
        actor_rollout_ref.rollout.pipeline.num_inference_steps=4
        actor_rollout_ref.rollout.val_kwargs.pipeline.num_inference_steps=10
    )
fi

exec bash "$HERE/lora_rollout_corr.sh" \
    actor_rollout_ref.rollout.algo.sde_type=sde \
    actor_rollout_ref.rollout.algo.sde_window_size=1 \
    "${STEPS[@]}" \
    "$@"
