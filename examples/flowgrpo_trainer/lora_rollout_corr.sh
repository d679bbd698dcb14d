#!/usr/bin/env bash
# What the scripts of several families share; each of them says which model, which steps and which guidance, and passes
# its settings on. Not run by itself.
#
#   MODEL      pipeline folder or hub name
#   DATA       folder of the prompts              (default: data/pickscore, flow_grpo's dataset/pickscore)
#   TRAIN, VAL the prompt files themselves        (default: train.txt and test.txt in DATA, a prompt a line)
#   REWARD     settings of the reward, in words   (default: PickScore, and in validation CLIP-L looks on)
#   NAME       of the run's folder
#   OUTPUTS, NUM_GPUS, LAUNCHER and ENGINE are those of launch.sh
#   PROMPTS, IMAGES, SIZE, CLIP                   (default: 48 prompts x 16 images of 512 pixels to a side, clip 1e-4)
#   MICRO      images of a micro-batch            (default: 4)
#   RANK, DECAY, EMA                              (default: LoRA of rank 64, whose alpha is twice that, weight decay 1e-4,
#              weights averaged by 0.974 an update; EMA=null averages none)
#
# From Flow-Factory's examples/grpo/lora, which have one recipe for every family: LoRA of rank 64 and alpha 128 from
# Gaussian weights, learning rate 3e-4, weight decay 1e-4, clip 1e-4, no KL, 48 prompts x 16 images a batch, two updates
# each, 512 pixels, bfloat16 with a LoRA in float32. flow_grpo's config/grpo.py has the same rank, rate, decay and clip.
# Flow-Factory averages weights by .9 every 4 updates, here by .974 each. Chosen here: 300 steps, micro-batches, and
# decoupled mode, since a clip of 1e-4 is narrower than a bfloat16 engine's gap.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

DATA=${DATA:-data/pickscore}
TRAIN=${TRAIN:-$DATA/train.txt}
VAL=${VAL:-$DATA/test.txt}
read -ra REWARDS <<<"${REWARD:-reward.functions.pickscore=1.0 reward.val_functions.clip_cosine=true}"
PROMPTS=${PROMPTS:-48}
SIZE=${SIZE:-512}
RANK=${RANK:-64}
source "$HERE/launch.sh"

exec "${LAUNCH[@]}" \
    data.train_files="$TRAIN" \
    data.val_files="$VAL" \
    data.val_max_samples=128 \
    data.train_batch_size="$PROMPTS" \
    algorithm.rollout_correction.bypass_mode=False \
    algorithm.rollout_correction.rollout_is=sequence \
    algorithm.rollout_correction.rollout_is_threshold=2.0 \
    actor_rollout_ref.model.algorithm=flow_grpo \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.model.dtype=bfloat16 \
    actor_rollout_ref.model.lora_rank="$RANK" \
    actor_rollout_ref.model.lora_alpha="$((2 * RANK))" \
    actor_rollout_ref.model.lora_init_weights=gaussian \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.optim.lr=3e-4 \
    actor_rollout_ref.actor.optim.weight_decay="${DECAY:-0.0001}" \
    actor_rollout_ref.actor.ppo_mini_batch_size="$((PROMPTS / 2))" \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu="${MICRO:-4}" \
    actor_rollout_ref.actor.ema_decay="${EMA:-0.974}" \
    actor_rollout_ref.actor.diffusion_loss.clip_ratio="${CLIP:-0.0001}" \
    actor_rollout_ref.rollout.name="$ENGINE" \
    actor_rollout_ref.rollout.dtype=bfloat16 \
    actor_rollout_ref.rollout.n="${IMAGES:-16}" \
    actor_rollout_ref.rollout.micro_batch_size=16 \
    actor_rollout_ref.rollout.calculate_log_probs=True \
    actor_rollout_ref.rollout.pipeline.height="$SIZE" \
    actor_rollout_ref.rollout.pipeline.width="$SIZE" \
    "${REWARDS[@]}" \
    trainer.logger="['console','tensorboard']" \
    trainer.project_name=flow_grpo \
    trainer.experiment_name="$NAME" \
    trainer.default_local_dir="$OUTPUTS/flow_grpo/$NAME" \
    trainer.save_freq=30 \
    trainer.test_freq=30 \
    trainer.total_training_steps=300 \
    "$@"
