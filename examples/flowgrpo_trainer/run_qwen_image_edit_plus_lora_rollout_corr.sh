#!/usr/bin/env bash
# Qwen-Image-Edit-2511 or -2509, which edit images, with PickScore and likeness to the first image. The engine and what
# is not said here: lora_rollout_corr.sh.
#
#   DATA       folder with train.jsonl and test.jsonl, whose rows have a prompt and images (docs/editing.md)
#              (default: data/edit)
#
# From verl-omni's examples/flowgrpo_trainer/qwen_image_edit/run_qwen_image_edit_lora.sh: 12 steps of which three
# neighbours of the first six are stochastic (sde, 0.7) and trained, guidance 4 (true_cfg_scale here), 512 pixels, 32
# prompts x 16 images in two updates, 40 steps in validation, LoRA layers. flow_grpo's
# repairany_qwenimage_edit_plus_fast (2509) has 10 steps, four of the first five with 0.9. Chosen here: references of
# the drawing's area in place of the pipeline's 1024 x 1024, and the rewards, each normalised within its prompt's
# images, for PickScore alone would not ask that anything of the image be kept; engine and micro-batch, so that 80 GB
# hold it: the transformer's weights are 38 GiB, and ENGINE=vllm_omni has them twice.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

DATA=${DATA:-data/edit}
export TRAIN=${TRAIN:-$DATA/train.jsonl}
export VAL=${VAL:-$DATA/test.jsonl}
export MODEL=${MODEL:-Qwen/Qwen-Image-Edit-2511}
export NAME=${NAME:-qwen_image_edit_plus_lora_rollout_corr}
export REWARD=${REWARD:-reward.functions.pickscore=1.0 reward.functions.clip_similarity=1.0 reward.normalization=group}
export PROMPTS=${PROMPTS:-32}
export MICRO=${MICRO:-1}
export ENGINE=${ENGINE:-diffusers}

exec bash "$HERE/lora_rollout_corr.sh" \
    actor_rollout_ref.model.target_modules="['to_q','to_k','to_v','to_out.0','add_q_proj','add_k_proj','add_v_proj','to_add_out','img_mlp.net.0.proj','img_mlp.net.2','txt_mlp.net.0.proj','txt_mlp.net.2']" \
    actor_rollout_ref.rollout.algo.noise_level=0.7 \
    actor_rollout_ref.rollout.algo.sde_type=sde \
    actor_rollout_ref.rollout.algo.sde_window_size=3 \
    actor_rollout_ref.rollout.algo.sde_window_range="[0,6]" \
    actor_rollout_ref.rollout.pipeline.reference_area=262144 \
    actor_rollout_ref.rollout.pipeline.num_inference_steps=12 \
    actor_rollout_ref.rollout.pipeline.true_cfg_scale=4.0 \
    actor_rollout_ref.rollout.val_kwargs.pipeline.num_inference_steps=40 \
    "$@"
