"""What expressions of `rules.json` read beside the values of a spec: facts about it by their names."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from parcompile.backends.deepspeed import (
    DECIDED_BY,
    FORBIDDEN,
    FORBIDDEN_ZERO,
    GATHERED,
    NO_NVME,
    OWN_CHECKPOINTS,
    first_stage,
    has_effect,
    reach,
    refusal,
    refused_scaling,
    wrong_scale,
)
from parcompile.cost.step import timing
from parcompile.cost.workload import Workload
from parcompile.diagnostics import Path, closest
from parcompile.layout.groups import DENSE_AXES, Axis, Grid, divisors, expert_grid
from parcompile.layout.sequence import CpImplementation, CpLayout
from parcompile.layout.shards import expert_rows, keeps_places, shared_tokens
from parcompile.machines import PresetError, accelerators, is_preset_file
from parcompile.model.blocks.experts import router_biases
from parcompile.model.catalogue import CORRECTED, RUNTIME_FAMILIES, model_type, router_scores
from parcompile.model.derived_rows import dense_mlps, parameter_table, shared_inputs
from parcompile.model.families import FAMILIES, added_families, family_of
from parcompile.model.family import by_type
from parcompile.model.hf_config import ModelConfigError
from parcompile.model.key_types import misspelt, turned_width
from parcompile.model.layer_parts import ATTENTION, parts_of, why_whole
from parcompile.model.layers import KeysAndValues
from parcompile.model.shape import ModelShape
from parcompile.spec import OPTIMIZER_KEYS
from parcompile.spec.rampup import MOST_INCREMENTS, RampupBatchSize
from parcompile.spec.resolve import Resolution
from parcompile.spec.resolve.training import AUTO
from parcompile.spec.values import workload_of

from . import layout_change, listed, model_path, nearest_divisors, nearest_multiples
from .context import exchange, named, possible_sizes, why_no_levels
from .h_memory import estimated, workload
from .l_stages import stages_of, stages_without_choice, uneven_stages
from .t_tensor import fixes_of_tp, groups_of_heads, legal_tp, parts_that_tp_divides
from .w_world import leaving_experts, leaving_groups, timed, traffic


def _length_divisor(spec: Resolution) -> int:
    """What the sequence length has to be a multiple of, for cp and sequence parallelism together."""
    cp, tp = spec.axis(Axis.CP), spec.axis(Axis.TP)
    chunks = spec.cp_layout.chunks_per_rank if cp > 1 else 1
    return cp * (math.lcm(chunks, tp) if spec.sequence_parallel else chunks)


def _stride_of_cp(spec: Resolution) -> int:
    """Ranks from one of a cp group to the next."""
    order = spec.order
    return math.prod(spec.axis(axis) for axis in DENSE_AXES if order.index(axis) < order.index(Axis.CP))


def _starts_kernels_in_turn(spec: Resolution) -> bool:
    machine = accelerators().get(spec.cluster.accelerator)  # none, where a file that cannot be used is named
    return machine is not None and machine.starts_kernels_in_turn


def _experts_keep_places(spec: Resolution) -> bool:
    dense = Grid.of(spec.order, {axis: spec.axis(axis) for axis in DENSE_AXES})
    return keeps_places(dense, expert_grid(dense, spec.axis(Axis.EP), spec.expert_tp))


def _recomputed(spec: Resolution) -> list[str]:
    given = spec.activation_checkpointing
    return [given] if isinstance(given, str) else list(given)


def _words_of_stages(spec: Resolution) -> list[str] | None:
    given = spec.get("training", "activation_checkpointing")
    return given if isinstance(given, list) else None


def _a_word_for_each_stage(spec: Resolution) -> list[str]:
    """As many of the words as there are stages; the last one stands for those that are lacking."""
    given, pp = spec.get("training", "activation_checkpointing"), spec.axis(Axis.PP)
    return [*given, *[given[-1]] * (pp - len(given))][:pp]


def _why_recomputed_whole(spec: Resolution) -> str | None:
    """Why parts of layers that are to be recomputed cannot be told apart."""
    parts = frozenset(part for word in _recomputed(spec) for part in parts_of(word))
    return why_whole(spec.shape, parts) if parts else None


# What tensor parallelism divides.


class _Uncut(NamedTuple):
    """Something that tp does not divide: how it is told, its size, what tp has to divide, and where it stands."""

    told: str
    size: int
    each: str
    place: str


def _unit_of_kv_heads(spec: Resolution) -> int:
    """The kv heads, or pairs of them, that tp neither divides nor is a multiple of; the first where there are none."""
    tp, units = spec.axis(Axis.TP), spec.shape.kv_units
    return next((one for one in units if one % tp and tp % one), units[0])


def _uncut_widths(spec: Resolution) -> Iterator[_Uncut]:
    shape, tp = spec.shape, spec.axis(Axis.TP)
    if shape.user_module is not None:
        return  # rule T011 looks at the module's own weights
    experts, widths = FAMILIES[shape.model_type].experts, []
    if shape.dense(range(shape.num_hidden_layers)):
        widths.append((experts.dense_width[0] if experts else "intermediate_size", shape.intermediate_size))
    if shape.moe is not None and spec.expert_tp is None:  # rule M005 looks at others
        widths.append((experts.width[0] if experts else "moe_intermediate_size", shape.moe.intermediate_size))
    for name, width in widths:
        if width % tp:
            yield _Uncut(f"{name} {width}", width, f"{name} {width}", ".".join(model_path(spec, name)))
    for one in parts_that_tp_divides(shape):
        if one.size % tp:
            yield _Uncut(one.told, one.size, str(one.size), ".".join(model_path(spec, one.key)))
            return


def _uncut_groups(spec: Resolution) -> Iterator[_Uncut]:
    for one in filter(None, (part.dealt() for part in spec.shape.parts)):
        if one.size % spec.axis(Axis.TP):
            each = f"the {one.size} {one.each}"
            yield _Uncut(one.told, one.size, each, ".".join(model_path(spec, one.key)))


# Memory and stages.


def _waste(spec: Resolution, switch: str) -> Iterator[tuple[int, float, float]]:
    """Tokens of a micro-batch with which a switch that is to save memory does not, and the peak with and without it."""
    work = workload(spec)
    if not getattr(work, switch) or (switch == "tiled_mlp" and not dense_mlps(work.shape)):
        return
    off: dict[str, Any] = {switch: False}
    taken, without = (estimated(one).peak.total_bytes for one in (work, replace(work, **off)))
    if without < taken or (switch == "tiled_mlp" and work.mlp_tiles == 1):
        yield work.local_tokens, taken, without


def _idle_gathers(spec: Resolution) -> Iterator[Workload]:
    """The step, where it keeps no gathered inputs anyway that could be gathered again."""
    work = workload(spec)
    words = [replace(work, recompute=word) for word in work.recompute_words]
    parts = shared_inputs(work.shape)
    if work.gathers_inputs and parts and not any(one.gathers_again(part) for one in words for part in parts):
        yield work


def _cut_modules(spec: Resolution) -> list[int]:
    """The layers with which stages begin within a module of several layers."""
    return [one.layers.start for one in stages_of(spec) if one.layers.start % spec.shape.stack.layers_per_module]


def _stages_of_modules(spec: Resolution) -> list[int]:
    """Numbers of stages, up to those of the spec, over which whole modules divide."""
    whole = spec.shape.num_hidden_layers // spec.shape.stack.layers_per_module
    return [pp for pp in divisors(whole) if pp <= spec.axis(Axis.PP)]


# Batches.


def _wrong_groups(spec: Resolution, steps: int | None = None) -> str | None:
    """Why so many micro-batches do not go through a pipeline in groups; None: they do, or there are no groups."""
    group, pp = spec.microbatch_group_size, spec.axis(Axis.PP)
    if group is None or pp == 1:
        return None
    steps = steps or spec.gradient_accumulation_steps
    if not pp <= group <= steps:
        return f"groups of {group} micro-batches: {group} is not between pp {pp} and the {steps} micro-batches"
    rest = steps % group
    if 0 < rest < pp:
        return f"{steps} micro-batches in groups of {group}: {steps} % {group} = {rest} is neither 0 nor pp {pp}"
    return None


def _near_groups(spec: Resolution) -> list[int]:
    """Every divisor of the micro-batches that is no smaller than pp makes whole groups: the two that are next."""
    group, sizes = spec.microbatch_group_size or 0, divisors(spec.gradient_accumulation_steps)
    return sorted((one for one in sizes if one >= spec.axis(Axis.PP)), key=lambda one: (abs(one - group), one))[:2]


def _ramp(spec: Resolution) -> RampupBatchSize | None:
    """How the batch grows, where that is in whole increments."""
    ramp = spec.rampup_batch_size
    return ramp if ramp is not None and ramp.fits(spec.global_batch_size) else None


def _end_of_warmup(spec: Resolution) -> int | None:
    """The step of a batch that grows after which the warm-up of the schedule is over."""
    ramp, schedule, full = _ramp(spec), spec.lr_scheduler, spec.global_batch_size
    return None if ramp is None or schedule is None else ramp.steps_until(schedule.warmup_steps * full, full)


def _increments(spec: Resolution) -> str:
    """Increments with which a batch grows in whole steps."""
    every = divisors(spec.global_batch_size - (0 if spec.rampup_batch_size is None else spec.rampup_batch_size.start))
    whole = [one for one in every if one % (spec.micro_batch_size * spec.axis(Axis.DP)) == 0]
    return listed((whole or every)[:3])


def _wrong_batch(spec: Resolution) -> tuple[str, str] | None:
    """What is wrong with the first batch of a ramp that ranks or pipelines cannot share, and what to write."""
    ramp, micro, dp = _ramp(spec), spec.micro_batch_size, spec.axis(Axis.DP)
    for _, samples, batch in ramp.sizes(spec.global_batch_size) if ramp else ():
        where = f"from sample {samples:,} on the batch is {batch}"
        if batch % (micro * dp):
            message = f"{where}: {batch} / (micro {micro} · dp {dp}) = {batch} / {micro * dp} is not whole"
            return message, f"write a start and an increment that are multiples of {micro * dp}"
        if (wrong := _wrong_groups(spec, batch // (micro * dp))) is not None:
            whole = micro * dp * (spec.microbatch_group_size or 1)
            return f"{where}: {wrong}", f"use a start and an increment that are multiples of {whole}"
    return None


# Schedules and optimizers.

_UNITS = ("steps", "ratio", "samples", "tokens")


@dataclass(frozen=True, slots=True)
class _End:
    """Where a schedule ends, as it counts steps, and what says so; and its warm-up, as it is given."""

    steps: int | None
    place: str
    said: str
    key: str
    warmup: str

    @property
    def shorter(self) -> int:
        """Steps of a warm-up that is over by then: DeepSpeed has two or more."""
        return max(2, (self.steps or 0) // 10)


def _end_of_schedule(spec: Resolution) -> _End | None:
    schedule, path = spec.lr_scheduler, ("training", "lr_scheduler")
    if schedule is None:
        return None
    steps, counted = schedule.end(spec.get("training", "train_steps")), schedule.total_steps is None
    place = "training.train_steps" if counted else "training.lr_scheduler.total_steps"
    full, said = spec.global_batch_size, f"{place.rpartition('.')[2]} {steps}"
    if (ramp := _ramp(spec)) is not None and steps is not None and counted:
        steps = ramp.samples_after(steps, full) // full  # as the schedule counts them
        said = f"the {steps} global batches of {said}"
    key = next((key for unit in _UNITS if spec.given(*path, key := f"warmup_{unit}")), "warmup_steps")
    return _End(steps, place, said, key, "" if key == "warmup_steps" else f"{key} {spec.get(*path, key)}: ")


def _settings_of_others(spec: Resolution) -> Iterator[tuple[str, str]]:
    """Settings that are given and that the optimizer does not have, with those that have them."""
    known = OPTIMIZER_KEYS[str(spec.get("training", "optimizer", "type"))]
    for key in dict.fromkeys(key for keys in OPTIMIZER_KEYS.values() for key in keys):
        if key not in known and spec.given("training", "optimizer", key):
            yield key, ", ".join(name for name, keys in OPTIMIZER_KEYS.items() if key in keys)


def _rope(spec: Resolution) -> tuple[Any, Any]:
    """Base and kind of rotary positions, as a configuration has them: transformers 5 keeps both in rope_parameters."""
    rope = spec.model_config.get("rope_parameters") or spec.model_config
    scaling = rope.get("rope_scaling") or rope
    return rope.get("rope_theta", "of the family"), scaling.get("rope_type") or scaling.get("type") or "none"


def _odd_width(spec: Resolution) -> tuple[str, int, str] | None:
    """The key and the odd width of each head that rotary positions turn whole, and where it stands."""
    found = turned_width(spec.model_config, None if spec.shape.attention.projections else spec.shape.head_dim)
    if found is None or found[1] % 2 == 0:
        return None
    return *found, ".".join(model_path(spec, found[0], "num_attention_heads"))


def _levelled(spec: Resolution) -> CpImplementation:
    """The implementation whose two levels are spoken of."""
    name = spec.named_implementation
    return CpImplementation.USP if name == AUTO else CpImplementation(name)


# The model and the machine.

_SHARED = (
    "model_type hidden_size num_hidden_layers num_attention_heads intermediate_size vocab_size max_position_embeddings "
    "tie_word_embeddings initializer_range num_labels"
)
_KEYS = by_type("keys")
"""What the configuration class of each family reads beside the keys that all read."""


def _read_config(spec: Resolution) -> Mapping[str, Any]:
    """The configuration that a file of the spec holds; none where rule S003 says what is wrong with it."""
    if "hf_config" in spec.get("model"):
        with suppress(ModelConfigError):
            return spec.model_config
    return {}


def _misspelt_keys(spec: Resolution) -> list[tuple[str, str]]:
    """Keys of it that its class does not read, each with the one that was meant."""
    config = _read_config(spec)
    return sorted(misspelt(str(config.get("model_type")), config)) if config else []


def _is_quantized(spec: Resolution) -> bool:
    config = _read_config(spec)
    return bool(config) and "quantization_config" in {*config, *(spec.whole_config or ())}


def _unread_dimensions(spec: Resolution) -> Iterator[Path]:
    """Where a model is written out: keys that its family does not read."""
    given = spec.get("model")
    family = str(spec.get("model", "model_type")) if "model_type" in given and "hf_config" not in given else ""
    for key in given if family in _KEYS else ():
        if spec.given("model", key) and key not in f"{_SHARED} {_KEYS[family]}".split():
            yield "model", key


def _unusable_machine(spec: Resolution) -> Iterator[tuple[str, str | None]]:
    """Why the file that describes the accelerator cannot be used, and the preset that may have been meant."""
    name = spec.get("cluster", "accelerator")
    if not isinstance(name, str) or not is_preset_file(name):
        return
    try:
        spec.accelerator_preset(name)
    except PresetError as error:
        stem = name.removesuffix(".json")
        near = closest(stem, list(accelerators()))
        yield str(error), next((one for one in accelerators() if len(stem) > 2 and one.startswith(stem)), near)


def _share_of_experts(spec: Resolution) -> float:
    """The part of a step that takes experts' messages."""
    step = timing(timed(spec)).step
    return step.expert / step.seconds


