#!/usr/bin/env bash
# FlowGRPO LoRA on the tiny Qwen-Image model that comes with the package; minutes on two CPU cores.
# `make demo` runs this. Any setting can be overridden: bash run_tiny_...sh trainer.total_training_steps=20
#
#   OUTPUTS   where run folders go (default: ./outputs)
set -euo pipefail
export FLOWGRPO_RC_SCRIPT=1  # settings behind the script's name replace its own

OUTPUTS=${OUTPUTS:-outputs}

exec flowgrpo-rc demo \
    trainer.default_local_dir="$OUTPUTS/flowgrpo_rc/tiny_qwen_image_ocr" \
    "$@"
