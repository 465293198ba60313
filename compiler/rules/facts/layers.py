"""What rules read of the layers and of how they are cut, recomputed and held; of the model and the machine."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from parcompile.cost.step import timing
from parcompile.cost.workload import Workload
from parcompile.diagnostics import Path, closest
from parcompile.layout.groups import DENSE_AXES, Axis, divisors, expert_grid
from parcompile.layout.sequence import CpImplementation
from parcompile.layout.shards import keeps_places
from parcompile.machines import PresetError, accelerators, is_preset_file
from parcompile.model.derived_rows import shared_inputs
from parcompile.model.families import FAMILIES
from parcompile.model.family import by_type
from parcompile.model.hf_config import ModelConfigError
from parcompile.model.key_types import misspelt, turned_width
from parcompile.model.layer_parts import parts_of, why_whole
from parcompile.rules import model_path
from parcompile.rules.h_memory import workload
from parcompile.rules.l_stages import stages_of
from parcompile.rules.t_tensor import parts_that_tp_divides
from parcompile.rules.w_world import dense_grid, timed
from parcompile.spec.resolve import Resolution
from parcompile.spec.resolve.training import AUTO


def length_divisor(spec: Resolution) -> int:
    """What the sequence length has to be a multiple of, for cp and sequence parallelism together."""
    cp, tp = spec.axis(Axis.CP), spec.axis(Axis.TP)
    chunks = spec.cp_layout.chunks_per_rank if cp > 1 else 1
    return cp * (math.lcm(chunks, tp) if spec.sequence_parallel else chunks)


def stride_of_cp(spec: Resolution) -> int:
    """Ranks from one of a cp group to the next."""
    order = spec.order
    return math.prod(spec.axis(axis) for axis in DENSE_AXES if order.index(axis) < order.index(Axis.CP))


def starts_kernels_in_turn(spec: Resolution) -> bool:
    """Whether its streams wait for one another, where the machine is known."""
    machine = accelerators().get(spec.cluster.accelerator)  # none, where a file that cannot be used is named
    return machine is not None and machine.starts_kernels_in_turn


def experts_keep_places(spec: Resolution) -> bool:
    """Whether every rank holds experts of its own stage, cut at its own place on tp."""
    dense = dense_grid(spec)
    return keeps_places(dense, expert_grid(dense, spec.axis(Axis.EP), spec.expert_tp))


def recomputed(spec: Resolution) -> list[str]:
    """The words for what is recomputed, one or one for each stage."""
    given = spec.activation_checkpointing
    return [given] if isinstance(given, str) else list(given)


def words_of_stages(spec: Resolution) -> list[str] | None:
    """The words that are written for each stage; None where there is one for all."""
    given = spec.get("training", "activation_checkpointing")
    return given if isinstance(given, list) else None


def a_word_for_each_stage(spec: Resolution) -> list[str]:
    """As many of the words as there are stages; the last one stands for those that are lacking."""
    given, pp = spec.get("training", "activation_checkpointing"), spec.axis(Axis.PP)
    return [*given, *[given[-1]] * (pp - len(given))][:pp]


def why_recomputed_whole(spec: Resolution) -> str | None:
    """Why parts of layers that are to be recomputed cannot be told apart."""
    parts = frozenset(part for word in recomputed(spec) for part in parts_of(word))
    return why_whole(spec.shape, parts) if parts else None


class _Uncut(NamedTuple):
    """Something that tp does not divide: how it is told, its size, what tp has to divide, and where it stands."""

    told: str
    size: int
    each: str
    place: str


def unit_of_kv_heads(spec: Resolution) -> int:
    """The kv heads, or pairs of them, that tp neither divides nor is a multiple of; the first where there are none."""
    tp, units = spec.axis(Axis.TP), spec.shape.kv_units
    return next((one for one in units if one % tp and tp % one), units[0])


def uncut_widths(spec: Resolution) -> Iterator[_Uncut]:
    """Widths of MLPs, experts and other parts that tp does not divide."""
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


def uncut_groups(spec: Resolution) -> Iterator[_Uncut]:
    """Groups of parts that are dealt over tp, and that it does not divide."""
    for one in filter(None, (part.dealt() for part in spec.shape.parts)):
        if one.size % spec.axis(Axis.TP):
            each = f"the {one.size} {one.each}"
            yield _Uncut(one.told, one.size, each, ".".join(model_path(spec, one.key)))


def idle_gathers(spec: Resolution) -> Iterator[Workload]:
    """The step, where it keeps no gathered inputs anyway that could be gathered again."""
    work = workload(spec)
    words = [replace(work, recompute=word) for word in work.recompute_words]
    parts = shared_inputs(work.shape)
    if work.gathers_inputs and parts and not any(one.gathers_again(part) for one in words for part in parts):
        yield work


def cut_modules(spec: Resolution) -> list[int]:
    """The layers with which stages begin within a module of several layers."""
    return [one.layers.start for one in stages_of(spec) if one.layers.start % spec.shape.stack.layers_per_module]


def stages_of_modules(spec: Resolution) -> list[int]:
    """Numbers of stages, up to those of the spec, over which whole modules divide."""
    whole = spec.shape.num_hidden_layers // spec.shape.stack.layers_per_module
    return [pp for pp in divisors(whole) if pp <= spec.axis(Axis.PP)]


def rope(spec: Resolution) -> tuple[Any, Any]:
    """Base and kind of rotary positions, as a configuration has them: transformers 5 keeps both in rope_parameters."""
    rope = spec.model_config.get("rope_parameters") or spec.model_config
    scaling = rope.get("rope_scaling") or rope
    return rope.get("rope_theta", "of the family"), scaling.get("rope_type") or scaling.get("type") or "none"


def odd_width(spec: Resolution) -> tuple[str, int, str] | None:
    """The key and the odd width of each head that rotary positions turn whole, and where it stands."""
    found = turned_width(spec.model_config, None if spec.shape.attention.projections else spec.shape.head_dim)
    if found is None or found[1] % 2 == 0:
        return None
    return *found, ".".join(model_path(spec, found[0], "num_attention_heads"))


def levelled(spec: Resolution) -> CpImplementation:
    """The implementation whose two levels are spoken of."""
    name = spec.named_implementation
    return CpImplementation.USP if name == AUTO else CpImplementation(name)


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


def misspelt_keys(spec: Resolution) -> list[tuple[str, str]]:
    """Keys of it that its class does not read, each with the one that was meant."""
    config = _read_config(spec)
    return sorted(misspelt(str(config.get("model_type")), config)) if config else []


def is_quantized(spec: Resolution) -> bool:
    """Whether it is of quantized weights."""
    config = _read_config(spec)
    return bool(config) and "quantization_config" in {*config, *(spec.whole_config or ())}


def unread_dimensions(spec: Resolution) -> Iterator[Path]:
    """Where a model is written out: keys that its family does not read."""
    given = spec.get("model")
    family = str(spec.get("model", "model_type")) if "model_type" in given and "hf_config" not in given else ""
    for key in given if family in _KEYS else ():
        if spec.given("model", key) and key not in f"{_SHARED} {_KEYS[family]}".split():
            yield "model", key


def unusable_machine(spec: Resolution) -> Iterator[tuple[str, str | None]]:
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


def share_of_experts(spec: Resolution) -> float:
    """The part of a step that takes experts' messages."""
    step = timing(timed(spec)).step
    return step.expert / step.seconds


def spread_kv_heads(spec: Resolution) -> list[int]:
    """The numbers of kv heads of which several ranks of tp hold each."""
    tp = spec.axis(Axis.TP)
    return [heads for heads in spec.shape.kv_head_counts if heads < tp and tp % heads == 0]


def given_ends(spec: Resolution) -> list[str]:
    """Of the first and the last stage those whose layers are given."""
    split = spec.pipeline_split
    ends = {"first": split.first, "last": split.last}
    return [f"num_layers_in_{end}_pipeline_stage" for end, value in ends.items() if value is not None]


def counted_ends(spec: Resolution) -> list[str]:
    """Of the embedding and the loss those that count as a layer."""
    split = spec.pipeline_split
    parts = {"embedding": split.embedding, "loss": split.loss}
    return [f"account_for_{part}_in_pipeline_split" for part, counts in parts.items() if counts]
