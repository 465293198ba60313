"""Static bytes of a rank: what is held for the whole run. Activations come on top."""

from __future__ import annotations

from dataclasses import dataclass

from parcompile.layout.optimizer import ADAM_STATE_BYTES, MASTER_BYTES, padded_numel
from parcompile.layout.stages import Stage
from parcompile.spec import Spec

from .parameters import rank_parameters

LARGEST_BUCKET = 500_000_000
"""DeepSpeed's own default for reduce_bucket_size, in elements."""


@dataclass(frozen=True, slots=True)
class StaticMemory:
    """Bytes that a rank of one stage holds, as DeepSpeed's ZeRO-1 engine allocates them.

    Weights and the padding of the flattened group are in the type of the weights; the optimizer holds fp32 master
    weights and two fp32 moments of its shard of the padded group.
    """

    numel: int
    padded_numel: int
    shard_numel: int
    weight_bytes: int
    gradient_bytes: int
    master_bytes: int
    optimizer_bytes: int
    bucket_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        parts = (self.weight_bytes, self.gradient_bytes, self.master_bytes, self.optimizer_bytes, self.bucket_bytes)
        return sum(parts)


def static_memory(spec: Spec, stage: Stage | None = None) -> StaticMemory:
    """The static bytes of a rank of `stage`; left out, of the stage that holds most."""
    if stage is None:
        return max((static_memory(spec, one) for one in spec.stages), key=lambda memory: memory.total_bytes)
    numel = rank_numel(spec, stage)
    shards = spec.parallelism.zero_shards if spec.zero_stage >= 1 else 1
    padded = padded_numel(numel, shards)
    shard = padded // shards
    width, sum_width = spec.training.precision.bytes, spec.training.gradient_accumulation_dtype.bytes
    gradients, bucket = numel * sum_width, bucket_numel(spec) * width
    if keeps_both_gradients("deepspeed", width, sum_width, spec.zero_stage):
        gradients, bucket = padded * sum_width + numel * width, 0
    return StaticMemory(
        numel=numel,
        padded_numel=padded,
        shard_numel=shard,
        weight_bytes=padded * width,
        gradient_bytes=gradients,
        master_bytes=shard * MASTER_BYTES,
        optimizer_bytes=shard * ADAM_STATE_BYTES,
        bucket_bytes=bucket,
    )


def keeps_both_gradients(framework: str, weight_width: int, sum_width: int, zero_stage: int) -> bool:
    """Whether a gradient is held in the type of the weights and summed in fp32 beside it.

    DeepSpeed's BF16_Optimizer (runtime/bf16_optimizer.py), which fp32 sums of 16-bit gradients bring at ZeRO stage 1,
    keeps both between micro-batches, and has no reduce bucket.
    """
    return framework == "deepspeed" and zero_stage == 1 and weight_width < sum_width


def rank_numel(spec: Spec, stage: Stage) -> int:
    """Parameters on one rank of a stage."""
    return rank_parameters(
        spec.model.shape,
        stage,
        spec.parallelism.tp,
        ep=spec.parallelism.ep,
        vocab_divisible_by=spec.parallelism.make_vocab_size_divisible_by,
    )


def bucket_numel(spec: Spec) -> int:
    """The reduce bucket: no larger than the largest stage's parameters, since DeepSpeed allocates all of it."""
    return min(LARGEST_BUCKET, max(rank_numel(spec, stage) for stage in spec.stages))
