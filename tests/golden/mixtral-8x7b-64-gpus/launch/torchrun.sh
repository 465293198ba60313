#!/usr/bin/env bash
# Starts a script under torchrun; run it once on every node.
# plan "mixtral-8x7b", 64 ranks
# parcompile 0.1.0, spec sha256:52888a869a4c0a19bcfda154c4186d7b8a0c8b6592201c311afb9e9c851697ea
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
: "${NODE_RANK:?is not set: the index of this node, 0 to 7}"
: "${MASTER_ADDR:?is not set: the address of node 0}"
exec torchrun --nnodes 8 --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "$master_port" --nproc-per-node 8 "$@"
