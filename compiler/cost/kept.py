"""What a layer keeps for its backward pass, from `kept.json`, which `.ci/generate/kept.py` reads off the models.

A row of the table says how many bytes a layer keeps of a product of sizes: `{"intermediate_size/tp": 8}` are 8 bytes of
each feature of a rank's MLP. Rows are of each token that a rank has itself (`own`; under sequence parallelism a share
of tp), of each token that it works on (`tokens`), or of a layer whatever its tokens; in further groups of modules also
of each token that a convolution sees, of other ranks too (`seen`), and of each token with each one of its sequence
(`pairs`). Which rows hold for a layer follows from questions about it: `["routed", 3, 4]` are rows 3 where it has
experts, and rows 4 where it has none.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, lru_cache
from itertools import combinations
from types import MappingProxyType
from typing import Any, NamedTuple

from parcompile.model.families import family_of
from parcompile.model.shape import ModelShape
from parcompile.user_files import shipped

LEFT_OUT = {
    *("vocab_size", "max_position_embeddings", "num_hidden_layers", "num_key_value_heads", "stated", "kinds", "stack"),
    *("sliding_window", "layers", "user_module", "first_moe_layer", "head", "positions", "norms", "biases", "mlp"),
    *("caps", "parts", "by_kind", "attention_layers", "blocks_per_layer", "attention_inputs", "window_rates"),
    "expert_features",
    "weightless_qk_norms",
    *("head_counts", "kv_head_counts", "kv_units", "head_size", "has_moe", "attends", "tie_word_embeddings"),
}
"""Fields that say nothing of what a layer keeps, or lists."""
GROUPS = ("stream", "attention", "mlp")
"""Of the modules of a layer: norms and the layer itself, attention, and the MLP or experts."""
BESIDE, CHOICE, FRONT, BEHIND = FURTHER = ("beside", "choice", "front", "behind")
"""Groups that are counted by themselves: mechanisms beside attention and MLP, keys that were chosen, and at the ends of
a model, of which the first layer tells, what stands in front of its layers and behind them."""
KV_HEADS = "kv"
"""The kv heads of a rank."""
FEWEST = "fewest_kv"
"""The fewest of a rank: where heads work in pairs two, else one."""
QKV_HEADS = "qkv"
"""With the query heads, and kv heads twice: where values are a view of what one projection gives."""
SEQUENCE_PARALLEL, SEVERAL, WIDE = "sequence_parallel", "tp>1", "tp>2"
"""The questions that a layout answers."""
OF_LAYERS = ("attends", "routed", "dense", "norms_queries", "first")
"""Those that a single layer answers."""
ALIBI_FEATURES = 8
"""Features that queries and keys have more, in which the runtime's attention adds ALiBi's biases."""


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Bytes of one layer for one token of a rank, by what is kept."""

    stream: float
    """Norm inputs and outputs, on the residual stream."""
    attention: float
    mlp: float
    gathered: float
    """The inputs of the blocks; under sequence parallelism those of all tokens of the rank's piece of a sequence."""
    layer: float = 0.0
    """Of the whole layer, however many tokens there are."""

    @property
    def total(self) -> float:
        """All of a token, each component counted once."""
        return self.stream + self.attention + self.mlp + self.gathered


class Sort(NamedTuple):
    """Layers that keep the same: a model all of whose layers are of their kind, and what else tells them apart."""

    shape: ModelShape
    parts: tuple[Any, ...]
    """Mechanisms that these layers have."""
    attends: bool
    routed: bool
    dense: bool
    norms_queries: bool
    """By a norm without a weight."""
    first: bool
    """Of the model."""


