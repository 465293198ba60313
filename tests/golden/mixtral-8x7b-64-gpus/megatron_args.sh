#!/usr/bin/env bash
# Megatron-LM arguments: source this file, then pass "${MEGATRON_ARGS[@]}" to pretrain_gpt.py.
# plan "mixtral-8x7b", 64 ranks
# parcompile 0.1.0, spec sha256:52888a869a4c0a19bcfda154c4186d7b8a0c8b6592201c311afb9e9c851697ea
# several ranks share the cores of a node
export OMP_NUM_THREADS=1
# kernels start in the order of their issue, so that tp and cp communication overlaps with computation (Megatron-LM asks for it before compute capability 10; FSDP2 must not have it)
export CUDA_DEVICE_MAX_CONNECTIONS=1
MEGATRON_ARGS=(
  --tensor-model-parallel-size 4
  --context-parallel-size 1
  --pipeline-model-parallel-size 1
  --expert-model-parallel-size 8
  --expert-tensor-parallel-size 4
  --sequence-parallel
  --use-distributed-optimizer
  --make-vocab-size-divisible-by 128
  --num-layers 32
  --hidden-size 4096
  --ffn-hidden-size 14336
  --num-attention-heads 32
  --max-position-embeddings 32768
  --vocab-size 32000
  --normalization RMSNorm
  --norm-epsilon 1e-05
  --disable-bias-linear
  --swiglu
  --position-embedding-type rope
  --rotary-base 1000000
  --rotary-percent 1.0
  --num-experts 8
  --moe-ffn-hidden-size 14336
  --moe-router-topk 2
  --moe-router-load-balancing-type none
  --moe-aux-loss-coeff 0.0
  --moe-router-score-function softmax
  --kv-channels 128
  --group-query-attention
  --num-query-groups 8
  --init-method-std 0.02
  --attention-dropout 0.0
  --hidden-dropout 0.0
  --untie-embeddings-and-output-weights
  --seq-length 8192
  --micro-batch-size 1
  --global-batch-size 256
  --eval-micro-batch-size 1
  --eval-global-batch-size 256
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