# Experts.


def _near_ep(spec: Resolution) -> tuple[int, ...]:
    """Other sizes of ep. The experts that give back what they take are dealt too."""
    moe = spec.shape.moe
    counts = () if moe is None else filter(None, (moe.num_experts, moe.num_identities))
    return nearest_divisors(spec.axis(Axis.EP), *counts, count=4)


def _tokens_of_rank(spec: Resolution) -> int:
    """The tokens of a micro-batch that a rank sends to experts."""
    tokens = spec.micro_batch_size * spec.sequence_length // spec.axis(Axis.CP)
    return shared_tokens(tokens, spec.axis(Axis.TP), 0)[1]


def _rows_of_expert(spec: Resolution) -> int | None:
    """Of these those that one expert takes at most; None: as many as choose it."""
    moe, factor = spec.shape.moe, spec.if_given("training", "router", "expert_capacity")
    if moe is None or factor is None:
        return None
    return expert_rows(factor, _tokens_of_rank(spec), moe.num_experts_per_token, moe.num_experts)


def _sharded_biases(spec: Resolution) -> Iterator[str]:
    """Biases of routers that are parameters and that a plan moves, where ZeRO shards parameters."""
    if spec.zero_stage == 3 and spec.given("training", "router", "bias_update_rate"):
        yield from router_biases(row.name for row in parameter_table(spec.shape))


