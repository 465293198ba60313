#!/usr/bin/env bash
# Starts a script under torchrun; run it once on every node.
# plan "llama-3-8b-64k", 32 ranks
# parcompile 0.1.0, spec sha256:b49a32f704fdb309f069d0228c98fdf06b4330f720a2fb17689e2db48c76052b
set -euo pipefail
if [ "$#" -eq 0 ]; then
  echo "usage: torchrun.sh SCRIPT [ARGUMENTS]" >&2
  exit 2
fi
# several ranks share the cores of a node
export OMP_NUM_THREADS=1
# kernels start in the order of their issue, so that tp and cp communication overlaps with computation (Megatron-LM asks for it before compute capability 10; FSDP2 must not have it)
export CUDA_DEVICE_MAX_CONNECTIONS=1
master_port="${MASTER_PORT:-29500}"
: "${NODE_RANK:?is not set: the index of this node, 0 to 3}"
: "${MASTER_ADDR:?is not set: the address of node 0}"
exec torchrun --nnodes 4 --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "$master_port" --nproc-per-node 8 "$@"
