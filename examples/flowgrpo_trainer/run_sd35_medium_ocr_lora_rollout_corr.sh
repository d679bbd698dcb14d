#!/usr/bin/env bash
# FlowGRPO LoRA on Stable Diffusion 3.5 medium with the OCR reward and rollout correction in decoupled mode.
#
#   MODEL      pipeline folder or hub name        (default: stabilityai/stable-diffusion-3.5-medium)
#   DATA       folder with train.parquet and test.parquet; make them from flow_grpo's OCR prompts with
#              flowgrpo-rc prepare-data ocr --input DIR --output "$DATA"      (default: data/ocr)
#   TRAIN, VAL the prompt files themselves        (default: the two in DATA)
#   REWARD     settings of the reward, in words   (default: reward.functions.ocr=1.0 reward.ocr.mode=full)
#   NAME       of the run's folder                (default: sd35_medium_ocr_lora_rollout_corr)
#   OUTPUTS, NUM_GPUS, LAUNCHER and ENGINE are those of launch.sh
#
# From flow_grpo's general_ocr_sd3: 48 prompts x 24 images a batch, two updates each, LoRA, learning rate, clip, KL,
# 10 steps of which the first 9 are trained, guidance 4.5 (true_cfg_scale here), 512 pixels, 128 T5 tokens, 40 steps in
# validation, std over the whole batch; weights are averaged by .987 each update, there by .9 every 8. Chosen here:
# 600 steps, bfloat16, micro-batches, and decoupled mode, since a clip of 1e-4 is narrower than a bfloat16 engine's gap.
# A micro-batch of 2 images is 18 rows, their 9 trained steps each; on a smaller GPU,
# actor_rollout_ref.actor.ppo_micro_batch_rows=3 learns the same with a sixth of the activations.
# Any setting can be overridden: bash run_sd35_...sh trainer.total_training_steps=100
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

MODEL=${MODEL:-stabilityai/stable-diffusion-3.5-medium}
DATA=${DATA:-data/ocr}
TRAIN=${TRAIN:-$DATA/train.parquet}
VAL=${VAL:-$DATA/test.parquet}
NAME=${NAME:-sd35_medium_ocr_lora_rollout_corr}
read -ra REWARDS <<<"${REWARD:-reward.functions.ocr=1.0 reward.ocr.mode=full}"
source "$HERE/launch.sh"

exec "${LAUNCH[@]}" \
    data.train_files="$TRAIN" \
    data.val_files="$VAL" \
    data.val_max_samples=128 \
    data.train_batch_size=48 \
    algorithm.global_std=True \
    algorithm.rollout_correction.bypass_mode=False \
    algorithm.rollout_correction.rollout_is=sequence \
    algorithm.rollout_correction.rollout_is_threshold=2.0 \
    actor_rollout_ref.model.algorithm=flow_grpo \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.model.dtype=bfloat16 \
    actor_rollout_ref.model.lora_rank=32 \
    actor_rollout_ref.model.lora_alpha=64 \
    actor_rollout_ref.model.lora_init_weights=gaussian \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.optim.lr=3e-4 \
    actor_rollout_ref.actor.optim.weight_decay=0.0001 \
    actor_rollout_ref.actor.ppo_mini_batch_size=24 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 \
    actor_rollout_ref.actor.ema_decay=0.987 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.04 \
    actor_rollout_ref.actor.diffusion_loss.clip_ratio=0.0001 \
    actor_rollout_ref.rollout.name="$ENGINE" \
    actor_rollout_ref.rollout.dtype=bfloat16 \
    actor_rollout_ref.rollout.n=24 \
    actor_rollout_ref.rollout.micro_batch_size=24 \
    actor_rollout_ref.rollout.calculate_log_probs=True \
    actor_rollout_ref.rollout.algo.noise_level=0.7 \
    actor_rollout_ref.rollout.algo.sde_type=sde \
    actor_rollout_ref.rollout.algo.sde_window_range="[0,9]" \
    actor_rollout_ref.rollout.pipeline.height=512 \
    actor_rollout_ref.rollout.pipeline.width=512 \
    actor_rollout_ref.rollout.pipeline.num_inference_steps=10 \
    actor_rollout_ref.rollout.pipeline.true_cfg_scale=4.5 \
    actor_rollout_ref.rollout.pipeline.guidance_scale=null \
    actor_rollout_ref.rollout.pipeline.max_sequence_length=128 \
    actor_rollout_ref.rollout.val_kwargs.pipeline.num_inference_steps=40 \
    "${REWARDS[@]}" \
    trainer.logger="['console','tensorboard']" \
    trainer.project_name=flow_grpo \
    trainer.experiment_name="$NAME" \
    trainer.default_local_dir="$OUTPUTS/flow_grpo/$NAME" \
    trainer.save_freq=60 \
    trainer.test_freq=60 \
    trainer.total_training_steps=600 \
    "$@"
