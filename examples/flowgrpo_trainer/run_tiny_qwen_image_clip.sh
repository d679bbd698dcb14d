#!/usr/bin/env bash
# FlowGRPO LoRA on the tiny Qwen-Image model with a learned reward, the tiny CLIP; both come with the package, and it
# takes minutes on two CPU cores. The reward runs by the code that PickScore takes; see docs/rewards/clip.md.
# OCR only looks on, in validation: where val/reward/clip_cosine rises and val/reward/ocr does not, the reward is being
# hacked.
# Any setting can be overridden: bash run_tiny_...sh trainer.total_training_steps=40
#
#   OUTPUTS   where run folders go (default: ./outputs)
set -euo pipefail
export FLOWGRPO_RC_SCRIPT=1  # settings behind the script's name replace its own

OUTPUTS=${OUTPUTS:-outputs}

exec flowgrpo-rc demo \
    reward.functions.clip_cosine=1 \
    reward.clip_cosine.model_path=asset:tiny_clip \
    reward.val_functions.ocr=true \
    trainer.experiment_name=tiny_qwen_image_clip \
    trainer.default_local_dir="$OUTPUTS/flowgrpo_rc/tiny_qwen_image_clip" \
    "$@"
