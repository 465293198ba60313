"""What rules read of keys and layouts that DeepSpeed, Megatron-LM and the runtime do not take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from parcompile.backends import deepspeed
from parcompile.backends.deepspeed import (
    DECIDED_BY,
    FORBIDDEN,
    FORBIDDEN_ZERO,
    GATHERED,
    OWN_CHECKPOINTS,
    SWITCHED,
    first_stage,
    has_effect,
    reach,
)
from parcompile.backends.deepspeed.lax import is_on
from parcompile.diagnostics import Path
from parcompile.layout.groups import DENSE_AXES, Axis, expert_grid
from parcompile.layout.shards import keeps_places
from parcompile.model.catalogue import RUNTIME_FAMILIES, model_type
from parcompile.model.derived_rows import shared_inputs
from parcompile.model.families import added_families, family_of
from parcompile.model.layer_parts import ATTENTION, why_whole
from parcompile.model.layers import KeysAndValues
from parcompile.model.shape import ModelShape
from parcompile.rules.l_stages import stages_of
from parcompile.rules.w_world import dense_grid
from parcompile.spec.resolve import Resolution


def scaling(spec: Resolution) -> dict[str, Any]:
    """How gradients are averaged, as `refused_scaling` and `wrong_scale` ask for it."""
    factor, prescale = predivide_factor(spec), spec.if_given("deepspeed", "prescale_gradients") is True
    scatter = spec.if_given("deepspeed", "zero_optimization", "reduce_scatter") if prescale or factor != 1 else None
    return {"stage": spec.zero_stage, "reduce_scatter": scatter is not False, "prescale": prescale, "predivide": factor}


def predivide_factor(spec: Resolution) -> Any:
    """By what gradients are divided before they are reduced."""
    path = ("deepspeed", "gradient_predivide_factor")
    return spec.get(*path) if spec.given(*path) else 1


def wrong_scale(spec: Resolution) -> str | None:
    """By how much gradients come out wrong; None when they are right."""
    cp = spec.axis(Axis.CP)
    return deepspeed.wrong_scale(**scaling(spec), ranks=spec.axis(Axis.DP) * cp, cp=cp)


def fighting_keys(spec: Resolution) -> Iterator[tuple[Path, str, str, str]]:
    """Further DeepSpeed keys that fight the plan: what to say of each, what to write, and what decides it."""
    for name, owner in DECIDED_BY.items():
        if spec.given("deepspeed", name):
            yield ("deepspeed", name), f"{name} is decided by {owner}", f"set {owner} instead", owner
    for name, why in FORBIDDEN.items():
        if spec.given(*(path := ("deepspeed", *name.split(".")))):
            yield path, f"{name}: {why}", "remove it", ""
    for name, why in SWITCHED.items():
        path = ("deepspeed", *name.split("."))
        if is_on(name, spec.if_given(*path)):
            yield path[:2], f"{name.removesuffix('.enabled')}: {why}", "remove it", ""
    zero = spec.get("deepspeed", "zero_optimization")
    for key in zero if isinstance(zero, Mapping) else ():
        inner = ("deepspeed", "zero_optimization", key)
        is_idle = first_stage(key) == 3 and spec.zero_stage < 3  # it only has no effect there: Z003
        if key in FORBIDDEN_ZERO and spec.given(*inner) and not is_idle:
            setter, says, _ = FORBIDDEN_ZERO[key].partition(" sets it")
            hint = f"set {setter} instead" if says else "remove it"
            yield inner, f"{key}: {FORBIDDEN_ZERO[key]}", hint, "zero.stage" if key == "stage" else ""


def plan_overlaps(spec: Resolution) -> bool:
    """Whether the plan itself reduces gradients under backward."""
    if spec.zero_stage == 3:
        return True
    try:
        return replace(spec.work, overlap_comm=None).overlaps_gradients
    except ValueError:
        return False  # other rules say what is wrong


def idle_zero_keys(spec: Resolution) -> Iterator[tuple[Path, str]]:
    """Keys of zero_optimization that have no effect at the stage, and why."""
    stage, zero = spec.zero_stage, spec.get("deepspeed", "zero_optimization")
    for key in zero if isinstance(zero, Mapping) else ():
        by_runtime = stage == 3 and key in OWN_CHECKPOINTS
        if stage == 3 and key in GATHERED and zero[key] is True:
            continue
        if by_runtime or not has_effect(key, stage):
            why = OWN_CHECKPOINTS[key] if by_runtime else f"DeepSpeed reads it {reach(key)}"
            yield ("deepspeed", "zero_optimization", key), why


def refused_options(spec: Resolution) -> Iterator[tuple[Path, str]]:
    """Options for Megatron-LM that cannot be written as they stand, and why."""
    if not spec.given("backends", "megatron"):
        return
    # Only here: the parser's options are a large table.
    from parcompile.backends.megatron.read import refusal

    has_schedule, balances = spec.given("training", "lr_scheduler"), spec.given("training", "router", "aux_loss")
    for name, value in spec.get("backends", "megatron").items():
        if (why := refusal(name, value, has_schedule=has_schedule, balances=balances)) is not None:
            yield ("backends", "megatron", name), why


def foreign(spec: Resolution) -> tuple[str, str] | None:
    """Why the runtime does not inject a model, and the nearest that it does; None: it injects it."""
    family = spec.shape.model_type
    if spec.shape.user_module is not None or family in RUNTIME_FAMILIES:
        return None
    known = model_type(family)
    why = "" if known.reason is None else f": {known.reason.why}"
    if family in added_families():
        why = ": it comes from a plug-in, and nobody has compared it with one process"
    return why, "" if known.nearest is None else f"; the nearest type that it injects is {known.nearest}"


def refused_axes(spec: Resolution) -> Iterator[tuple[str, int, str]]:
    """Axes that the runtime does not run a family with, their sizes, and why."""
    for axis, why in family_of(spec.shape.model_type).refused_axes.items():
        if (size := spec.axis(Axis(axis))) > 1:
            yield axis, size, why


def vocabulary_modules(spec: Resolution) -> list[str]:
    """The modules of a user's model that have the rule "vocab"."""
    module = spec.shape.user_module
    return [] if module is None else [name for name, one in module.injection if one.kind == "vocab"]


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


