#!/usr/bin/env bash
# Starts a script under DeepSpeed's launcher.
# plan "gpt2-xl on one GPU", 1 ranks
# parcompile 0.1.0, spec sha256:dab0e7ef1efa3e3d08d062e6fc8740ca4c726d841bb7cb0dc02c78c2bd8cf931
set -euo pipefail
if [ "$#" -eq 0 ]; then
  echo "usage: deepspeed.sh SCRIPT [ARGUMENTS]" >&2
  exit 2
fi
# several ranks share the cores of a node
export OMP_NUM_THREADS=1
master_port="${MASTER_PORT:-29500}"
exec deepspeed --num_gpus 1 --master_port "$master_port" --no_local_rank "$@"