# What DeepSpeed, Megatron-LM and the runtime do not take.


def _scaling(spec: Resolution) -> dict[str, Any]:
    """How gradients are averaged, as `refused_scaling` and `wrong_scale` ask for it."""
    factor, prescale = _predivide_factor(spec), spec.if_given("deepspeed", "prescale_gradients") is True
    scatter = spec.if_given("deepspeed", "zero_optimization", "reduce_scatter") if prescale or factor != 1 else None
    return {
        "stage": spec.zero_stage,
        "reduce_scatter": scatter is not False,
        "prescale": prescale,
        "predivide": factor,
    }


def _predivide_factor(spec: Resolution) -> Any:
    path = ("deepspeed", "gradient_predivide_factor")
    return spec.get(*path) if spec.given(*path) else 1


def _wrong_scale(spec: Resolution) -> str | None:
    cp = spec.axis(Axis.CP)
    return wrong_scale(**_scaling(spec), ranks=spec.axis(Axis.DP) * cp, cp=cp)


def _fighting_keys(spec: Resolution) -> Iterator[tuple[Path, str, str, str]]:
    """Further DeepSpeed keys that fight the plan: what to say of each, what to write, and what decides it."""
    for key in spec.get("deepspeed"):
        path, owner = ("deepspeed", key), DECIDED_BY.get(key, "")
        if owner and spec.given(*path):
            yield path, f"{key} is decided by {owner}", f"set {owner} instead", owner
        elif key in FORBIDDEN and spec.given(*path):
            yield path, f"{key}: {FORBIDDEN[key]}", "remove it", ""
    zero = spec.get("deepspeed", "zero_optimization")
    for key in zero if isinstance(zero, Mapping) else ():
        inner = ("deepspeed", "zero_optimization", key)
        is_idle = first_stage(key) == 3 and spec.zero_stage < 3  # it only has no effect there: Z003
        if key in FORBIDDEN_ZERO and spec.given(*inner) and not is_idle:
            setter, says, _ = FORBIDDEN_ZERO[key].partition(" sets it")
            hint = f"set {setter} instead" if says else "remove it"
            yield inner, f"{key}: {FORBIDDEN_ZERO[key]}", hint, "zero.stage" if key == "stage" else ""


