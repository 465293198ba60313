#!/usr/bin/env bash
# Megatron-LM arguments: source this file, then pass "${MEGATRON_ARGS[@]}" to pretrain_gpt.py.
# plan "llama-3.1-405b-128k", 16384 ranks
# parcompile 0.1.0, spec sha256:727ac32decf53643c2b503a7cdc6248bc323e89be042364c0a56ddaf4f9268a3
# several ranks share the cores of a node
export OMP_NUM_THREADS=1
# kernels start in the order of their issue, so that tp and cp communication overlaps with computation (Megatron-LM asks for it before compute capability 10; FSDP2 must not have it)
export CUDA_DEVICE_MAX_CONNECTIONS=1
MEGATRON_ARGS=(
  --tensor-model-parallel-size 8
  --context-parallel-size 16
  --pipeline-model-parallel-size 16
  --expert-model-parallel-size 1
  --expert-tensor-parallel-size 8
  --sequence-parallel
  --cp-comm-type p2p
  --account-for-embedding-in-pipeline-split
  --account-for-loss-in-pipeline-split
  --use-distributed-optimizer
  --make-vocab-size-divisible-by 128
  --num-layers 126
  --hidden-size 16384
  --ffn-hidden-size 53248
  --num-attention-heads 128
  --max-position-embeddings 131072
  --vocab-size 128256
  --normalization RMSNorm
  --norm-epsilon 1e-05
  --disable-bias-linear
  --swiglu
  --position-embedding-type rope
  --rotary-base 500000
  --rotary-percent 1.0
  --use-rope-scaling
  --kv-channels 128
  --group-query-attention
  --num-query-groups 8
  --init-method-std 0.02
  --attention-dropout 0.0
  --hidden-dropout 0.0
  --untie-embeddings-and-output-weights
  --seq-length 131072
  --micro-batch-size 1
  --global-batch-size 128
  --eval-micro-batch-size 1
  --eval-global-batch-size 128
  --optimizer adam
  --lr 0.0003
  --weight-decay 0.1
  --adam-beta1 0.9
  --adam-beta2 0.95
  --adam-eps 1e-08
  --lr-decay-style constant
  --min-lr 0.0003
  --clip-grad 1.0
  --seed 1234
  --bf16
  --accumulate-allreduce-grads-in-fp32
  --recompute-granularity full
  --recompute-method uniform
  --recompute-num-layers 1
)
