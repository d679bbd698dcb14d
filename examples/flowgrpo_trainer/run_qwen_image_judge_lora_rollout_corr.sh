#!/usr/bin/env bash
# The Qwen-Image run of run_qwen_image_ocr_lora_rollout_corr.sh with a vision language model as its judge: UnifiedReward
# 2.0 on a server of its own, asked about alignment, coherence and style (docs/rewards/judge.md). In validation OpenAI's
# CLIP-L looks on.
#
#   JUDGE      address of the server      (default: http://127.0.0.1:8000/v1); start it elsewhere, for instance with
#              vllm serve CodeGoat24/UnifiedReward-2.0-qwen3vl-2b --port 8000
#   DATA       folder with train.txt and test.txt, a prompt a line: flow_grpo's dataset/pickscore
#              (default: data/pickscore)
#
# MODEL, OUTPUTS, NUM_GPUS and ENGINE are those of the other script. The server's scores vary with how it batches, so
# that no run can be repeated exactly.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

DATA=${DATA:-data/pickscore}
JUDGE=${JUDGE:-http://127.0.0.1:8000/v1}
export TRAIN=${TRAIN:-$DATA/train.txt}
export VAL=${VAL:-$DATA/test.txt}
export NAME=${NAME:-qwen_image_judge_lora_rollout_corr}
export REWARD=${REWARD:-reward.functions.judge=1.0 reward.judge.base_url=$JUDGE \
    reward.judge.questions=[unified_reward_2] reward.val_functions.clip_cosine=true}

exec bash "$HERE/run_qwen_image_ocr_lora_rollout_corr.sh" "$@"
