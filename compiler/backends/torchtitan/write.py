"""torchtitan.toml: the parallel dims and the batch as torchtitan's configuration names them."""

from __future__ import annotations

import json

from parcompile.backends.header import header
from parcompile.backends.losses import Loss, order_loss, sequence_loss
from parcompile.layout.context_parallel import CpImplementation
from parcompile.layout.sequence import CpLayout
from parcompile.plan import Plan

TORCHTITAN_VERSION = "0.3.0"
"""Version of torchtitan whose `ParallelismConfig` and `TrainingConfig` were read."""

_ORDERS = (("tp", "cp", "dp", "pp"),)


def files(plan: Plan) -> dict[str, str]:
    """torchtitan.toml."""
    spec = plan.spec
    parallelism, training = spec.parallelism, spec.training
    tables: dict[str, dict[str, int | str | bool]] = {
        "parallelism": {
            "data_parallel_replicate_degree": 1,
            "data_parallel_shard_degree": parallelism.dp,
            "fsdp_reshard_after_forward": "always" if spec.zero_stage == 3 else "never",
            "context_parallel_degree": parallelism.cp,
            "tensor_parallel_degree": parallelism.tp,
            "enable_sequence_parallel": parallelism.sequence_parallel,
            "pipeline_parallel_degree": parallelism.pp,
            "expert_parallel_degree": parallelism.ep,
        },
        "training": {
            "local_batch_size": training.micro_batch_size,
            "global_batch_size": training.global_batch_size,
            "seq_len": training.sequence_length,
        },
    }
    if parallelism.cp > 1:
        tables["parallelism"]["context_parallel_load_balancer"] = "headtail"
    lines = header(plan, "Parallel dims for torchtitan: the [parallelism] and [training] of a job.")
    for name, table in tables.items():
        # Numbers, booleans and plain strings are written alike in JSON and TOML.
        lines += ["", f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    return {"torchtitan.toml": "\n".join(lines) + "\n"}


def losses(plan: Plan) -> list[Loss]:
    """What torchtitan does not do as the plan says."""
    spec, shape = plan.spec, plan.spec.model.shape
    parallelism = spec.parallelism
    found = order_loss(parallelism, "torchtitan", _ORDERS) + sequence_loss(spec, "torchtitan")
    if shape.num_key_value_heads % parallelism.tp:
        found.append(
            Loss(
                f"num_key_value_heads {shape.num_key_value_heads} on tp {parallelism.tp}",
                "torchtitan does not replicate kv heads",
                "choose a tp that divides them",
                fatal=True,
            )
        )
    if parallelism.pp > 1 and shape.tie_word_embeddings:
        found.append(Loss("tied embeddings with pp", "torchtitan refuses them", "pp 1", fatal=True))
    if len({len(stage.layers) for stage in spec.stages}) > 1 or parallelism.num_virtual_stages_per_pipeline_rank > 1:
        found.append(
            Loss(
                "pipeline stages", "torchtitan deals its layers to stages itself", "set its pipeline_parallel_* options"
            )
        )
    if parallelism.cp > 1 and parallelism.cp_layout is not CpLayout.ZIGZAG:
        found.append(
            Loss(
                f"cp_layout {parallelism.cp_layout.value}",
                "a file can name the load balancers headtail (zigzag) and, for flex attention, ptrr",
                "headtail is used: the same numbers up to the order of sums",
            )
        )
    if parallelism.cp > 1 and parallelism.cp_implementation is not CpImplementation.ALL_GATHER:
        found.append(
            Loss(
                f"cp_implementation {parallelism.cp_implementation.value}",
                "no option names it: torch gathers all keys",
                "all-gather is used: the same numbers, more memory for keys",
            )
        )
    if spec.zero_stage in (0, 1):
        found.append(
            Loss(
                f"zero.stage {spec.zero_stage}",
                "FSDP shards gradients and weights as well (fsdp_reshard_after_forward never: like stage 2)",
                "less memory, more communication; the numbers of a step are the same up to the order of sums",
            )
        )
    if shape.vocab_size != plan.tensors()[next(iter(plan.tensors()))][1].full_shape[0]:
        found.append(Loss("padded vocabulary", "torchtitan does not pad", "uneven shards of the embedding"))
    found.append(
        Loss("model, optimizer and data", "they are torchtitan's own configurations", "choose its model flavor")
    )
    return found
