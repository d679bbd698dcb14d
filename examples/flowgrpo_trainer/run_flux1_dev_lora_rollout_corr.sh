#!/usr/bin/env bash
# FLUX.1-dev with PickScore, few trained steps (Flow-GRPO-Fast). The prompts, the engine and what is not said here:
# lora_rollout_corr.sh.
#
# From flow_grpo's config/grpo.py, pickscore_flux_fast: 6 steps of which the first 3 are stochastic (cps, 0.8) and
# trained, guidance 3.5, clip 1e-5 (log ratios of cps have another scale), 24 images a prompt, 28 steps in validation,
# LoRA layers; 128 T5 tokens are those of its scripts/train_flux.py. Chosen here: 48 prompts a batch, as the shared
# script has them. Its pickscore_flux trains 5 of 6 steps with sde and 0.9, and a clip of 1e-4.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

export MODEL=${MODEL:-black-forest-labs/FLUX.1-dev}
export NAME=${NAME:-flux1_dev_lora_rollout_corr}
export CLIP=${CLIP:-0.00001}
export IMAGES=${IMAGES:-24}

exec bash "$HERE/lora_rollout_corr.sh" \
    actor_rollout_ref.model.target_modules="['attn.to_q','attn.to_k','attn.to_v','attn.to_out.0','attn.add_q_proj','attn.add_k_proj','attn.add_v_proj','attn.to_add_out','ff.net.0.proj','ff.net.2','ff_context.net.0.proj','ff_context.net.2']" \
    actor_rollout_ref.rollout.algo.noise_level=0.8 \
    actor_rollout_ref.rollout.algo.sde_type=cps \
    actor_rollout_ref.rollout.algo.sde_window_size=3 \
    actor_rollout_ref.rollout.algo.sde_window_range="[0,3]" \
    actor_rollout_ref.rollout.pipeline.num_inference_steps=6 \
    actor_rollout_ref.rollout.pipeline.guidance_scale=3.5 \
    actor_rollout_ref.rollout.pipeline.max_sequence_length=128 \
    actor_rollout_ref.rollout.val_kwargs.pipeline.num_inference_steps=28 \
    "$@"
