# What the full-size scripts read to choose the engine and to start their processes. Sourced by them.
#
#   OUTPUTS    where run folders go               (default: outputs)
#   NUM_GPUS   processes on this machine          (default: 4)
#   LAUNCHER   starts the processes in place of torchrun --standalone, e.g. on several nodes
#   ENGINE     vllm_omni or diffusers             (default: vllm_omni where it is installed; docs/vllm_omni.md)
#   COMMAND    what to do with the settings: train, plan, probe, with options of its own
#              (default: train), e.g. COMMAND="plan --gpus 4x80" bash run_....sh
#
# LAUNCH is what a script calls with its settings.
OUTPUTS=${OUTPUTS:-outputs}
NUM_GPUS=${NUM_GPUS:-4}
ENGINE=${ENGINE:-$(python -c 'from importlib.util import find_spec; print("vllm_omni" if find_spec("vllm_omni") else "diffusers")')}
echo "Rollout engine: $ENGINE"

if [ "$ENGINE" = diffusers ]; then
    # Less memory is lost between tensors; vllm's memory pool for a sleeping engine does not work with it.
    export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
fi

read -ra COMMAND_WORDS <<<"${COMMAND:-train}"
# Settings behind the script's name replace its own; that is no slip to warn about.
export FLOWGRPO_RC_SCRIPT=1

if [ "${COMMAND_WORDS[0]}" = plan ]; then
    # A plan is one process, without GPUs.
    LAUNCH=(python -m flowgrpo_rc.cli.main)
elif [ -n "${LAUNCHER:-}" ]; then
    read -ra WORDS <<<"$LAUNCHER"
    LAUNCH=("${WORDS[@]}" -m flowgrpo_rc.cli.main)
elif [ "$NUM_GPUS" -gt 1 ]; then
    LAUNCH=(torchrun --standalone --nproc_per_node "$NUM_GPUS" -m flowgrpo_rc.cli.main)
else
    LAUNCH=(python -m flowgrpo_rc.cli.main)
fi
LAUNCH+=("${COMMAND_WORDS[@]}")
