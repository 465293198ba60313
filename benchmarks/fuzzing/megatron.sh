#!/bin/bash
NODES=${NNODES:-2}
TP=2; PP=$((TP * 1))
MODEL_ARGS=(--num-layers 4 --hidden-size 64 --num-attention-heads 8 --swiglu)
if [ "$NODES" -gt 1 ]; then EXTRA="--use-distributed-optimizer"; fi
for flag in --bf16 --sequence-parallel; do EXTRA="$EXTRA $flag"; done
torchrun --nproc_per_node 8 --nnodes $NODES pretrain_gpt.py ${MODEL_ARGS[@]} --seq-length 512 \
  --max-position-embeddings 512 --micro-batch-size 1 --global-batch-size 8 --lr 1e-4 --min-lr 1e-5 \
  --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP --train-iters 100 --lr-decay-style cosine \
  --normalization RMSNorm --disable-bias-linear --group-query-attention --num-query-groups 4 \
  --num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 2 --recompute-activations $EXTRA
