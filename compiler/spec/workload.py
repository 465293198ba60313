"""The step of a resolved spec, as the cost model takes it."""

from __future__ import annotations

from collections.abc import Mapping

from parcompile.cost.workload import Workload

from .values import Origin, Spec


def workload_of(spec: Spec) -> Workload:
    """The step of a resolved spec, as the DeepSpeed runtime executes it.

    Raises:
        ValueError: some rank has no token.
    """
    axes, training = spec.parallelism, spec.training
    if training.sequence_length < axes.cp:
        raise ValueError(f"sequence_length {training.sequence_length} < cp {axes.cp}")
    machine = spec.provenance.get("cluster.accelerator")
    return Workload(
        shape=spec.model.shape,
        nodes=spec.cluster.nodes,
        gpus_per_node=spec.cluster.gpus_per_node,
        accelerator=spec.cluster.accelerator,
        sequence_length=training.sequence_length,
        micro_batch=training.micro_batch_size,
        micro_batches=training.gradient_accumulation_steps,
        tp=axes.tp,
        cp=axes.cp,
        ep=axes.ep,
        expert_tp=axes.expert_tp,
        dp=axes.dp,
        pp=axes.pp,
        order=axes.order,
        cp_layout=axes.cp_layout.value,
        cp_implementation=axes.cp_implementation.value,
        cp_sizes=axes.hierarchical_cp_sizes,
        sequence_parallel=axes.sequence_parallel,
        recompute=training.activation_checkpointing,
        element_bytes=training.precision.bytes,
        keeps_gradients=_keeps_gradients(spec),
        gradient_bytes=training.gradient_accumulation_dtype.bytes,
        zero_stage=spec.zero_stage,
        vocab_divisible_by=axes.make_vocab_size_divisible_by,
        virtual_stages=axes.num_virtual_stages_per_pipeline_rank,
        micro_batch_group=axes.microbatch_group_size_per_virtual_pipeline_stage,
        balances_experts=bool(spec.model.hf_config.get("output_router_logits")),
        stage_layers=spec.stages,
        preset=spec.cluster.preset,
        names_machine=machine is not None and machine.origin is not Origin.DEFAULT,
    )


def _keeps_gradients(spec: Spec) -> bool:
    """See `Workload.keeps_gradients`."""
    training, section = spec.training, spec.deepspeed.get("zero_optimization")
    overlaps = isinstance(section, Mapping) and section.get("overlap_comm") is True
    return training.gradient_accumulation_dtype is training.precision and not overlaps