@lru_cache(maxsize=1024)
def sorts(shape: ModelShape, layers: range) -> tuple[tuple[int, Sort], ...]:
    """The sorts of these layers, and how many there are of each."""
    counted: dict[tuple[Any, ...], list[int]] = {}
    attending, kinds = set(shape.attention_layers), [own for own, _ in shape.by_kind]
    for layer in layers:
        one = range(layer, layer + 1)
        parts = tuple(part for part in shape.parts if part.count(one))
        kind = next((number for number, own in enumerate(kinds) if layer in own), None)
        normed = layer in shape.heads.weightless_qk_norms
        key = (kind, parts, layer in attending, bool(shape.routed(one)), bool(shape.dense(one)), normed, not layer)
        counted.setdefault(key, []).append(layer)
    return tuple((len(own), Sort(shape.of_layer(own[0]), *key[1:])) for key, own in counted.items())


@lru_cache(maxsize=4096)
def mean_bytes(
    shape: ModelShape, layers: range, routed: bool, tp: int, sequence_parallel: bool, element_bytes: int
) -> LayerBytes:
    """The mean of what these layers with a dense MLP or, `routed`, with experts keep of a token; without such, 0.

    Where a layer is one block, what each kind of block keeps.
    """
    cut = (tp, sequence_parallel, element_bytes)
    every = [(count, one, sort_bytes(one, *cut)) for count, one in sorts(shape, layers)]

    def mean(part: str, of: Callable[[Sort], bool]) -> float:
        those = [(count, getattr(each, part)) for count, one, each in every if of(one)]
        return float(sum(count * size for count, size in those) / max(1, sum(count for count, _ in those)))

    def is_wanted(one: Sort) -> bool:
        return shape.stack.blocks is not None or one.routed == routed

    def has_mlp(one: Sort) -> bool:
        return one.routed if routed else one.dense

    return LayerBytes(
        mean("stream", is_wanted),
        mean("attention", lambda one: one.attends),
        mean("mlp", has_mlp),
        mean("gathered", is_wanted),
        mean("layer", has_mlp),
    )


@lru_cache(maxsize=8192)
def sort_bytes(sort: Sort, tp: int, sequence_parallel: bool, element_bytes: int) -> LayerBytes:
    """What a layer of a sort keeps of a token."""
    numbers, flags = sizes(sort)[0], _answers(sort, tp, sequence_parallel)
    rows = {group: rows_for(sort, group, flags, element_bytes) for group in GROUPS}

    def kept(basis: str, *groups: str, only: str | None = None) -> float:
        every = (pair for group in groups for pair in rows[group].get(basis, {}).items())
        return sum((size * _product(name, numbers, tp) for name, size in every if only in (None, name)), 0.0)

    # The inputs of blocks are told by themselves. Attention's lies in the layer where a hook gathers it.
    attention, mlp = kept("tokens", "stream", "attention"), kept("tokens", "mlp")
    width, blocks = element_bytes * sort.shape.hidden_size, sort.shape.blocks_per_layer
    inputs = [kept("tokens", *groups, only="hidden_size") for groups in (("stream", "attention"), ("mlp",))]
    taken = [min(one, width) for one in inputs]
    taken[0] += min(inputs[0] - taken[0], width * blocks - sum(taken))
    further = sort.shape.mlp.activation_numbers - rows["mlp"].get("activation_numbers", 0)
    mlp += element_bytes * further * _activated(sort) / tp - taken[1]
    own = kept("own", *GROUPS) / (tp if sequence_parallel else 1)
    # That of a state is left out of the rows.
    gathered = width * blocks if any(part.states for part in sort.parts) else sum(taken)
    return LayerBytes(own, attention - taken[0], mlp, float(gathered), kept("layer", *GROUPS))


def _answers(sort: Sort, tp: int, sequence_parallel: bool) -> dict[str, bool]:
    return {**sizes(sort)[1], SEQUENCE_PARALLEL: sequence_parallel, SEVERAL: tp > 1, WIDE: tp > 2}


@lru_cache(maxsize=8192)
def group_bytes(sort: Sort, group: str, tp: int, sequence_parallel: bool, element_bytes: int) -> Mapping[str, float]:
    """What a further group of modules keeps in a layer of a sort, by what it is of."""
    rows, numbers = rows_for(sort, group, _answers(sort, tp, sequence_parallel), element_bytes), sizes(sort)[0]
    every = ((of, sum(size * _product(name, numbers, tp) for name, size in own.items())) for of, own in rows.items())
    return MappingProxyType(dict(every))


