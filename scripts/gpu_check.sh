#!/usr/bin/env bash
# All that needs a GPU, in one go under nine minutes: tests, compute-sanitizer over a reduced set, benchmarks.
#
#     scripts/gpu_check.sh [folder for the results]      # default $OUT, else build/gpu_check
#
# Every part has a limit of its own and writes its own file; a part that fails does not keep the next from running.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-${OUT:-build/gpu_check}}
mkdir -p "$out"
began=$SECONDS
export PYTHONUNBUFFERED=1 PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}"
export PREFIXKIT_CACHE=${PREFIXKIT_CACHE:-$(mktemp -d)}
python=${PYTHON:-python3}
summary="$out/summary.txt"
: >"$summary"
failed=0

# part NAME SECONDS COMMAND...: run it, at most that long, into NAME.log.
part() {
    local name=$1 limit=$2 start=$SECONDS code
    shift 2
    timeout "$limit" "$@" >"$out/$name.log" 2>&1
    code=$?
    [ "$code" -eq 0 ] || failed=1
    echo "$name: exit $code, $((SECONDS - start)) s; $(tail -n 1 "$out/$name.log")" | tee -a "$summary"
}

"$python" -c 'import prefixkit.attention.ops
from prefixkit.attention.backend import facts
for name, value in facts(): print(f"{name}: {value}")' | tee "$out/env.txt"

# The tests in several processes where pytest-xdist is there: they share the GPU well.
workers=$("$python" -c 'import xdist; print("-n 8")' 2>/dev/null || true)
# shellcheck disable=SC2086
part tests "${TESTS_SECONDS:-200}" "$python" -m pytest tests/gpu -q --durations=5 --tb=short $workers ${TESTS_OPTIONS:-}

# Without the caching allocator memcheck sees the bounds of every tensor, and initcheck what was never written.  API errors are
# not reported: NVIDIA's own Python bindings ask the driver for functions that it may not have.
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
if [ -x "$sanitizer" ]; then
    for tool in memcheck racecheck synccheck initcheck; do
        part "sanitizer-$tool" "${SANITIZER_SECONDS:-45}" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
            "$sanitizer" --tool "$tool" --error-exitcode 9 --report-api-errors no --kernel-name-exclude kernel_substring=at:: \
            "$python" scripts/sanitizer_set.py
    done
else
    echo "compute-sanitizer is not installed" | tee -a "$summary"
fi

part launch 90 "$python" benchmarks/launch.py --out "$out/launch.json"
if [ -f benchmarks/attention.py ]; then
    part attention "${ATTENTION_SECONDS:-150}" "$python" benchmarks/attention.py --out "$out/attention.json" ${ATTENTION_OPTIONS:-}
fi
echo "$((SECONDS - began)) s in all, results in $out" | tee -a "$summary"
exit "$failed"
