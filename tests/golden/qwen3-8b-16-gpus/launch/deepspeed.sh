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
# signals go to every process of the launcher, which DeepSpeed's runner would leave running
set -m
deepspeed --num_gpus 16 --master_port "$master_port" --no_local_rank "$@" &
job=$! signalled=
trap 'signalled=1; kill -s HUP -- "-$job"' HUP
trap 'signalled=1; kill -s INT -- "-$job"' INT
trap 'signalled=1; kill -s TERM -- "-$job"' TERM
code=0
wait "$job" || code=$?
for ((waited = 0; waited < 3000; waited++)); do
  [ -n "$signalled" ] && kill -0 -- "-$job" 2>/dev/null && sleep 0.2 || break
done
exit "$code"
