#!/usr/bin/env bash
# All that needs a GPU, in one go: every kernel compiled, tests, compute-sanitizer over a reduced set, benchmarks.
# With four GPUs it takes under eight minutes, with one GPU some fifteen.
#
#     scripts/gpu_check.sh [folder for the results]      # default $OUT, else build/gpu_check
#     PARTS="tests" PREFIXKIT_GPU_FORESTS=5000 TESTS_SECONDS=400 scripts/gpu_check.sh    # all forests: 150 to 300 s
#     PARTS="decode" RIVALS=all DECODE_SECONDS=280 scripts/gpu_check.sh                  # every rival, in-run
#     PARTS="compare" OLD=build/old scripts/gpu_check.sh                                 # against another checkout
#
# PARTS are some of: compile tests sanitizers launch planning sampling decode scales prefill engine, and compiled,
# rotary, states, variants, streaming and compare, which are not in the default.  Every part has a limit of its own and
# writes its own file; a part that fails does not keep the next from running.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-${OUT:-build/gpu_check}}
mkdir -p "$out"
began=$SECONDS
export PYTHONUNBUFFERED=1 PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}"
export PREFIXKIT_CACHE=${PREFIXKIT_CACHE:-$(mktemp -d)}
python=${PYTHON:-python3}
parts=" ${PARTS:-compile tests sanitizers launch planning sampling decode scales prefill engine} "
summary="$out/summary.txt"
: >"$summary"
failed=0

# part NAME SECONDS COMMAND...: run it, at most that long, into NAME.log.
part() {
    local name=$1 limit=$2 start=$SECONDS code
    shift 2
    # Interrupted rather than killed, so that pytest still tells what has failed.
    timeout --signal=INT --kill-after=15 "$limit" "$@" >"$out/$name.log" 2>&1
    code=$?
    echo "$name: exit $code, $((SECONDS - start)) s; $(tail -n 1 "$out/$name.log")" | tee -a "$summary"
    if [ "$code" -ne 0 ]; then
        grep -aE "FAILED|ERROR" "$out/$name.log" | sort -u | head -n 20
        tail -n 12 "$out/$name.log"
    fi
    return "$code"
}
wants() { [[ "$parts" == *" $1 "* ]]; }

# On a machine with several GPUs tests and sanitizers share all of them, and benchmarks run side by side, each on one:
# take times to record from a machine with one GPU, or from one part alone.
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
gpus=$((gpus > 0 ? gpus : 1))

"$python" -c 'from prefixkit.cli.commands.env import facts
for name, value in facts(): print(f"{name}: {value}")' | tee "$out/env.txt"

# Compile every instantiation; the tests compile some of them.  Needs no GPU, but many cores.
if wants compile; then part compile 240 "$python" scripts/compile_all.py --jobs "$(nproc)" || failed=1; fi

if wants tests; then
    # In several processes if pytest-xdist is installed: they share a GPU well, and compile most of the time.
    count=$(($(nproc) > 4 ? $(nproc) - 2 : 2))
    count=$((count < 14 * gpus ? count : 14 * gpus))
    workers=$("$python" -c "import xdist; print('-n $count --dist worksteal')" 2>/dev/null || true)
    # shellcheck disable=SC2086
    part tests "${TESTS_SECONDS:-330}" env CUDA_VISIBLE_DEVICES="$(seq -s, 0 $((gpus - 1)))" \
        "$python" -m pytest tests/gpu tests/benchmarks/test_hydragen_gpu.py -p tests.gpu.first_gpu \
        -v --durations=8 --tb=short $workers ${TESTS_OPTIONS:-} || failed=1
fi

if wants sanitizers; then
    # Without the caching allocator memcheck sees the bounds of every tensor, and initcheck every unwritten element.
    # API errors are not reported: NVIDIA's own Python bindings ask the driver for functions that it may not have.
    sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
    if [ -x "$sanitizer" ]; then
        running=() number=0
        for kernel in "" portable; do
            for tool in memcheck racecheck synccheck initcheck; do
                # Racecheck does not see the order that one lane establishes by arriving for its warp.
                build=$kernel; [ "$tool$kernel" = racecheck ] && build=racecheck
                number=$((number + 1))
                part "sanitizer-$tool${kernel:+-$kernel}" "${SANITIZER_SECONDS:-100}" \
                    env PYTORCH_NO_CUDA_MEMORY_CACHING=1 PREFIXKIT_KERNEL="$build" \
                    CUDA_VISIBLE_DEVICES=$((number % gpus)) \
                    "$sanitizer" --tool "$tool" --error-exitcode 9 --report-api-errors no \
                    --kernel-name-exclude kernel_substring=at:: "$python" scripts/sanitizer_set.py &
                running+=($!)
            done
        done
        for process in "${running[@]}"; do wait "$process" || failed=1; done
    else
        echo "compute-sanitizer is not installed" | tee -a "$summary"
    fi
fi

queue=() # of calls of part
# benchmark NAME SECONDS OPTIONS...: its table into the log, its numbers into NAME.json.
benchmark() {
    local name=$1 limit=$2
    shift 2
    script "$name" "$limit" attention --seconds "$((limit - 20))" "$@"
}
# script NAME SECONDS FILE OPTIONS...: the same for another benchmark.
script() {
    local name=$1 limit=$2 file=$3
    shift 3
    queue+=("$(printf '%q ' part "$name" "$limit" "$python" "benchmarks/$file.py" --out "$out/$name.json" "$@")")
}
if wants launch; then script launch 90 host --launch; fi
if wants planning; then script planning 60 host; fi
if wants sampling; then script sampling 60 kernels --kernel sampling; fi
rivals=${RIVALS:-hydragen_flash,hydragen_cudnn}
if wants decode; then benchmark decode "${DECODE_SECONDS:-150}" --rivals "$rivals"; fi
if wants scales; then benchmark scales "${SCALES_SECONDS:-90}" --scales --rivals "$rivals"; fi
if wants engine; then script engine "${ENGINE_SECONDS:-110}" engine --rows "${ENGINE_ROWS:-64,1024}"; fi
if wants prefill; then benchmark prefill "${PREFILL_SECONDS:-60}" --prefill; fi
if wants rotary; then script rotary 60 kernels --kernel rotary; fi
if wants states; then script states 60 kernels --kernel states; fi
if wants variants; then script variants 250 variants; fi
if wants streaming; then script streaming 250 streaming --parts attention,memory; fi
if wants compare; then
    seconds=${COMPARE_SECONDS:-560}
    # shellcheck disable=SC2086
    script compare "$seconds" compare --old "${OLD:-build/old}" --seconds "$((seconds - 40))" \
        ${COMPARE_OPTIONS:-}
fi
if wants compiled; then script compiled 150 engine --step; fi
running=()
for ((gpu = 0; gpu < gpus; gpu++)); do
    (
        export CUDA_VISIBLE_DEVICES=$gpu
        code=0
        for ((number = gpu; number < ${#queue[@]}; number += gpus)); do eval "${queue[number]}" || code=1; done
        exit "$code"
    ) &
    running+=($!)
done
for process in "${running[@]}"; do wait "$process" || failed=1; done
echo "$((SECONDS - began)) s in all, results in $out" | tee -a "$summary"
exit "$failed"
