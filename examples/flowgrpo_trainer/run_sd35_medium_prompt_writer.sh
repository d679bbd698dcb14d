#!/usr/bin/env bash
# Qwen3-0.6B rewrites prompts for Stable Diffusion 3.5 medium; both learn from PickScore, each with its own rollout
# correction. See docs/prompt_writer.md.
#
#   WRITER     language model's folder or name    (default: Qwen/Qwen3-0.6B)
#
# The prompts, the reward, the engine and what is not said here: lora_rollout_corr.sh.
#
# From Tencent's UniRL, examples/pe/pe_trainside_pickscore.yaml: 8 requests x 4 rewrites x 8 images a batch, LoRA of rank
# 16 and alpha 32 on both sides (the writer's on its attention), learning rates 5e-6 and 3e-4, clips 0.01 and 1e-4, no
# KL, two updates of the images a batch, 10 steps, noise 0.7, no guidance, 512 pixels, 512 tokens of a rewrite at most,
# the prompt after "Revised Prompt:", 300 steps. There 3 random steps of the first 5 are trained, here a window of 3 in
# them; rewrites are sampled there at temperature 0.7 with top-p and top-k, here from the whole distribution, whose
# log-probs are the policy's; the writer takes one update a batch there, here two; the images' LoRA starts from Gaussian
# weights here. Chosen here: the instruction, micro-batches, decoupled mode with sequence weights for images, and token
# weights for the writer.
# Any setting can be overridden: bash run_sd35_...sh trainer.total_training_steps=100
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

export MODEL=${MODEL:-stabilityai/stable-diffusion-3.5-medium}
export NAME=${NAME:-sd35_medium_prompt_writer}
export PROMPTS=${PROMPTS:-8}
export IMAGES=${IMAGES:-8}
export RANK=${RANK:-16}
export DECAY=${DECAY:-0.0}
export EMA=${EMA:-null}

exec bash "$HERE/lora_rollout_corr.sh" \
    algorithm.prompt_writer.path="${WRITER:-Qwen/Qwen3-0.6B}" \
    algorithm.prompt_writer.rewrites=4 \
    algorithm.prompt_writer.max_new_tokens=512 \
    algorithm.prompt_writer.system_prompt="'You write prompts for an image model. Think about what the picture should show, then give one clear and complete prompt behind the words Revised Prompt: and nothing after it.'" \
    algorithm.prompt_writer.prompt_marker="'Revised Prompt:'" \
    algorithm.prompt_writer.chat_template_kwargs="{enable_thinking: false}" \
    algorithm.prompt_writer.dtype=bfloat16 \
    algorithm.prompt_writer.lora_rank=16 \
    algorithm.prompt_writer.lora_alpha=32 \
    algorithm.prompt_writer.target_modules="[q_proj,k_proj,v_proj,o_proj]" \
    algorithm.prompt_writer.actor.optim.lr=5e-6 \
    algorithm.prompt_writer.actor.optim.weight_decay=0.0 \
    algorithm.prompt_writer.actor.ppo_micro_batch_size_per_gpu=4 \
    algorithm.prompt_writer.actor.token_loss.clip_ratio=0.01 \
    algorithm.prompt_writer.actor.rollout_correction.rollout_is=token \
    algorithm.prompt_writer.actor.rollout_correction.rollout_is_threshold=2.0 \
    algorithm.prompt_writer.engine.dtype=bfloat16 \
    algorithm.prompt_writer.engine.micro_batch_size=32 \
    actor_rollout_ref.model.target_modules="[to_q,to_k,to_v,to_out.0,add_q_proj,add_k_proj,add_v_proj,to_add_out]" \
    actor_rollout_ref.rollout.algo.noise_level=0.7 \
    actor_rollout_ref.rollout.algo.sde_type=sde \
    actor_rollout_ref.rollout.algo.sde_window_size=3 \
    actor_rollout_ref.rollout.algo.sde_window_range="[0,5]" \
    actor_rollout_ref.rollout.pipeline.num_inference_steps=10 \
    actor_rollout_ref.rollout.pipeline.true_cfg_scale=1.0 \
    actor_rollout_ref.rollout.pipeline.guidance_scale=null \
    actor_rollout_ref.rollout.pipeline.max_sequence_length=256 \
    "$@"
