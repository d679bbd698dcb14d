#!/usr/bin/env bash
# FlowGRPO LoRA on the tiny FLUX.1-Kontext that comes with the package, which edits pictures of numbers: minutes on a CPU.
# Two rewards: OCR reads the number that was asked for, and same_style (examples/tiny_kontext/style_reward.py) compares
# the colours with those of the reference. docs/editing.md says what comes out.
# Any setting can be overridden: bash run_tiny_...sh trainer.total_training_steps=20
#
#   OUTPUTS   where run folders go (default: ./outputs)
set -euo pipefail
export FLOWGRPO_RC_SCRIPT=1  # settings behind the script's name replace its own

OUTPUTS=${OUTPUTS:-outputs}
EXAMPLES=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

exec flowgrpo-rc train \
    data.train_files=asset:tiny_edit/train.jsonl \
    data.val_files=asset:tiny_edit/test.jsonl \
    data.train_batch_size=8 \
    algorithm.rollout_correction.bypass_mode=True \
    algorithm.rollout_correction.rollout_is=sequence \
    actor_rollout_ref.model.path=asset:tiny_kontext \
    actor_rollout_ref.model.lora_rank=8 \
    actor_rollout_ref.model.lora_alpha=16 \
    actor_rollout_ref.actor.optim.lr=2e-3 \
    actor_rollout_ref.actor.optim.lr_warmup_steps=10 \
    actor_rollout_ref.actor.optim.lr_scheduler_type=linear \
    actor_rollout_ref.actor.ppo_mini_batch_size=8 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=48 \
    actor_rollout_ref.actor.diffusion_loss.clip_ratio=1e-3 \
    actor_rollout_ref.rollout.n=12 \
    actor_rollout_ref.rollout.dtype=bfloat16 \
    actor_rollout_ref.rollout.micro_batch_size=96 \
    actor_rollout_ref.rollout.algo.noise_level=0.7 \
    actor_rollout_ref.rollout.algo.sde_window_size=4 \
    actor_rollout_ref.rollout.algo.sde_window_range="[0,4]" \
    actor_rollout_ref.rollout.pipeline.height=32 \
    actor_rollout_ref.rollout.pipeline.width=32 \
    actor_rollout_ref.rollout.pipeline.reference_area=1024 \
    actor_rollout_ref.rollout.pipeline.num_inference_steps=6 \
    actor_rollout_ref.rollout.pipeline.max_sequence_length=16 \
    actor_rollout_ref.rollout.val_kwargs.n=12 \
    reward.functions.ocr=1.0 \
    reward.reward_functions.same_style.path="$EXAMPLES/tiny_kontext/style_reward.py" \
    reward.reward_functions.same_style.name=same_style \
    reward.reward_functions.same_style.weight=1.0 \
    trainer.experiment_name=tiny_kontext_edit \
    trainer.default_local_dir="$OUTPUTS/flowgrpo_rc/tiny_kontext_edit" \
    trainer.total_training_steps=100 \
    trainer.test_freq=20 \
    trainer.save_freq=100 \
    trainer.log_val_generations=24 \
    trainer.resume_mode=disable \
    "$@"
