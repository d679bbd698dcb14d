#!/usr/bin/env bash
# The Qwen-Image run of run_qwen_image_ocr_lora_rollout_corr.sh with Qwen3-0.6B as its prompt writer: both learn from
# OCR, each with its own rollout correction. See docs/prompt_writer.md.
#
#   WRITER     language model's folder or name    (default: Qwen/Qwen3-0.6B)
#
# MODEL, DATA, OUTPUTS, NUM_GPUS and ENGINE are those of the other script, which also has the settings of the images.
# The writer's are from PromptRL (arXiv 2602.01382; scripts/train/geneval_grpo_flux.sh of G-U-N/UniRL): 8 rewrites of a
# request, 512 tokens of one at most, KL of weight 0.01 to the base, no second pass. There every weight of the language
# model is trained with learning rate 1e-6, and each rewrite has one image; here a LoRA of rank 32 with 1e-5, and two
# images of a rewrite, which are compared with each other. Chosen here: 8 requests a batch, so that it has 128 images.
# Any setting can be overridden: bash run_qwen_image_...sh trainer.total_training_steps=100
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

WRITER=${WRITER:-Qwen/Qwen3-0.6B}
export PROMPTS=${PROMPTS:-8}
export IMAGES=${IMAGES:-2}
export NAME=${NAME:-qwen_image_prompt_writer}

exec bash "$HERE/run_qwen_image_ocr_lora_rollout_corr.sh" \
    algorithm.prompt_writer.path="$WRITER" \
    algorithm.prompt_writer.rewrites=8 \
    algorithm.prompt_writer.max_new_tokens=512 \
    algorithm.prompt_writer.system_prompt="'Rewrite the request as one prompt for an image model. Keep every word that the picture must show in quotes. Answer with the prompt alone.'" \
    algorithm.prompt_writer.chat_template_kwargs="{enable_thinking: false}" \
    algorithm.prompt_writer.dtype=bfloat16 \
    algorithm.prompt_writer.lora_rank=32 \
    algorithm.prompt_writer.lora_alpha=64 \
    algorithm.prompt_writer.actor.optim.lr=1e-5 \
    algorithm.prompt_writer.actor.ppo_micro_batch_size_per_gpu=4 \
    algorithm.prompt_writer.actor.use_kl_loss=True \
    algorithm.prompt_writer.actor.kl_loss_coef=0.01 \
    algorithm.prompt_writer.actor.rollout_correction.rollout_is=token \
    algorithm.prompt_writer.actor.rollout_correction.rollout_is_threshold=2.0 \
    algorithm.prompt_writer.engine.dtype=bfloat16 \
    "$@"
