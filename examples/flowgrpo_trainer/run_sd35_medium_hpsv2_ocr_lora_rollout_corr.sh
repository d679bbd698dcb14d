#!/usr/bin/env bash
# The Stable Diffusion 3.5 medium run of run_sd35_medium_ocr_lora_rollout_corr.sh with two rewards: legible text, and what
# people prefer (HPSv2.1). Each is normalised within its prompt's images before they are added up, since their scores
# spread differently. In validation OpenAI's CLIP-L looks on (docs/rewards/several.md).
#
# HPSv2.1 and CLIP-L are loaded before the model, in float32 on each process's GPU: 3.9 and 1.7 GB.
# reward.hpsv2.device=cpu, or a GPU of their own, makes room; flowgrpo-rc check-reward hpsv2 tries the weights.
# MODEL, DATA, OUTPUTS, NUM_GPUS and ENGINE are those of the other script. The two rewards' weights are chosen here.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

export NAME=${NAME:-sd35_medium_hpsv2_ocr_lora_rollout_corr}
export REWARD=${REWARD:-reward.functions.ocr=1.0 reward.ocr.mode=full reward.functions.hpsv2=1.0 \
    reward.normalization=group reward.val_functions.clip_cosine=true}

exec bash "$HERE/run_sd35_medium_ocr_lora_rollout_corr.sh" "$@"
