#!/usr/bin/env bash
# FlowGRPO LoRA on the tiny Qwen-Image model with rollouts in the real vllm-omni, without a GPU.
# Set up once with scripts/install_vllm_omni_cpu.sh .venv-vllm (`make vllm` does), then run this with it:
#   PATH="$PWD/.venv-vllm/bin:$PATH" bash examples/flowgrpo_trainer/run_tiny_qwen_image_vllm_omni.sh
# Any setting can be overridden: bash run_tiny_...sh trainer.total_training_steps=20
#
#   OUTPUTS   where run folders go (default: ./outputs)
set -euo pipefail
export FLOWGRPO_RC_SCRIPT=1  # settings behind the script's name replace its own

OUTPUTS=${OUTPUTS:-outputs}

exec flowgrpo-rc demo \
    actor_rollout_ref.rollout.name=vllm_omni \
    trainer.default_local_dir="$OUTPUTS/flowgrpo_rc/tiny_qwen_image_vllm_omni" \
    "$@"
