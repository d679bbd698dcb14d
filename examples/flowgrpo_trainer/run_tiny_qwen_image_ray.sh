#!/usr/bin/env bash
# FlowGRPO LoRA on the tiny Qwen-Image model with two rollout engines as actors of Ray, without a GPU. Ray is started on
# this machine for the run, unless RAY_ADDRESS names a cluster. Needs the extra ray.
# Any setting can be overridden: bash run_tiny_...sh trainer.total_training_steps=20
#
#   OUTPUTS   where run folders go (default: ./outputs)
set -euo pipefail
export FLOWGRPO_RC_SCRIPT=1  # settings behind the script's name replace its own

OUTPUTS=${OUTPUTS:-outputs}

exec flowgrpo-rc demo \
    actor_rollout_ref.rollout.placement=ray \
    actor_rollout_ref.rollout.engines=2 \
    actor_rollout_ref.rollout.ray.num_gpus=0 \
    actor_rollout_ref.rollout.ahead=1 \
    trainer.default_local_dir="$OUTPUTS/flowgrpo_rc/tiny_qwen_image_ray" \
    "$@"
