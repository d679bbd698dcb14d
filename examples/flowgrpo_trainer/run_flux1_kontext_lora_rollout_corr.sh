#!/usr/bin/env bash
# FLUX.1-Kontext-dev, which edits an image, with PickScore and likeness to that image. The engine and what is not said
# here: lora_rollout_corr.sh.
#
#   DATA       folder with train.jsonl and test.jsonl, whose rows have a prompt and images (docs/editing.md)
#              (default: data/edit)
#
# From Flow-Factory's examples/grpo/lora/flux1_kontext: 10 steps of which one of the second to fourth is stochastic
# (sde, 0.9) and trained, guidance 2.5, images and references of 384 x 384 pixels, 20 steps in validation, LoRA layers.
# flow_grpo's counting_flux_kontext trains 5 of 6 steps with the same noise at 512 pixels. Chosen here: the rewards,
# each normalised within its prompt's images, for PickScore alone would not ask that anything of the image be kept.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

DATA=${DATA:-data/edit}
export TRAIN=${TRAIN:-$DATA/train.jsonl}
export VAL=${VAL:-$DATA/test.jsonl}
export MODEL=${MODEL:-black-forest-labs/FLUX.1-Kontext-dev}
export NAME=${NAME:-flux1_kontext_lora_rollout_corr}
export REWARD=${REWARD:-reward.functions.pickscore=1.0 reward.functions.clip_similarity=1.0 reward.normalization=group}
export SIZE=${SIZE:-384}

exec bash "$HERE/lora_rollout_corr.sh" \
    actor_rollout_ref.model.target_modules="['attn.to_q','attn.to_k','attn.to_v','attn.to_out.0','attn.add_q_proj','attn.add_k_proj','attn.add_v_proj','attn.to_add_out','ff.net.0.proj','ff.net.2','ff_context.net.0.proj','ff_context.net.2']" \
    actor_rollout_ref.rollout.algo.noise_level=0.9 \
    actor_rollout_ref.rollout.algo.sde_type=sde \
    actor_rollout_ref.rollout.algo.sde_window_size=1 \
    actor_rollout_ref.rollout.algo.sde_window_range="[1,4]" \
    actor_rollout_ref.rollout.pipeline.reference_area=147456 \
    actor_rollout_ref.rollout.pipeline.num_inference_steps=10 \
    actor_rollout_ref.rollout.pipeline.guidance_scale=2.5 \
    actor_rollout_ref.rollout.val_kwargs.pipeline.num_inference_steps=20 \
    "$@"
