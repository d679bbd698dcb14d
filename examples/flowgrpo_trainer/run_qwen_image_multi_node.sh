#!/usr/bin/env bash
# The Qwen-Image run of run_qwen_image_ocr_lora_rollout_corr.sh on several nodes, its frozen weights divided over the
# GPUs of each node. Start it on every node; a crash starts all processes anew from the newest checkpoint.
#
#   NNODES     nodes                                                    (default: 2)
#   NUM_GPUS   processes on each node                                   (default: 8)
#   MASTER     host:port of one node, the same on all                   (required)
#   RUN_ID     a name of this job, the same on all                      (default: flowgrpo)
#   RESTARTS   how often the processes are started anew after a crash   (default: 3)
#
# MODEL, DATA and OUTPUTS are those of the other script; all nodes need them under the same path.
set -euo pipefail

MASTER=${MASTER:?host:port of one of the nodes, e.g. MASTER=node0:29500}
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

export ENGINE=diffusers
# Else processes that are started anew find the addresses of those before them in the launcher's store.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export LAUNCHER="torchrun --nnodes ${NNODES:-2} --nproc_per_node ${NUM_GPUS:-8} --rdzv_backend c10d \
    --rdzv_endpoint $MASTER --rdzv_id ${RUN_ID:-flowgrpo} --max-restarts ${RESTARTS:-3}"

exec bash "$HERE/run_qwen_image_ocr_lora_rollout_corr.sh" \
    actor_rollout_ref.actor.fsdp_config.shard=True \
    actor_rollout_ref.rollout.gather_weights=True \
    trainer.resume_mode=auto \
    "$@"
