#!/usr/bin/env bash
# FLUX.1-schnell, which is distilled to 4 steps, with PickScore. The prompts, the engine and what is not said here:
# lora_rollout_corr.sh.
#
# Nobody publishes settings for this model; those of its steps are chosen here. 4 steps, without guidance, as it is
# meant to be used (diffusers' docs/source/en/api/pipelines/flux.md, which has 256 T5 tokens too). cps, as it leaves the
# noise level on the schedule: the excess noise of sde would have to be taken out by the one or two steps that are left.
# The window is the first two steps, where a random step decides what is drawn and two exact ones follow; the last step
# of cps is exact anyway. RTDMD's configs/rtdmd/flux1_dev.yaml, which trains a student of FLUX.1-dev in 4 steps, has the
# same window, cps with 0.9, 24 images a prompt and a clip of 1e-5, but a learning rate of 3e-6. Noise is that of
# flow_grpo's pickscore_flux_fast, as are the LoRA layers. Watch val/ in 4 steps: it is what is trained.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

export MODEL=${MODEL:-black-forest-labs/FLUX.1-schnell}
export NAME=${NAME:-flux1_schnell_lora_rollout_corr}
export CLIP=${CLIP:-0.00001}
export IMAGES=${IMAGES:-24}

exec bash "$HERE/lora_rollout_corr.sh" \
    actor_rollout_ref.model.target_modules="['attn.to_q','attn.to_k','attn.to_v','attn.to_out.0','attn.add_q_proj','attn.add_k_proj','attn.add_v_proj','attn.to_add_out','ff.net.0.proj','ff.net.2','ff_context.net.0.proj','ff_context.net.2']" \
    actor_rollout_ref.rollout.algo.noise_level=0.8 \
    actor_rollout_ref.rollout.algo.sde_type=cps \
    actor_rollout_ref.rollout.algo.sde_window_size=2 \
    actor_rollout_ref.rollout.algo.sde_window_range="[0,2]" \
    actor_rollout_ref.rollout.pipeline.num_inference_steps=4 \
    actor_rollout_ref.rollout.pipeline.max_sequence_length=256 \
    "$@"
