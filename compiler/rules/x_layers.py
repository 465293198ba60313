"""Layers of different shapes: what the runtime does not run of them."""

from __future__ import annotations

from collections.abc import Iterator

from parcompile.diagnostics import Severity
from parcompile.layout.grid import Axis
from parcompile.layout.stages import stages_from_counts
from parcompile.model.layer_kind import KeysAndValues
from parcompile.model.shape import ModelShape
from parcompile.spec.resolve import Resolution

from .examples import SHARED_KEYS
from .places import also, model_path
from .registry import OTHER_TOOL, Finding, rule


@rule(
    "X007",
    "a stage ends between layers that share keys and values",
    """In Gemma 3n and Gemma 4 the last num_kv_shared_layers layers attend with the keys and values of earlier layers:
    those of the last layer of the same kind (sliding or full) before them. The runtime hands hidden states to
    the next stage, and no keys and values: these layers have to be on one stage with the layers whose keys and values
    they use.""",
    wrong={"model": {**SHARED_KEYS}, "parallelism": {"pp": 2}, "training": {"gradient_accumulation_dtype": "fp32"}},
    right={
        "model": {**SHARED_KEYS},
        "parallelism": {"pp": 2, "num_layers_in_first_pipeline_stage": 4},
        "training": {"gradient_accumulation_dtype": "fp32"},
    },
    severity=Severity.WARNING,
    targets=("runtime",),
    run_by=(OTHER_TOOL,),
)
def layers_share_keys_within_a_stage(spec: Resolution) -> Iterator[Finding]:
    """Fires for the first layer whose keys and values are on another stage."""
    pp, shape = spec.axis(Axis.PP), spec.shape
    if pp == 1 or not shape.kinds:
        return
    try:
        stages = stages_from_counts(spec.pipeline_split.counts(shape.num_hidden_layers))
    except ValueError:
        return  # rule L001 and its neighbours speak of it
    for layer, source in _sources(shape):
        here, there = (
            next(place for place, stage in enumerate(stages) if number in stage.layers) for number in (layer, source)
        )
        if here != there:
            first = min(number for _, number in _sources(shape))
            yield Finding(
                f"layer {layer} of stage {here} attends with the keys and values of layer {source}, which is on stage "
                f"{there} (num_kv_shared_layers {len(_sources(shape))})",
                ("parallelism", "pp"),
                help=f"let one stage hold layers {first} to {shape.num_hidden_layers - 1}: set "
                f"num_layers_in_first_pipeline_stage to {first} or less with pp 2, or pp to 1",
                related=also(spec, model_path(spec, "num_kv_shared_layers")),
            )
            return


def _sources(shape: ModelShape) -> list[tuple[int, int]]:
    """Each layer that has no keys of its own, and the layer whose keys it uses: the last with the same window."""
    own: dict[int | None, int] = {}
    found = []
    kinds = {layer: one for layers, one in shape.by_kind for layer in layers}
    for layer in range(shape.num_hidden_layers):
        one = kinds.get(layer, shape)
        if one.keys_and_values is KeysAndValues.OF_ANOTHER_LAYER:
            found.append((layer, own[one.sliding_window]))
        else:
            own[one.sliding_window] = layer
    return found


@rule(
    "X008",
    "kv heads of different layers are replicated by different numbers of ranks",
    """With fewer kv heads than tensor-parallel ranks, ranks hold the same heads and add up their gradients. The runtime
    has one kind of groups for that: layers that replicate their kv heads have to do so over the same number of
    ranks.""",
    wrong={
        "model": {**SHARED_KEYS, "attention_k_eq_v": True, "num_global_key_value_heads": 2},
        "parallelism": {"tp": 8},
    },
    right={
        "model": {**SHARED_KEYS, "attention_k_eq_v": True, "num_global_key_value_heads": 2},
        "parallelism": {"tp": 4},
    },
    severity=Severity.WARNING,
    targets=("runtime",),
    run_by=(OTHER_TOOL,),
)
def kv_heads_are_replicated_alike(spec: Resolution) -> Iterator[Finding]:
    """Fires for two counts below tp."""
    tp = spec.axis(Axis.TP)
    fewer = [heads for heads in spec.shape.kv_head_counts if heads < tp and tp % heads == 0]
    if len(fewer) > 1:
        counts, ranks = (" and ".join(map(str, values)) for values in (fewer, [tp // one for one in fewer]))
        yield Finding(
            f"kv heads {counts} on tp {tp}: {ranks} ranks hold the same heads",
            ("parallelism", "tp"),
            help=f"set tp to {fewer[0]} or less",
            related=also(spec, model_path(spec, "num_key_value_heads")),
        )