def _paths_of_auto(node: object, path: Path = ("deepspeed",)) -> Iterator[Path]:
    """Where DeepSpeed would be handed the word "auto" as it is."""
    if node == "auto":
        yield path
    elif isinstance(node, Mapping):
        for key, value in node.items():
            if refusal((*path[1:], key)) is None:
                yield from _paths_of_auto(value, (*path, key))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _paths_of_auto(value, (*path, index))


def _plan_overlaps(spec: Resolution) -> bool:
    """Whether the plan itself reduces gradients under backward."""
    if spec.zero_stage == 3:
        return True
    try:
        return replace(workload_of(spec.spec()), overlap_comm=None).overlaps_gradients
    except ValueError:
        return False  # other rules say what is wrong


def _idle_zero_keys(spec: Resolution) -> Iterator[tuple[Path, str]]:
    """Keys of zero_optimization that have no effect at the stage, and why."""
    stage, zero = spec.zero_stage, spec.get("deepspeed", "zero_optimization")
    for key in zero if isinstance(zero, Mapping) else ():
        by_runtime = stage == 3 and key in OWN_CHECKPOINTS
        if stage == 3 and key in GATHERED and zero[key] is True:
            continue
        if by_runtime or not has_effect(key, stage):
            why = OWN_CHECKPOINTS[key] if by_runtime else f"DeepSpeed reads it {reach(key)}"
            yield ("deepspeed", "zero_optimization", key), why


