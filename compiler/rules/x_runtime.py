"""What the runtime executes today. Other plans compile for other tools; the runtime refuses them."""

from __future__ import annotations

from collections.abc import Iterator

from parcompile.diagnostics import Fix, Safety, Severity
from parcompile.layout.groups import DENSE_AXES, Axis, Grid, expert_grid
from parcompile.layout.shards import keeps_places
from parcompile.model.catalogue import RUNTIME_FAMILIES, model_type
from parcompile.model.derived_rows import shared_inputs
from parcompile.model.families import added_families, family_of
from parcompile.model.layer_parts import ATTENTION, why_whole
from parcompile.model.layers import KeysAndValues
from parcompile.model.shape import ModelShape
from parcompile.spec.resolve import Resolution

from . import OTHER_TOOL, Finding, also, model_path, rule, settable
from .l_stages import stages_of


@rule("X002", severity=Severity.WARNING, targets=("runtime",), run_by=(OTHER_TOOL,))
def runtime_keeps_experts_in_their_stage(spec: Resolution) -> Iterator[Finding]:
    ep = spec.axis(Axis.EP)
    sizes = {axis: spec.axis(axis) for axis in DENSE_AXES}
    if ep == 1 or spec.expert_tp is not None or (sizes[Axis.DP] * sizes[Axis.CP]) % ep:
        return  # rule X006 looks at experts with a tp of their own
    dense = Grid.of(spec.order, sizes)
    expert = expert_grid(dense, ep)
    if not keeps_places(dense, expert):
        moved = [
            f"{axis} neighbours are {dense.stride(axis)} ranks apart in dense layers and "
            f"{expert.stride(axis)} in experts"
            for axis in (Axis.TP, Axis.PP)
            if sizes[axis] > 1 and dense.stride(axis) != expert.stride(axis)
        ]
        yield Finding(
            f"the order {'-'.join(spec.order)} with ep {ep}: {'; '.join(moved)}",
            ("parallelism", "order"),
            help="write the order tp-cp-ep-dp-pp",
        )


@rule("X004", severity=Severity.WARNING, targets=("runtime",), run_by=(OTHER_TOOL,))
def runtime_knows_the_family(spec: Resolution) -> Iterator[Finding]:
    family = spec.shape.model_type
    if spec.shape.user_module is None and family not in RUNTIME_FAMILIES:
        known = model_type(family)
        why = "" if known.reason is None else f": {known.reason.why}"
        if family in added_families():
            why = ": it comes from a plug-in, and nobody has compared it with one process"
        near = "" if known.nearest is None else f"; the nearest type that it injects is {known.nearest}"
        yield Finding(
            f"parcompile.runtime does not inject {family}{why}",
            model_path(spec, "model_type"),
            help=f"use the plan with another launcher{near}",
        )
        return
    for axis, why in family_of(family).refused_axes.items():
        size = spec.axis(Axis(axis))
        if size > 1:
            yield Finding(
                f"{axis} {size} with {family}: {why}",
                ("parallelism", axis),
                help=f"set {axis} to 1 and use the other axes",
            )
    yield from _window_on_one_side(spec)


def _window_on_one_side(spec: Resolution) -> Iterator[Finding]:
    """A sliding window that transformers' mask has and its attention has not, or the other way round."""
    shape = spec.shape
    family, window = family_of(shape.model_type), shape.attention.sliding_window
    kinds = spec.model_config.get("layer_types")
    unused = isinstance(kinds, list) and "sliding_attention" not in kinds
    if not family.window_only_in or window is None or window >= spec.sequence_length or unused:
        return
    without = "attention" if family.window_only_in == "mask" else "mask"
    yield Finding(
        f"sliding_window {window} < sequence_length {spec.sequence_length}: transformers' {shape.model_type} has the "
        f"window in its {family.window_only_in} and not in its {without}, so that its own attention kernels compute "
        "different numbers",
        model_path(spec, "sliding_window"),
        help=f"set sliding_window to null in the configuration, or sequence_length to {window} or less",
    )


@rule("X013")
def runtime_gathers_inputs_of_matrices_again(spec: Resolution) -> Iterator[Finding]:
    shape = spec.shape
    if spec.gather_inputs_again and not shared_inputs(shape):
        why = why_whole(shape, frozenset({ATTENTION}))
        whose = shape.model_type if shape.user_module is None else "a user module"
        message = f"gather_inputs_again with {whose}: {why or 'its attention and its MLPs need their input whole'}"
        yield settable(("training", "gather_inputs_again"), [False], message, "set it to false")


@rule("X010")
def sequence_parallelism_has_both_ends(spec: Resolution) -> Iterator[Finding]:
    module, needed = spec.shape.user_module, 1 if spec.shape.tie_word_embeddings else 2
    if module is None or not spec.sequence_parallel:
        return
    place = ("parallelism", "sequence_parallel")
    found = [name for name, one in module.injection if one.kind == "vocab"]
    if len(found) < needed:
        yield Finding(
            'sequence_parallel begins at the embedding and ends at the head: both need the rule "vocab", which '
            f"{' and '.join(found) or 'no module'} has",
            ("model", "injection"),
            help='give the embedding and the head the rule "vocab", or set sequence_parallel to false',
            related=also(spec, place),
            fixes=(Fix.setting(place, False, Safety.CHANGES_COST),),
        )


# Layers of different shapes: what the runtime does not run of them.


@rule("X007", severity=Severity.WARNING, targets=("runtime",), run_by=(OTHER_TOOL,))
def layers_share_keys_within_a_stage(spec: Resolution) -> Iterator[Finding]:
    pp, shape = spec.axis(Axis.PP), spec.shape
    if pp == 1 or not shape.kinds:
        return
    stages = stages_of(spec)
    for layer, source in _sources(shape) if stages else ():
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
        if one.attention.keys_and_values is KeysAndValues.OF_ANOTHER_LAYER:
            found.append((layer, own[one.attention.sliding_window]))
        else:
            own[one.attention.sliding_window] = layer
    return found


@rule("X008", severity=Severity.WARNING, targets=("runtime",), run_by=(OTHER_TOOL,))
def kv_heads_are_replicated_alike(spec: Resolution) -> Iterator[Finding]:
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
