#!/usr/bin/env bash
# Megatron-LM arguments: source this file, then pass "${MEGATRON_ARGS[@]}" to pretrain_gpt.py.
# plan "gpt2-xl on one GPU", 1 ranks
# parcompile 0.1.0, spec sha256:39a84f94434dcf2e4c85cba1a42c87a351367682bc69e7d06491d01e7fb58e6b
# several ranks share the cores of a node
export OMP_NUM_THREADS=1
MEGATRON_ARGS=(
  --tensor-model-parallel-size 1
  --context-parallel-size 1
  --pipeline-model-parallel-size 1
  --expert-model-parallel-size 1
  --expert-tensor-parallel-size 1
  --use-distributed-optimizer
  --make-vocab-size-divisible-by 128
  --num-layers 48
  --hidden-size 1600
  --ffn-hidden-size 6400
  --num-attention-heads 25
  --max-position-embeddings 1024
  --vocab-size 50257
  --normalization LayerNorm
  --norm-epsilon 1e-05
  --position-embedding-type learned_absolute
  --kv-channels 64
  --init-method-std 0.02
  --attention-dropout 0.1
  --hidden-dropout 0.1
  --seq-length 1024
  --micro-batch-size 4
  --global-batch-size 32
  --eval-micro-batch-size 4
  --eval-global-batch-size 32
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