def _refused_options(spec: Resolution) -> Iterator[tuple[Path, str]]:
    """Options for Megatron-LM that cannot be written as they stand, and why."""
    if not spec.given("backends", "megatron"):
        return
    # Only here: the parser's options are a large table.
    from parcompile.backends.megatron.read import refusal

    has_schedule, balances = spec.given("training", "lr_scheduler"), spec.given("training", "router", "aux_loss")
    for name, value in spec.get("backends", "megatron").items():
        if (why := refusal(name, value, has_schedule=has_schedule, balances=balances)) is not None:
            yield ("backends", "megatron", name), why


def _foreign(spec: Resolution) -> tuple[str, str] | None:
    """Why the runtime does not inject a model, and the nearest that it does; None: it injects it."""
    family = spec.shape.model_type
    if spec.shape.user_module is not None or family in RUNTIME_FAMILIES:
        return None
    known = model_type(family)
    why = "" if known.reason is None else f": {known.reason.why}"
    if family in added_families():
        why = ": it comes from a plug-in, and nobody has compared it with one process"
    return why, "" if known.nearest is None else f"; the nearest type that it injects is {known.nearest}"


def _refused_axes(spec: Resolution) -> Iterator[tuple[str, int, str]]:
    """Axes that the runtime does not run a family with, their sizes, and why."""
    for axis, why in family_of(spec.shape.model_type).refused_axes.items():
        if (size := spec.axis(Axis(axis))) > 1:
            yield axis, size, why


