#!/usr/bin/env bash
# Starts a script under DeepSpeed's launcher.
# plan "llama-3-8b-64k", 32 ranks
# parcompile 0.1.0, spec sha256:b49a32f704fdb309f069d0228c98fdf06b4330f720a2fb17689e2db48c76052b
set -euo pipefail
if [ "$#" -eq 0 ]; then
  echo "usage: deepspeed.sh SCRIPT [ARGUMENTS]" >&2
  exit 2
fi
# several ranks share the cores of a node
export OMP_NUM_THREADS=1
# kernels start in the order of their issue, so that tp and cp communication overlaps with computation (Megatron-LM asks for it before compute capability 10; FSDP2 must not have it)
export CUDA_DEVICE_MAX_CONNECTIONS=1
here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
export DS_ENV_FILE="$here/deepspeed_env"
hostfile="${HOSTFILE:-$here/hostfile}"
if [ ! -f "$hostfile" ]; then
  echo "deepspeed.sh: there is no $hostfile: one line per node, NAME slots=8" >&2
  exit 2
fi
master_port="${MASTER_PORT:-29500}"
exec deepspeed --hostfile "$hostfile" --num_nodes 4 --num_gpus 8 --master_port "$master_port" --no_local_rank "$@"
