"""gpt-neox's options of the layout."""

from __future__ import annotations

from collections.abc import Iterator

from parcompile.backends.losses import Loss, order_loss, sequence_loss
from parcompile.backends.reading import Draft, Source, UndecidedError
from parcompile.backends.table import Arguments, Entry, Part, Row
from parcompile.spec import Spec

_PP = ("parallelism", "pp")
ORDER = ("tp", "dp", "pp")
"""How ranks are laid out, innermost first (PipeModelDataParallelTopology)."""


def _write_stages(spec: Spec) -> Arguments:
    return {"pipe_parallel_size": spec.parallelism.pp, "pipe_partition_method": "type:transformer|mlp"}


def _read_stages(source: Source, draft: Draft) -> None:
    """0 stages are one, without DeepSpeed's pipeline engine."""
    try:
        stages = source.value("pipe_parallel_size", _PP)
    except UndecidedError as error:
        draft.leave_open(source, error, _PP)
        return
    draft.set(_PP, max(1, int(stages)), said=source.has("pipe_parallel_size"))


def _layout_losses(spec: Spec) -> Iterator[Loss]:
    parallelism = spec.parallelism
    for name, size in (("cp", parallelism.cp), ("ep", parallelism.ep)):
        if size > 1:
            yield Loss(f"{name} {size}", f"gpt-neox has no {name}", f"{name} 1", fatal=True)
    if parallelism.num_virtual_stages_per_pipeline_rank > 1:
        yield Loss("virtual stages", "DeepSpeed's pipeline has none", "one stage on each rank", fatal=True)
    ends = (parallelism.num_layers_in_first_pipeline_stage, parallelism.num_layers_in_last_pipeline_stage)
    counted = parallelism.account_for_embedding_in_pipeline_split or parallelism.account_for_loss_in_pipeline_split
    if parallelism.pp > 1 and (counted or any(one is not None for one in ends)):
        yield Loss("uneven stages", "gpt-neox gives every stage as many layers as another", "even ones", fatal=True)
    yield from order_loss(parallelism, "gpt-neox", (ORDER,))
    yield from sequence_loss(spec, "gpt-neox")


ROWS: tuple[Row, ...] = (
    Entry("model_parallel_size", ("parallelism", "tp")),
    Part(("pipe_parallel_size", "pipe_partition_method"), _write_stages, _read_stages, _layout_losses),
    Entry("sequence_parallel", ("parallelism", "sequence_parallel")),
    Entry("zero_optimization.stage", ("zero", "stage")),
)
"""The layout, in the order in which it is written."""