class _Far(NamedTuple):
    """A layer that attends with the keys of another, on another stage; how many such there are, from which layer on."""

    layer: int
    here: int
    source: int
    there: int
    sharing: int
    first: int


def keys_of_another_stage(spec: Resolution) -> _Far | None:
    """The first layer that attends with the keys of a layer of another stage."""
    pp, shape = spec.axis(Axis.PP), spec.shape
    sources = _sources(shape) if pp > 1 and shape.kinds else []
    stages = stages_of(spec) if sources else ()
    stage_of = {layer: place for place, stage in enumerate(stages) for layer in stage.layers}
    for layer, source in sources if stage_of else ():
        if stage_of[layer] != stage_of[source]:
            first = min(number for _, number in sources)
            return _Far(layer, stage_of[layer], source, stage_of[source], len(sources), first)
    return None


def moved_experts(spec: Resolution) -> str:
    """How far other ranks lie apart in experts than in dense layers, where a rank holds experts of another stage."""
    ep, sizes = spec.axis(Axis.EP), {axis: spec.axis(axis) for axis in DENSE_AXES}
    if ep == 1 or spec.expert_tp is not None or (sizes[Axis.DP] * sizes[Axis.CP]) % ep:
        return ""  # rule X006 looks at experts with a tp of their own
    dense = dense_grid(spec)
    expert = expert_grid(dense, ep)
    return "; ".join(
        f"{axis} neighbours are {dense.stride(axis)} ranks apart in dense layers and {expert.stride(axis)} in experts"
        for axis in (Axis.TP, Axis.PP)
        if sizes[axis] > 1 and dense.stride(axis) != expert.stride(axis) and not keeps_places(dense, expert)
    )


def why_inputs_whole(spec: Resolution) -> str | None:
    """Why the inputs of matrices are not gathered again; None: those of some are."""
    if shared_inputs(spec.shape):
        return None
    return why_whole(spec.shape, frozenset({ATTENTION})) or "its attention and its MLPs need their input whole"
