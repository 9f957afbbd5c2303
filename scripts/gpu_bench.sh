#!/usr/bin/env bash
# What needs an NVIDIA GPU: the tests marked gpu, compute-sanitizer on small shapes, and the benchmarks.
#
#   scripts/gpu_bench.sh [KERNELS]
#
# KERNELS is a directory of kernels compiled elsewhere, for a machine without TVM's compiler:
#   python tests/cuda_attention.py compile KERNELS sm_90a
#   python tests/cuda_rig.py KERNELS sm_90a
#   kvq bench attention --compile-only --cuda-arch sm_90a --kernels KERNELS
#   kvq bench decode llama-3-8b --random-weights --device cuda --context 131072 --compile-only --libraries KERNELS
# Results go to $OUT (default: the current directory). PYTHON names the interpreter, PEERS and STEP_PEERS the others,
# WORKERS the processes that run tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD/python${PYTHONPATH:+:$PYTHONPATH}"
python="${PYTHON:-python3}"
out="${OUT:-$PWD}"
kernels="${1:-$(mktemp -d)}"
export KVQ_KERNELS="$kernels"
failed=0
# without TVM's compiler only the tests of kernels that are compiled already can be collected
tests=(tests)
[[ -z "${1:-}" ]] || tests=(tests/test_cuda_{attention_gpu,kernels,experts,products}.py)

nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,clocks.max.mem --format=csv,noheader

echo "== tests"
"$python" -m pytest -n "${WORKERS:-0}" -q -m gpu -p no:cacheprovider "${tests[@]}" || failed=1

sanitizer="$(command -v compute-sanitizer || true)"
if [[ -n "$sanitizer" ]]; then
  for tool in memcheck racecheck; do
    echo "== compute-sanitizer $tool"
    "$sanitizer" --tool "$tool" --error-exitcode 9 --print-limit 5 --kernel-name regex=attention \
      "$python" tests/cuda_attention.py run "$kernels" | tee "$out/$tool.log" | tail -4 || failed=1
  done
fi

echo "== kvq bench attention"
"$python" -m kvq bench attention --kernels "$kernels" ${PEERS:+--peer "$PEERS"} --json >"$out/attention.json" || failed=1
"$python" -m kvq bench attention --kernels "$kernels" --kv int4 --heads 64 --json >"$out/attention_gqa8.json" || failed=1
"$python" -m kvq bench attention --kernels "$kernels" --kv int4 --head-dim 64 --json >"$out/attention_d64.json" || failed=1
"$python" - "$out"/attention*.json <<'END'
import json, sys

for path in sys.argv[1:]:
    text = open(path).read()
    if not text:
        continue
    data = json.loads(text)
    print(f"\n{path}: copy {data['copy_tb_per_s']:.2f} TB/s")
    for f in data["figures"]:
        error = "" if f["error"] is None else f"{f['error']:.0e}"
        print(f"{f['heads']:>10} {f['kv']:>14} {f['shape']:>12} {f['us']:8.1f} us {f['tb_per_s']:6.2f} TB/s {error}")
END

shapes=("$kernels"/llama-*.so)
if [[ -e "${shapes[0]}" ]]; then
  echo "== whole steps"
  common=(llama-3-8b --random-weights --device cuda --libraries "$kernels" --kv "${KV:-int4,none}")
  common+=(${STEP_PEERS:+--peer "$STEP_PEERS"})
  "$python" -m kvq bench products llama-3-8b --random-weights --libraries "$kernels" || failed=1
  "$python" -m kvq bench decode "${common[@]}" --context 1024,8192,32768,131072 --csv "$out/decode.csv" || failed=1
  "$python" -m kvq bench decode "${common[@]}" --context 2048,8192 --batch 16,64 --csv "$out/batches.csv" || failed=1
  "$python" -m kvq bench prefill "${common[@]}" --tokens 4096 --csv "$out/prefill.csv" || failed=1
fi
exit "$failed"
