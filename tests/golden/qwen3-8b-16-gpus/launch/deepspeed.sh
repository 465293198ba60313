#!/usr/bin/env bash
# Starts a script under DeepSpeed's launcher.
# plan "qwen3-8b, more tp than kv heads", 16 ranks
# parcompile 0.1.0, spec sha256:33d035573ed2fdd319541faa03f59f9627d220c9728683e863803d44a7886786
set -euo pipefail
if [ "$#" -eq 0 ]; then
  echo "usage: deepspeed.sh SCRIPT [ARGUMENTS]" >&2
  exit 2
fi
# several ranks share the cores of a node
export OMP_NUM_THREADS=1
# kernels start in the order of their issue, so that tp and cp communication overlaps with computation (Megatron-LM asks for it before compute capability 10; FSDP2 must not have it)
export CUDA_DEVICE_MAX_CONNECTIONS=1
master_port="${MASTER_PORT:-29500}"
set -m
deepspeed --num_gpus 16 --master_port "$master_port" --no_local_rank "$@" &
job=$! signalled= heard=1 code=0

# The first signal goes to the ranks, whose exit code the launcher hands on. One before there are any, or a second, goes
# to every process of the launcher: DeepSpeed's runner would leave them running.
hand_on() {
  local stat line fields pid ranks=()
  local -A parents=()
  for stat in /proc/[0-9]*/stat; do
    { read -r line <"$stat"; } 2>/dev/null || continue
    read -ra fields <<<"${line##*) }"
    parents[${line%% *}]=${fields[1]}
  done
  for pid in "${!parents[@]}"; do
    [ "${parents[${parents[$pid]}]:-}" != "$job" ] || ranks+=("$pid")
  done
  if [ -n "$signalled" ] || [ "${#ranks[@]}" -eq 0 ]; then ranks=("-$job"); fi
  signalled=1 heard=1
  kill -s "$1" -- "${ranks[@]}" || true
}
trap 'hand_on HUP' HUP
trap 'hand_on INT' INT
trap 'hand_on TERM' TERM
while [ -n "$heard" ]; do
  heard= code=0
  wait "$job" || code=$?
done
for ((waited = 0; waited < 3000; waited++)); do
  [ -n "$signalled" ] && kill -0 -- "-$job" 2>/dev/null && sleep 0.2 || break
done
# The launcher ends with -15 where a rank was ended by signal 15; a shell says 143.
[ "$code" -le 192 ] || code=$((384 - code))
exit "$code"
