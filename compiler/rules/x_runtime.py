"""What the runtime executes today. Other plans compile for other tools; the runtime refuses them."""

from __future__ import annotations

from collections.abc import Iterator

from parcompile.diagnostics import Severity
from parcompile.layout.groups import DENSE_AXES, Axis, Grid, expert_grid
from parcompile.layout.shards import keeps_places
from parcompile.model.derived_rows import shared_inputs
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


@rule("X013")
def runtime_gathers_inputs_of_matrices_again(spec: Resolution) -> Iterator[Finding]:
    shape = spec.shape
    if spec.gather_inputs_again and not shared_inputs(shape):
        why = why_whole(shape, frozenset({ATTENTION}))
        whose = shape.model_type if shape.user_module is None else "a user module"
        message = f"gather_inputs_again with {whose}: {why or 'its attention and its MLPs need their input whole'}"
        yield settable(("training", "gather_inputs_again"), [False], message, "set it to false")


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
