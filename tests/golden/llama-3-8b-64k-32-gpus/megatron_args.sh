#!/usr/bin/env bash
# Megatron-LM arguments: source this file, then pass "${MEGATRON_ARGS[@]}" to pretrain_gpt.py.
# plan "llama-3-8b-64k", 32 ranks
# parcompile 0.1.0, spec sha256:b49a32f704fdb309f069d0228c98fdf06b4330f720a2fb17689e2db48c76052b
# several ranks share the cores of a node
export OMP_NUM_THREADS=1
# kernels start in the order of their issue, so that tp and cp communication overlaps with computation (Megatron-LM asks for it before compute capability 10; FSDP2 must not have it)
export CUDA_DEVICE_MAX_CONNECTIONS=1
MEGATRON_ARGS=(
  --tensor-model-parallel-size 2
  --context-parallel-size 4
  --pipeline-model-parallel-size 1
  --expert-model-parallel-size 1
  --expert-tensor-parallel-size 2
  --sequence-parallel
  --cp-comm-type p2p
  --use-distributed-optimizer
  --make-vocab-size-divisible-by 128
  --num-layers 32
  --hidden-size 4096
  --ffn-hidden-size 14336
  --num-attention-heads 32
  --max-position-embeddings 65536
  --vocab-size 128256
  --normalization RMSNorm
  --norm-epsilon 1e-05
  --disable-bias-linear
  --swiglu
  --position-embedding-type rope
  --rotary-base 500000
  --rotary-percent 1.0
  --kv-channels 128
  --group-query-attention
  --num-query-groups 8
  --init-method-std 0.02
  --attention-dropout 0.0
  --hidden-dropout 0.0
  --untie-embeddings-and-output-weights
  --seq-length 65536
  --micro-batch-size 1
  --global-batch-size 64
  --eval-micro-batch-size 1
  --eval-global-batch-size 64
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
  --grad-reduce-in-bf16
  --recompute-granularity selective
)