def halo_beside(parts: Iterable[Any]) -> int:
    """Tokens before a piece of a sequence that convolutions see which belong to no state."""
    return sum(one.tokens for part in parts if not part.states and (one := part.halo()) is not None)


@lru_cache(maxsize=1024)
def rotary_table_bytes(shape: ModelShape, element_bytes: int) -> float:
    """Bytes of each token in the tables of rotary positions that all layers of a stage share."""
    _, sort = next(iter(sorts(shape, range(1))))
    table = shipped("parcompile.cost", "kept.json")["types"][rows_of(sort)]["tables"]
    rows, numbers = table.get("32" if element_bytes == 4 else "16", {}), sizes(sort)[0]
    return float(sum(size * numbers.get(name, 0) for name, size in rows.items()))


@lru_cache(maxsize=64)
def norm_bytes(shape: ModelShape, element_bytes: int) -> float:
    """What a norm of a layer keeps of a token beyond what goes into it: of a model whose stream passes norms alone."""
    for _, sort in sorts(shape, range(shape.num_hidden_layers)):
        # Where a rank has a part of the tokens, rows tell those that it has itself from others.
        rows = rows_for(sort, "stream", {**sizes(sort)[1], SEQUENCE_PARALLEL: True, SEVERAL: True}, element_bytes)
        of_feature = rows.get("own", {}).get("hidden_size", 0.0) / max(shape.norms.per_layer, 1)
        return float(max(0.0, of_feature - element_bytes) * shape.hidden_size)
    return 0.0


def _activated(sort: Sort) -> int:
    """Features of a token that pass an activation."""
    experts = sort.shape.moe
    if sort.routed and experts is not None:
        return experts.num_experts_per_token * experts.intermediate_size + experts.shared_intermediate_size
    return sort.shape.intermediate_size * sort.dense


@lru_cache(maxsize=4096)
def rows_of(sort: Sort, group: str = GROUPS[0]) -> str:
    """The model type whose rows of a group of modules hold for a sort of layers.

    Its own, where it answers as all layers that these were read off; of further groups, which depend on little, always.
    Of a type that was not read, of a plug-in or of a module of a user, and where a configuration is like none that was
    drawn: the type whose layers answer most like it; of several the one whose rows most types have, or for further
    groups that which has most in common with it.
    """
    table, own, answers = shipped("parcompile.cost", "kept.json"), sort.shape.model_type, sizes(sort)[1]
    types = types_with(group)

    def asked(kind: str) -> Mapping[str, bool]:
        found: Mapping[str, bool] = table["answers"][types[kind]["always"]]
        return found

    def unlike(kind: str) -> int:
        return sum(answers.get(question, False) != answer for question, answer in asked(kind).items())

    if own in types and (group in FURTHER or not unlike(own)):
        return own
    if group in FURTHER:
        return min(types, key=lambda kind: (unlike(kind), -len(asked(kind)), kind))
    alike = Counter(str(one["16"]) for one in types.values())
    return min(types, key=lambda kind: (unlike(kind), kind != own, -alike[str(types[kind]["16"])], kind))


@cache
def types_with(group: str) -> Mapping[str, Mapping[str, Any]]:
    """The types that have rows of a group of modules."""
    types = shipped("parcompile.cost", "kept.json")["types"].items()
    return {kind: one for kind, one in types if all(group in one[bits] for bits in ("16", "32"))}


def rows_for(sort: Sort, group: str, flags: Mapping[str, bool], element_bytes: int) -> Mapping[str, Any]:
    """The rows of a group of modules in these layers, which answer questions by these flags."""
    table = shipped("parcompile.cost", "kept.json")
    tree = table["types"][rows_of(sort, group)]["32" if element_bytes == 4 else "16"][group]
    while not isinstance(tree, int):  # a question, what follows where it holds, and where it does not
        question, holds, holds_not = tree
        tree = holds if flags.get(question, False) else holds_not
    found: Mapping[str, Any] = table["rows"][tree]
    return found


