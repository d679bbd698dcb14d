#!/usr/bin/env bash
# The Qwen-Image run of run_qwen_image_ocr_lora_rollout_corr.sh with its rollout engines on a Ray cluster: the trainer's
# processes on this node, engines wherever the cluster has a free GPU. They draw the next batch while the trainer learns
# from this one (docs/rollouts_elsewhere.md). First start Ray, on this node with the GPUs that the trainer leaves free,
# and on every other node with all of them:
#
#   CUDA_VISIBLE_DEVICES=4,5,6,7 ray start --head --port 6379
#   ray start --address HEAD:6379
#
#   NUM_GPUS   trainer processes on this node, from its first GPU on        (default: 4)
#   ENGINES    engines for each of them                                     (default: 1)
#   GPUS       GPUs of each engine; more than 1 with ENGINE=vllm_omni alone (default: 1)
#   ADDRESS    of the cluster                                               (default: auto, that of this node)
#   AHEAD      batches that are drawn ahead                                 (default: 1)
#
# MODEL, DATA, OUTPUTS and ENGINE are those of the other script; every node needs MODEL under the same path, and this
# package with the extra ray.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

exec bash "$HERE/run_qwen_image_ocr_lora_rollout_corr.sh" \
    actor_rollout_ref.rollout.placement=ray \
    actor_rollout_ref.rollout.engines="${ENGINES:-1}" \
    actor_rollout_ref.rollout.ray.address="${ADDRESS:-auto}" \
    actor_rollout_ref.rollout.ray.num_gpus="${GPUS:-1}" \
    actor_rollout_ref.rollout.ahead="${AHEAD:-1}" \
    "$@"
