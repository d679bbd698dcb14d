#!/usr/bin/env bash
# FlowGRPO LoRA on Qwen-Image with the OCR reward and rollout correction in bypass mode.
#
#   MODEL      pipeline folder or hub name        (default: Qwen/Qwen-Image)
#   DATA       folder with train.parquet and test.parquet; make them from flow_grpo's OCR prompts with
#              flowgrpo-rc prepare-data ocr --input DIR --output "$DATA"      (default: data/ocr)
#   TRAIN, VAL the prompt files themselves        (default: the two in DATA)
#   REWARD     settings of the reward, in words   (default: reward.functions.ocr=1.0 reward.ocr.mode=full)
#   NAME       of the run's folder                (default: qwen_image_ocr_lora_rollout_corr)
#   PROMPTS, IMAGES                               (default: 32 prompts x 16 images a batch)
#   OUTPUTS, NUM_GPUS, LAUNCHER and ENGINE are those of launch.sh
#
# Every process holds the frozen model once where model.dtype and rollout.dtype agree, twice where they differ, and with
# ENGINE=vllm_omni always twice. rollout_is is a diagnosis only in bypass mode with PPO: the ratio corrects by itself.
# A micro-batch of 4 images is 8 rows, their 2 trained steps each; on a smaller GPU,
# actor_rollout_ref.actor.ppo_micro_batch_rows=1 learns the same with an eighth of the activations.
# Any setting can be overridden: bash run_qwen_image_...sh trainer.total_training_steps=100
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

MODEL=${MODEL:-Qwen/Qwen-Image}
DATA=${DATA:-data/ocr}
TRAIN=${TRAIN:-$DATA/train.parquet}
VAL=${VAL:-$DATA/test.parquet}
NAME=${NAME:-qwen_image_ocr_lora_rollout_corr}
PROMPTS=${PROMPTS:-32}
read -ra REWARDS <<<"${REWARD:-reward.functions.ocr=1.0 reward.ocr.mode=full}"
source "$HERE/launch.sh"

exec "${LAUNCH[@]}" \
    data.train_files="$TRAIN" \
    data.val_files="$VAL" \
    data.val_max_samples=128 \
    data.train_batch_size="$PROMPTS" \
    algorithm.rollout_correction.bypass_mode=True \
    algorithm.rollout_correction.rollout_is=sequence \
    algorithm.rollout_correction.rollout_is_threshold=2.0 \
    algorithm.rollout_correction.rollout_rs=seq_mean_k1 \
    algorithm.rollout_correction.rollout_rs_threshold="0.5_2.0" \
    actor_rollout_ref.model.algorithm=flow_grpo \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.model.dtype=bfloat16 \
    actor_rollout_ref.model.lora_rank=64 \
    actor_rollout_ref.model.lora_alpha=128 \
    actor_rollout_ref.model.target_modules="['to_q','to_k','to_v','to_out.0','add_q_proj','add_k_proj','add_v_proj','to_add_out','img_mlp.net.0.proj','img_mlp.net.2','txt_mlp.net.0.proj','txt_mlp.net.2']" \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.optim.lr=3e-4 \
    actor_rollout_ref.actor.optim.weight_decay=0.0001 \
    actor_rollout_ref.actor.ppo_mini_batch_size="$((PROMPTS / 2))" \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.actor.diffusion_loss.clip_ratio=0.001 \
    actor_rollout_ref.rollout.name="$ENGINE" \
    actor_rollout_ref.rollout.dtype=bfloat16 \
    actor_rollout_ref.rollout.n="${IMAGES:-16}" \
    actor_rollout_ref.rollout.micro_batch_size=16 \
    actor_rollout_ref.rollout.calculate_log_probs=True \
    actor_rollout_ref.rollout.algo.noise_level=1.2 \
    actor_rollout_ref.rollout.algo.sde_type=sde \
    actor_rollout_ref.rollout.algo.sde_window_size=2 \
    actor_rollout_ref.rollout.algo.sde_window_range="[0,5]" \
    actor_rollout_ref.rollout.pipeline.height=512 \
    actor_rollout_ref.rollout.pipeline.width=512 \
    actor_rollout_ref.rollout.pipeline.num_inference_steps=10 \
    actor_rollout_ref.rollout.pipeline.true_cfg_scale=4.0 \
    actor_rollout_ref.rollout.pipeline.max_sequence_length=256 \
    actor_rollout_ref.rollout.val_kwargs.pipeline.num_inference_steps=50 \
    "${REWARDS[@]}" \
    trainer.logger="['console','tensorboard']" \
    trainer.project_name=flow_grpo \
    trainer.experiment_name="$NAME" \
    trainer.default_local_dir="$OUTPUTS/flow_grpo/$NAME" \
    trainer.save_freq=30 \
    trainer.test_freq=30 \
    trainer.total_training_steps=300 \
    "$@"
