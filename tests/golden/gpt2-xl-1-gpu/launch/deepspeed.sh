#!/usr/bin/env bash
# Starts a script under DeepSpeed's launcher.
# plan "gpt2-xl on one GPU", 1 ranks
# parcompile 0.1.0, spec sha256:39a84f94434dcf2e4c85cba1a42c87a351367682bc69e7d06491d01e7fb58e6b
set -euo pipefail
if [ "$#" -eq 0 ]; then
  echo "usage: deepspeed.sh SCRIPT [ARGUMENTS]" >&2
  exit 2
fi
# several ranks share the cores of a node
export OMP_NUM_THREADS=1
master_port="${MASTER_PORT:-29500}"
# signals go to every process of the launcher, which DeepSpeed's runner would leave running
set -m
deepspeed --num_gpus 1 --master_port "$master_port" --no_local_rank "$@" &
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