def _spread_kv_heads(spec: Resolution) -> list[int]:
    """The numbers of kv heads of which several ranks of tp hold each."""
    tp = spec.axis(Axis.TP)
    return [heads for heads in spec.shape.kv_head_counts if heads < tp and tp % heads == 0]


def _vocabulary_modules(spec: Resolution) -> list[str]:
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


def _keys_of_another_stage(spec: Resolution) -> _Far | None:
    pp, shape = spec.axis(Axis.PP), spec.shape
    sources = _sources(shape) if pp > 1 and shape.kinds else []
    stages = stages_of(spec) if sources else ()
    stage_of = {layer: place for place, stage in enumerate(stages) for layer in stage.layers}
    for layer, source in sources if stage_of else ():
        if stage_of[layer] != stage_of[source]:
            first = min(number for _, number in sources)
            return _Far(layer, stage_of[layer], source, stage_of[source], len(sources), first)
    return None


def _moved_experts(spec: Resolution) -> str:
    """How far other ranks lie apart in experts than in dense layers, where a rank holds experts of another stage."""
    ep, sizes = spec.axis(Axis.EP), {axis: spec.axis(axis) for axis in DENSE_AXES}
    if ep == 1 or spec.expert_tp is not None or (sizes[Axis.DP] * sizes[Axis.CP]) % ep:
        return ""  # rule X006 looks at experts with a tp of their own
    dense = Grid.of(spec.order, sizes)
    expert = expert_grid(dense, ep)
    return "; ".join(
        f"{axis} neighbours are {dense.stride(axis)} ranks apart in dense layers and {expert.stride(axis)} in experts"
        for axis in (Axis.TP, Axis.PP)
        if sizes[axis] > 1 and dense.stride(axis) != expert.stride(axis) and not keeps_places(dense, expert)
    )


def _why_inputs_whole(spec: Resolution) -> str | None:
    """Why the inputs of matrices are not gathered again; None: those of some are."""
    if shared_inputs(spec.shape):
        return None
    return why_whole(spec.shape, frozenset({ATTENTION})) or "its attention and its MLPs need their input whole"


def _given_ends(spec: Resolution) -> list[str]:
    """Of the first and the last stage those whose layers are given."""
    split = spec.pipeline_split
    ends = {"first": split.first, "last": split.last}
    return [f"num_layers_in_{end}_pipeline_stage" for end, value in ends.items() if value is not None]


def _counted_ends(spec: Resolution) -> list[str]:
    """Of the embedding and the loss those that count as a layer."""
    split = spec.pipeline_split
    parts = {"embedding": split.embedding, "loss": split.loss}
    return [f"account_for_{part}_in_pipeline_split" for part, counts in parts.items() if counts]


