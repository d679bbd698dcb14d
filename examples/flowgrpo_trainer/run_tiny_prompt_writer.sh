#!/usr/bin/env bash
# A tiny language model writes the prompts that the tiny Qwen-Image model draws; both come with the package, and both
# learn from OCR, in minutes on two CPU cores. Requests are numbers in words; see docs/prompt_writer.md.
# Any setting can be overridden: bash run_tiny_...sh algorithm.prompt_writer.learns=writer
#
#   OUTPUTS   where run folders go (default: ./outputs)
set -euo pipefail
export FLOWGRPO_RC_SCRIPT=1  # settings behind the script's name replace its own

OUTPUTS=${OUTPUTS:-outputs}

exec flowgrpo-rc demo \
    data.train_files=asset:tiny_requests/train.jsonl \
    data.val_files=asset:tiny_requests/test.jsonl \
    algorithm.prompt_writer.path=asset:tiny_writer \
    algorithm.prompt_writer.rewrites=4 \
    algorithm.prompt_writer.max_new_tokens=40 \
    algorithm.prompt_writer.lora_rank=8 \
    algorithm.prompt_writer.lora_alpha=16 \
    algorithm.prompt_writer.actor.optim.lr=2e-3 \
    algorithm.prompt_writer.actor.rollout_correction.rollout_is=token \
    actor_rollout_ref.rollout.n=3 \
    trainer.experiment_name=tiny_prompt_writer \
    trainer.default_local_dir="$OUTPUTS/flowgrpo_rc/tiny_prompt_writer" \
    "$@"
