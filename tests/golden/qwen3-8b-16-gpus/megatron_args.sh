#!/usr/bin/env bash
# Megatron-LM arguments: source this file, then pass "${MEGATRON_ARGS[@]}" to pretrain_gpt.py.
# plan "qwen3-8b, more tp than kv heads", 16 ranks
# parcompile 0.1.0, spec sha256:33d035573ed2fdd319541faa03f59f9627d220c9728683e863803d44a7886786
# several ranks share the cores of a node
export OMP_NUM_THREADS=1
# kernels start in the order of their issue, so that tp and cp communication overlaps with computation (Megatron-LM asks for it before compute capability 10; FSDP2 must not have it)
export CUDA_DEVICE_MAX_CONNECTIONS=1
MEGATRON_ARGS=(
  --tensor-model-parallel-size 16
  --context-parallel-size 1
  --pipeline-model-parallel-size 1
  --expert-model-parallel-size 1
  --expert-tensor-parallel-size 16
  --use-distributed-optimizer
  --make-vocab-size-divisible-by 128
  --num-layers 36
  --hidden-size 4096
  --ffn-hidden-size 12288
  --num-attention-heads 32
  --max-position-embeddings 40960
  --vocab-size 151936
  --normalization RMSNorm
  --norm-epsilon 1e-06
  --disable-bias-linear
  --qk-layernorm
  --swiglu
  --position-embedding-type rope
  --rotary-base 1000000
  --rotary-percent 1.0
  --kv-channels 128
  --group-query-attention
  --num-query-groups 8
  --init-method-std 0.02
  --attention-dropout 0.0
  --hidden-dropout 0.0
  --untie-embeddings-and-output-weights
  --seq-length 32768
  --micro-batch-size 1
  --global-batch-size 16
  --eval-micro-batch-size 1
  --eval-global-batch-size 16
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
)