FACTS: Mapping[str, Callable[[Resolution], Any]] = {
    **{axis.value: functools.partial(lambda axis, spec: spec.axis(axis), axis) for axis in Axis},
    "machines": lambda spec: spec.cluster,
    "layout_change": lambda spec: layout_change(spec).value,
    "length_divisor": _length_divisor,
    "near_lengths": lambda spec: nearest_multiples(spec.sequence_length, _length_divisor(spec)),
    "stride_of_cp": _stride_of_cp,
    "balance": lambda spec: float(spec.context_parallel.balance(CpLayout.CONTIGUOUS)),
    "recomputed": _recomputed,
    "offload_optimizer": lambda spec: spec.offload_of("optimizer"),
    "offload_param": lambda spec: spec.offload_of("param"),
    "no_nvme": lambda _: NO_NVME,
    "near_ep": _near_ep,
    "peak": lambda spec: estimated(workload(spec)).peak,
    "plan_overlaps": _plan_overlaps,
    "router_is_corrected": lambda spec: spec.shape.model_type in CORRECTED,
    "starts_kernels_in_turn": _starts_kernels_in_turn,
    "experts_keep_places": _experts_keep_places,
    "has_dense_mlps": lambda spec: bool(dense_mlps(spec.shape)),
    "has_dense_layers": lambda spec: bool(spec.shape.dense(range(spec.shape.num_hidden_layers))),
    "words_of_stages": _words_of_stages,
    "a_word_for_each_stage": _a_word_for_each_stage,
    "why_recomputed_whole": _why_recomputed_whole,
    "eval_total": lambda spec: spec.eval_batch("global_batch_size", spec.global_batch_size),
    "eval_micro": lambda spec: spec.eval_batch("micro_batch_size", spec.micro_batch_size),
    "wrong_groups": _wrong_groups,
    "near_groups": _near_groups,
    "end_of_ramp": lambda spec: None if (ramp := _ramp(spec)) is None else ramp.sizes(spec.global_batch_size)[-1],
    "end_of_warmup": _end_of_warmup,
    "most_increments": lambda _: MOST_INCREMENTS,
    "increments": _increments,
    "wrong_batch": _wrong_batch,
    "end_of_schedule": _end_of_schedule,
    "settings_of_others": _settings_of_others,
    "rope": _rope,
    "halo": lambda spec: max(
        filter(None, (part.halo() for part in spec.shape.parts)), key=lambda one: one.tokens, default=None
    ),
    "tokens_of_rank": _tokens_of_rank,
    "rows_of_expert": _rows_of_expert,
    "router_scores": lambda spec: router_scores(spec.shape.model_type),
    "sharded_biases": _sharded_biases,
    "idle_zero_keys": _idle_zero_keys,
    "refused_options": _refused_options,
    "foreign": _foreign,
    "family": lambda spec: family_of(spec.shape.model_type),
    "refused_axes": _refused_axes,
    "spread_kv_heads": _spread_kv_heads,
    "ranks_of_kv_heads": lambda spec: [spec.axis(Axis.TP) // one for one in _spread_kv_heads(spec)],
    "vocabulary_modules": _vocabulary_modules,
    "given_ends": _given_ends,
    "counted_ends": _counted_ends,
    "moved_experts": _moved_experts,
    "keys_of_another_stage": _keys_of_another_stage,
    "why_inputs_whole": _why_inputs_whole,
    "has_levels": lambda spec: _levelled(spec).has_levels,
    "possible_levels": lambda spec: [list(one) for one in possible_sizes(spec, _levelled(spec))],
    "odd_width": _odd_width,
    "reduction": lambda spec: str(spec.if_given("deepspeed", "gradient_allreduce_op")).lower(),
    "predivide_factor": _predivide_factor,
    "refused_scaling": lambda spec: refused_scaling(**_scaling(spec)),
    "wrong_scale": _wrong_scale,
    "heads_to_cut": lambda spec: next(
        (one for one in spec.shape.head_counts if one % spec.axis(Axis.TP)), spec.shape.num_attention_heads
    ),
    "unit_of_kv_heads": _unit_of_kv_heads,
    "groups_of_heads": groups_of_heads,
    "uncut_widths": _uncut_widths,
    "uncut_groups": _uncut_groups,
    "legal_tp": legal_tp,
    "fixes_of_tp": lambda spec: fixes_of_tp(spec, legal_tp(spec)[:4]),
    "fighting_keys": _fighting_keys,
    "paths_of_auto": lambda spec: _paths_of_auto(spec.get("deepspeed")),
    "named_cp": named,
    "exchange": exchange,
    "why_no_levels": why_no_levels,
    "waste_of_linear_loss": functools.partial(_waste, switch="linear_loss"),
    "waste_of_tiles": functools.partial(_waste, switch="tiled_mlp"),
    "idle_gathers": _idle_gathers,
    "uneven_stages": uneven_stages,
    "cut_modules": _cut_modules,
    "stages_of_modules": _stages_of_modules,
    "misspelt_keys": _misspelt_keys,
    "is_quantized": _is_quantized,
    "unread_dimensions": _unread_dimensions,
    "unusable_machine": _unusable_machine,
    "stages_without_choice": stages_without_choice,
    "leaving_groups": leaving_groups,
    "leaving_experts": leaving_experts,
    "traffic": traffic,
    "seconds_of_step": lambda spec: timing(timed(spec)).step.seconds,
    "share_of_experts": _share_of_experts,
}
