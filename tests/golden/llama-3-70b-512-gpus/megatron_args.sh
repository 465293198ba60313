#!/usr/bin/env bash
# Megatron-LM arguments: source this file, then pass "${MEGATRON_ARGS[@]}" to pretrain_gpt.py.
# plan "llama-3-70b", 512 ranks
# parcompile 0.1.0, spec sha256:ffd87292b026fd8b0e5fa2db12f6ff23b9105e27e171f9ddc4bc419210a58afc
# several ranks share the cores of a node
export OMP_NUM_THREADS=1
# kernels start in the order of their issue, so that tp and cp communication overlaps with computation (Megatron-LM asks for it before compute capability 10; FSDP2 must not have it)
export CUDA_DEVICE_MAX_CONNECTIONS=1
MEGATRON_ARGS=(
  --tensor-model-parallel-size 8
  --context-parallel-size 1
  --pipeline-model-parallel-size 4
  --expert-model-parallel-size 1
  --expert-tensor-parallel-size 8
  --sequence-parallel
  --use-distributed-optimizer
  --make-vocab-size-divisible-by 128
  --num-layers 80
  --hidden-size 8192
  --ffn-hidden-size 28672
  --num-attention-heads 64
  --max-position-embeddings 8192
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
  --seq-length 8192
  --micro-batch-size 1
  --global-batch-size 512
  --eval-micro-batch-size 1
  --eval-global-batch-size 512
  --train-iters 100000
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
  --recompute-granularity selective
)
