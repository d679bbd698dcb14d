#!/usr/bin/env bash
# What only a GPU can show, in parts that do not depend on each other; figures in $OUT (outputs/gpu_run).
#
#   bash scripts/gpu_run.sh tests    # facts, the tests marked gpu, the demo, two benchmarks: at most ten minutes
#   bash scripts/gpu_run.sh scale    # random weights of .5 to 20 billion parameters, beside the plan: at most ten
#   bash scripts/gpu_run.sh pack     # where there is a network: the packages for a machine without one, in .gpu/
#
# $PY is the Python to use (python3). A machine with Python 3.12, torch, transformers and accelerate takes the rest from
# .gpu/, which `pack` fills; copy it along with the checkout. Exits with 1 if a part has failed; parts.jsonl says which.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PY=${PY:-python3}
OUT=${OUT:-outputs/gpu_run}

pack() {
    local platforms=() name
    for name in manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux2014; do
        platforms+=(--platform "${name}_x86_64")
    done
    # Without their dependencies: torch and what comes with it is there already.
    local packages="diffusers peft hydra-core omegaconf tensordict pyvers importlib_metadata jaxtyping wadler_lindig"
    packages+=" beartype torchao bitsandbytes"
    local reader="rapidocr rapidfuzz pyclipper shapely colorlog"
    mkdir -p .gpu/wheels
    # shellcheck disable=SC2086
    $PY -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
        "${platforms[@]}" -d .gpu/wheels -c constraints.txt ${PACKAGES:-$packages $reader}
    # It is on the registry as source alone.
    $PY -m pip wheel -q --no-deps -w .gpu/wheels antlr4-python3-runtime==4.9.3
    du -sh .gpu/wheels
}

# part NAME SECONDS COMMAND...: run it, whatever the others did; note exit status and time
failed=0
part() {
    local name=$1 limit=$2 begin code
    shift 2
    begin=$(date +%s)
    timeout "$limit" "$@" > "$OUT/$name.log" 2>&1
    code=$?
    [ "$code" = 0 ] || failed=1
    echo "{\"part\": \"$name\", \"exit\": $code, \"seconds\": $(($(date +%s) - begin)), \"limit\": $limit}" |
        tee -a "$OUT/parts.jsonl"
}

tests() {
    local reward=()
    part facts 60 $PY benchmarks/gpu_facts.py
    cp "$OUT/facts.log" "$OUT/facts.json"
    # shellcheck disable=SC2086
    part gpu_tests "${TESTS_S:-240}" $PY -m pytest -m gpu -q -p no:cacheprovider --durations=10 \
        --junitxml="$OUT/gpu_tests.xml" ${TESTS:-tests/test_gpu.py tests/test_gpu_precision.py tests/correction tests/rewards}
    grep -E "^(FAILED|ERROR)|passed|failed" "$OUT/gpu_tests.log"
    if ! $PY -c "import rapidocr, rapidfuzz" 2> /dev/null; then
        reward=(reward.functions.ocr=0 reward.custom_reward_function.path=tests/brightness_reward.py)
    fi
    part demo 80 $PY -m flowgrpo_rc.cli.main demo "trainer.default_local_dir=$OUT/demo" "trainer.profile_steps=[3]" \
        "trainer.total_training_steps=${STEPS:-20}" trainer.resume_mode=disable "trainer.device=${DEVICE:-auto}" \
        "${reward[@]}"
    cp "$OUT/demo/metrics.jsonl" "$OUT/demo_metrics.jsonl" 2> /dev/null
    part correction 100 $PY benchmarks/correction.py --json "$OUT/correction.json"
    part step_time 120 $PY benchmarks/step_time.py --steps 5 --out "$OUT/step_time.json" "trainer.device=${DEVICE:-auto}" \
        "${reward[@]}"
}

scale() {
    local one planned
    # On the CPU, while the GPU measures.
    # shellcheck disable=SC2086
    (
        part plan 560 $PY benchmarks/gpu_scale.py --plan --out "$OUT/plan.jsonl" ${PLANNED:+--case $PLANNED}
        exit $failed
    ) &
    planned=$!
    for one in ${CASES:-qwen:150 sd35:100 460m:90 qwen_1024:80 sd35_1024:60}; do
        part "scale_${one%%:*}" $((${one#*:} + 20)) $PY benchmarks/gpu_scale.py --case "${one%%:*}" \
            --seconds "${one#*:}" --device "${DEVICE:-cuda}" --out "$OUT/scale.jsonl"
    done
    wait "$planned" || failed=1
    cat "$OUT/plan.jsonl" 2> /dev/null
}

case ${1:-} in
    pack) pack && exit 0 || exit 1 ;;
    tests | scale) ;;
    *)
        sed -n '4,6s/^# *//p' "${BASH_SOURCE[0]}" >&2
        exit 2
        ;;
esac
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
# Of an earlier run of the same kind.
if [ "$1" = tests ]; then rm -f "$OUT/parts.jsonl"; else rm -f "$OUT/scale.jsonl" "$OUT/plan.jsonl"; fi
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
if [ -d .gpu/wheels ]; then
    site=${SITE:-.gpu/site}
    [ -d "$site/diffusers" ] || $PY -m pip install -q --no-index --no-deps --target "$site" .gpu/wheels/*.whl || exit 1
    export PYTHONPATH=$PWD/$site:$PYTHONPATH HF_HUB_OFFLINE=1
fi
"$1"
exit $failed
