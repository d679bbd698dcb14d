#!/usr/bin/env bash
# The Qwen-Image run of run_qwen_image_ocr_lora_rollout_corr.sh with PickScore as its reward. In validation another
# network looks on, OpenAI's CLIP-L: where val/reward/pickscore rises and val/reward/clip_cosine falls, the reward is
# being hacked (docs/rewards/several.md).
#
#   DATA       folder with train.txt and test.txt, a prompt a line: flow_grpo's dataset/pickscore
#              (default: data/pickscore)
#
# Both scorers are loaded before the model, in float32 on each process's GPU: 3.9 and 1.7 GB.
# reward.pickscore.device=cpu, or a GPU of their own, makes room; flowgrpo-rc check-reward pickscore tries the weights.
# MODEL, OUTPUTS, NUM_GPUS and ENGINE are those of the other script. Prompts and reward are flow_grpo's pickscore_sd3;
# the rest is the other script's.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

DATA=${DATA:-data/pickscore}
export TRAIN=${TRAIN:-$DATA/train.txt}
export VAL=${VAL:-$DATA/test.txt}
export NAME=${NAME:-qwen_image_pickscore_lora_rollout_corr}
export REWARD=${REWARD:-reward.functions.pickscore=1.0 reward.val_functions.clip_cosine=true}

exec bash "$HERE/run_qwen_image_ocr_lora_rollout_corr.sh" "$@"