def _product(name: str, numbers: Mapping[str, float], tp: int) -> float:
    kv = max(numbers[KV_HEADS] / tp, numbers[FEWEST])
    known = {KV_HEADS: kv, QKV_HEADS: numbers["num_attention_heads"] / tp + 2 * kv}
    names = (each for each in name.split("·") if each)
    return math.prod(
        known[each] if each in known else numbers.get(each.removesuffix("/tp"), 0) / (tp if each.endswith("/tp") else 1)
        for each in names
    )


@lru_cache(maxsize=4096)
def sizes(sort: Sort) -> tuple[dict[str, float], dict[str, bool]]:
    """The sizes of a sort of layers by name, sums of two in one part of the shape too, and its answers to questions."""
    numbers, flags = _numbers(sort.shape, "")
    for part in sort.parts:
        name = type(part).__name__
        for found, more in zip((numbers, flags), _numbers(part, f"{name}."), strict=True):
            found.update(more)
        flags[name] = True
    numbers |= {KV_HEADS: sort.shape.num_key_value_heads, FEWEST: 2 if sort.shape.heads.paired else 1}
    if sort.shape.norms.gate:
        numbers["norms.gate"] = sort.shape.norms.gate
    if streams := sort.shape.residual.streams:
        steps = sort.shape.residual.square_mixtures
        numbers |= {"residual.mixture": streams * (streams + 2), "residual.steps": steps + 1}
    if sort.shape.layer_inputs is not None:
        numbers["layer_inputs.layers"] = sort.shape.num_hidden_layers
    if (blocks := sort.shape.stack.shared_blocks) is not None and sort.attends:
        numbers["adapter_rank"], flags["attention_adapters"] = blocks.adapter_rank, blocks.attention_adapters
    if (keys := sort.shape.attention.compressed) is not None:
        numbers |= {"attention.compressed.keys_of_token": 1 / keys.rate, "attention.keys_of_token": 1 + 1 / keys.rate}
    if sort.shape.positions.alibi:
        numbers["alibi_dim"] = sort.shape.head_dim + ALIBI_FEATURES
    family = family_of(sort.shape.model_type)
    flags |= {f"norms={family.norm.value}": True, "norms.bias": sort.shape.norms.bias}
    flags |= {"norms.per_layer>2": sort.shape.norms.per_layer > 2, "mlp.gated": sort.shape.mlp.gated}
    return numbers, flags | {name: getattr(sort, name) for name in OF_LAYERS}


def _numbers(one: Any, prefix: str) -> tuple[dict[str, Any], dict[str, bool]]:
    numbers: dict[str, Any] = {}
    flags: dict[str, bool] = {}
    for name in _names(type(one)):  # type: ignore[arg-type]
        value, full = getattr(one, name), prefix + name
        if isinstance(value, bool) or value is None:
            flags[full] = bool(value)
        elif isinstance(value, int | float):
            numbers[full] = value
            flags |= {f"{full}>0": value > 0, f"{full}>1": value > 1}
        elif isinstance(value, enum.Enum):
            flags[f"{full}={value.value}"] = True
        elif is_dataclass(value):
            flags[full] = True
            for found, more in zip((numbers, flags), _numbers(value, f"{full}."), strict=True):
                found.update(more)
            own = [each.name for each in fields(value) if each.name in _names(type(value))]  # type: ignore[arg-type]
            own = [each for each in own if type(getattr(value, each)) is int]
            numbers |= {f"{full}.{a}+{b}": getattr(value, a) + getattr(value, b) for a, b in combinations(own, 2)}
    return numbers, flags


@cache
def _names(kind: type[Any]) -> tuple[str, ...]:
    properties = (name for name in dir(kind) if isinstance(getattr(kind, name), property) and not name.startswith("_"))
    return tuple(name for name in (*(each.name for each in fields(kind)), *properties) if name not in LEFT_OUT)
