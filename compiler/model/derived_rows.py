"""Every parameter of a model, in the order in which it registers them, and what the rows tell of a model.

Rows come from the derived table of the type, which a plug-in's family brings itself; those of a user module as the spec
lists them, cut by its rules.
"""

from __future__ import annotations

import functools
import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from . import FROZEN, STREAM, Cut, Layers, Parameter, ParameterTable, Part, Split, vocabulary
from .cutting import OUTPUTS, PROJECTIONS, Place, cuts_of, own_key, places_of
from .families import FAMILIES
from .family import Family
from .layer_parts import ATTENTION, MLP, why_whole
from .shape import Biases, ModelShape
from .tables import Derived, repeated, table_of
from .tables.expression import TableError
from .user_module import LAYER, InjectionRule, UserModule

CLASSIFIER = "score.weight"
"""The head of transformers' classifiers of sequences (`GenericForSequenceClassification`), whole on every rank."""


def parameter_table(shape: ModelShape) -> ParameterTable:
    """The parameters of a model of this shape."""
    return derived_rows(shape) if shape.user_module is None else _user_module_table(shape, shape.user_module)


def derived_rows(shape: ModelShape) -> ParameterTable:
    """The rows of the type's derived table, cut by the heads and widths of the shape."""
    return _rows(shape, shape.stated)


@functools.lru_cache(maxsize=256)
def _rows(shape: ModelShape, values: tuple[tuple[str, Hashable], ...]) -> ParameterTable:
    # Equal shapes may come of configurations that state other values: both are the key.
    family = FAMILIES[shape.model_type]
    _compare(shape, family, dict(values))
    found = _stacked(shape, values, family)
    places = [number for number, one in enumerate(found) if one.layers is not None]
    early, late = found[: places[0]], found[places[-1] + 1 :]
    if shape.head.labels:
        late = [one for one in late if one.name.rpartition(".")[0] != family.head]
        late.append(Parameter(CLASSIFIER, (shape.head.labels, shape.hidden_size)))
    # What gives all layers their inputs belongs to the first stage, wherever it is registered.
    of_inputs = (*_OF_INPUTS, *(name for one in shape.parts for name in one.inputs))
    inputs = [one for one in late if one.name.removeprefix(f"{family.base}.").startswith(of_inputs)]
    norm = _last_norm([*early, *(one for one in late if one not in inputs)], family)
    first, norms = ([one for one in rows if norm is not None and one.name.startswith(norm)] for rows in (early, late))
    return ParameterTable(
        (*(one for one in early if one not in first), *inputs),
        tuple(one for one in found if one.layers is not None),
        (*first, *(one for one in late if one not in inputs)),
        shape.num_hidden_layers,
        len(first),
        len(inputs),
        len(norms) if inputs else 0,
        layers_per_module=family.layers_per_module,
    )


def _last_norm(outside: Iterable[Parameter], family: Family) -> str | None:
    """The norm behind the layers, of the rows outside of them: what their names begin with."""
    norms = [one.name for one in outside if len(one.shape) == 1 and one.name.startswith(f"{family.base}.")]
    return next((name.removesuffix("weight") for name in reversed(norms) if name.endswith(".weight")), None)


_TABLE_OF_INPUTS = "embed_tokens_per_layer."
_OF_INPUTS = (_TABLE_OF_INPUTS, "per_layer_model_projection.", "per_layer_projection_norm.")
"""Gemma's second embedding, of which every layer gets a part."""


def _compare(shape: ModelShape, family: Family, stated: Mapping[str, Hashable]) -> None:
    """Raises TableError where a shape is not that of the configuration."""
    wanted = {"hidden_size": shape.hidden_size, "vocab_size": shape.vocab_size}
    if shape.stack.runs is None:  # else a configuration may state how often the stacks run as its number of layers
        wanted["num_hidden_layers"] = shape.num_hidden_layers // family.layers_per_module
    for name, value in wanted.items():
        if stated.get(key := own_key(family, name) or name, value) != value:
            raise TableError(f"the configuration says {key} {stated[key]}, and the shape {value}", key)


def _stacked(shape: ModelShape, values: tuple[tuple[str, Hashable], ...], family: Family) -> list[Parameter]:
    """The rows of all stacks of layers, and those outside of them, in the order in which they are registered."""
    runs, one_stack = shape.stack.runs, shape
    if runs is not None:
        one_stack = replace(shape, stack=replace(shape.stack, runs=None), num_hidden_layers=runs.layers)
    firsts = {family.layers: 0} if runs is None else dict(runs.stacks)
    places, found = places_of(one_stack), list[Parameter]()
    for number, (name, first) in enumerate(firsts.items()):
        stack = f"{family.base}.{name}"
        every = [_of_layers(one, stack, family) for one in _repeated(shape.model_type, stack, values)]
        # A linear of width 0 is not built, nor is its bias: there is no shared expert where their number is 0.
        empty = {_module(one) for one in every if 0 in one.shape}
        every = [one for one in every if _module(one) not in empty]
        inside = [one for one in every if one.layers is not None]
        rows = _by_kind(stack, [row for one in inside for row in _parameters(one, stack, first, shape, places, family)])
        if number == 0:
            others = tuple(f"{family.base}.{other}." for other in firsts)
            outside = [one for one in every if not one.name.startswith(others)]
            start = next(place for place, one in enumerate(every) if one.layers is not None)
            before = [one for one in every[:start] if one in outside]
            found = [_parameter(one, _outside(one, family), None, shape, family) for one in before]
            after = [_parameter(one, _outside(one, family), None, shape, family) for one in outside[len(before) :]]
        found += rows
    return [*found, *after]


@functools.lru_cache(maxsize=16)
def _repeated(model_type: str, stack: str, values: tuple[tuple[str, Hashable], ...]) -> tuple[Derived, ...]:
    # A shape is made of its rows, and has them again: they are counted once.
    table = table_of(model_type)
    assert table is not None, model_type
    return tuple(repeated(table, stack, values))


def _by_kind(stack: str, rows: Iterable[Parameter]) -> tuple[Parameter, ...]:
    """The same with the rows of a module that layers have in several kinds kind by kind, that of the first layer first.

    No layer has rows of two kinds: the order within a layer stays.
    """
    modules: dict[str, list[Parameter]] = {}
    for one in rows:
        modules.setdefault(one.name.removeprefix(f"{stack}.{{layer}}.").partition(".")[0], []).append(one)
    for name, held in modules.items():
        kinds = {tuple(one.layers or ()) for one in held}
        if sum(map(len, kinds)) == len(set().union(*kinds)):
            modules[name] = sorted(held, key=lambda one: min(one.layers or ()))
    return tuple(one for held in modules.values() for one in held)


_ITEM = re.compile(r"^([^.]+)\.(\d+)\.")
"""A module of a layer that is a list, and the place in it."""


def _of_layers(one: Derived, stack: str, family: Family) -> Derived:
    """The same, with the numbers of layers where a module holds several: in lists one of each, else the first."""
    if one.layers is None or family.layers_per_module == 1:
        return one
    item = _ITEM.match(one.name.removeprefix(f"{stack}.{{layer}}."))
    place = 0 if item is None else int(item[2])
    return one._replace(layers=tuple(family.layers_per_module * module + place for module in one.layers))


def of_one(own: str, family: Family) -> str:
    """The name of a parameter in a layer, without the place of the layer in its module."""
    return own if family.layers_per_module == 1 else _ITEM.sub(r"\1.", own)


def _parameters(
    one: Derived, stack: str, first: int, shape: ModelShape, places: Sequence[Place], family: Family
) -> Iterator[Parameter]:
    """The rows of a parameter of the layers: one for each way in which it is cut."""
    own = of_one(one.name.removeprefix(f"{stack}.{{layer}}."), family)
    for cut, numbers in cuts_of(own, one, places, family).items():
        layers: Layers = tuple(first + number for number in numbers)
        if layers == tuple(range(layers[0], layers[-1] + 1)):
            layers = range(layers[0], layers[-1] + 1)
        yield replace(_parameter(one, cut, layers, shape, family), first=first)


def _parameter(one: Derived, cut: Cut, layers: Layers | None, shape: ModelShape, family: Family) -> Parameter:
    idle = 0 if cut.expert_dim is None or shape.moe is None else one.shape[0] - shape.moe.num_experts
    together = family.layers_per_module
    return Parameter(one.name, one.shape, layers=layers, layers_per_module=together, idle_experts=idle, **cut._asdict())


def _module(one: Derived) -> str:
    return one.name.rpartition(".")[0]


def _outside(one: Derived, family: Family) -> Cut:
    inner = one.name.removeprefix(f"{family.base}.")
    if inner == family.initial_state:
        return FROZEN
    if inner.startswith(_TABLE_OF_INPUTS) or _module(one) in (f"{family.base}.{family.embedding}", family.head):
        return Cut(vocabulary(one.shape[0]))
    return STREAM


# What the rows of a derived table tell of a model: its biases, gates and norms, and whether its head is tied.

_COMPRESSING = ("q_a_proj", "kv_a_proj_with_mqa")
"""What latent attention projects hidden states with, beside those projections."""
_NORMS_OF_QUERIES = ("q_norm", "q_layernorm", "query_layernorm")


def facts_of(shape: ModelShape) -> dict[str, Any]:
    """Fields of a shape that its rows tell."""
    family, table = FAMILIES[shape.model_type], derived_rows(shape)
    layer = {of_one(one.name.partition("{layer}.")[2], family): one for one in table.layer}
    weights = {name.removesuffix(".weight"): one for name, one in layer.items() if name.endswith(".weight")}
    # Those of the residual stream, also where only some layers have them.
    norms = {
        name: one for name, one in weights.items() if one.sequence_parallel and "." not in name and len(one.shape) == 1
    }
    attending = {name for name, one in layer.items() if not set(shape.attention_layers).isdisjoint(one.layers or ())}
    mlps = _of_mlps(layer, shape, family)
    of_queries = [one for name, one in weights.items() if _norms_queries(f"{name}.weight", family)]
    biases = Biases(
        qkv=_biased(attending, family.attention, *PROJECTIONS, *_COMPRESSING),
        attention_output=_biased(attending, family.attention, *OUTPUTS),
        mlp=any(name.endswith(".bias") for name in mlps),
        head=any(one.name == f"{family.head}.bias" for one in table.after),
    )
    of_norms = replace(shape.norms, bias=any(f"{name}.bias" in layer for name in norms))
    if not family.names_norms:
        by_layer = Counter(layer for one in norms.values() for layer in one.layers or ())
        of_norms = replace(of_norms, per_layer=max(by_layer.values(), default=0), names=tuple(norms))
    return {
        "biases": biases,
        "mlp": replace(shape.mlp, gated=all(sum(sizes) != 2 * min(sizes) for sizes in _features(mlps))),
        "head": replace(
            shape.head, tied=not shape.head.labels and all(one.name != f"{family.head}.weight" for one in table.after)
        ),
        "norms": of_norms,
        "heads": replace(shape.heads, qk_norm=bool(of_queries)),
    }


def _of_mlps(layer: Mapping[str, Parameter], shape: ModelShape, family: Family) -> dict[str, Parameter]:
    """What of MLPs and experts is cut by features."""
    shared = family.experts.shared if family.experts is not None else ""
    ends = (f".{family.mlp}", ".experts", *([f".{shared}"] if shared else []))
    # A block may be called as others are.
    layers = (
        range(shape.num_hidden_layers)
        if shape.stack.blocks is None
        else (*shape.stack.blocks.mlp, *shape.stack.blocks.experts)
    )
    return {
        name: one
        for name, one in layer.items()
        if one.split is not None
        and set(layers).issuperset(one.layers or ())
        and (f".{_linear(name)}".rpartition(".")[0] or ".").endswith(ends)
    }


def _linear(name: str) -> str:
    return name.removesuffix(".weight").removesuffix(".bias")


def _features(mlps: Mapping[str, Parameter]) -> Iterable[list[int]]:
    """Of each MLP, and of experts together: the widths of what its linears give or take, each along the cut dim."""
    found = defaultdict[str, list[int]](list)
    for name, one in mlps.items():
        if one.split is not None and len(one.shape) > 1 and not name.endswith("bias"):
            found[_linear(name).rpartition(".")[0]].append(one.shape[one.split.dim])
    return found.values()


@functools.lru_cache(maxsize=256)
def dense_mlps(shape: ModelShape) -> tuple[int, ...]:
    """The layers with a module that is a dense MLP, and no experts; none where the layer itself holds its linears."""
    family = FAMILIES.get(shape.model_type)
    if family is None or not family.mlp or family.layers_per_module > 1 or shape.user_module is not None:
        return ()
    if shape.stack.blocks is not None or shape.stack.runs is not None:
        return ()
    inside = f".{{layer}}.{family.mlp}."
    rows = (one for one in derived_rows(shape).layer if one.split is not None and inside in one.name)
    layers = {layer for row in rows for layer in row.layers or ()}
    return tuple(layer for layer in sorted(layers) if shape.dense(range(layer, layer + 1)))


@functools.lru_cache(maxsize=256)
def shared_inputs(shape: ModelShape) -> frozenset[str]:
    """Which of attention and dense MLPs use their input only in matrices that tp cuts, in all layers."""
    family = FAMILIES.get(shape.model_type)
    if family is None or why_whole(shape, frozenset({ATTENTION})) is not None:
        return frozenset()
    found = set()
    for part, name in ((ATTENTION, family.attention), (MLP, family.mlp if dense_mlps(shape) else "")):
        inside = f".{{layer}}.{name}."
        rows = [one for one in derived_rows(shape).layer if name and inside in one.name and len(one.shape) > 1]
        if rows and all(one.split is not None or one.expert_dim is not None for one in rows):
            found.add(part)
    return frozenset(found)


def norms_queries(model_type: str, family: Family) -> bool:
    """Whether models of a type may norm their queries and keys."""
    table = table_of(model_type)
    return table is not None and any(_norms_queries(row.name, family) for row in table.rows)


def _norms_queries(name: str, family: Family) -> bool:
    return f".{name}".endswith(tuple(f".{family.attention}.{norm}.weight" for norm in _NORMS_OF_QUERIES))


def _biased(layer: Iterable[str], module: str, *names: str) -> bool:
    """Whether one of the linears of a module has a bias, also where the module stands in another."""
    ends = tuple(f".{module}.{name}.bias" if module else f".{name}.bias" for name in names)
    return any(f".{name}".endswith(ends) for name in layer)


def _user_module_table(shape: ModelShape, module: UserModule) -> ParameterTable:
    """The rows before, in and after the layers."""
    found = [_row(shape, module, name, size) for name, size in module.parameters]
    inside = [place for place, row in enumerate(found) if row.layers is not None]
    first, last = inside[0], inside[-1] + 1
    return ParameterTable(tuple(found[:first]), tuple(found[first:last]), tuple(found[last:]), shape.num_hidden_layers)


def _row(shape: ModelShape, module: UserModule, name: str, size: tuple[int, ...]) -> Parameter:
    rule = module.rule_of(name)
    kind = None if rule is None else rule.kind
    split: Split | None = None
    if kind == "vocab":
        split = vocabulary(size[0])
    elif rule is not None and (kind == "column" or (kind == "row" and not name.endswith(".bias"))):
        dim = 0 if kind == "column" else 1
        split = Split(dim, _parts(shape, module, name, size[dim], rule))
    return Parameter(
        name.replace(LAYER, "{layer}"),
        size,
        split,
        layers=range(shape.num_hidden_layers) if LAYER in name else None,
        sequence_parallel=split is None and kind != "partial",
        partial=kind == "partial",
    )


def _parts(shape: ModelShape, module: UserModule, name: str, size: int, rule: InjectionRule) -> tuple[Part, ...]:
    """A linear of an attention module that is as wide as the heads is cut by heads; others are by elements."""
    if rule.units:
        return tuple(Part(size // sum(rule.units) * units, units) for units in rule.units)
    if any(name.startswith(f"{attention}.") for attention in module.attentions):
        for heads in (shape.num_attention_heads, shape.num_key_value_heads):
            if size == heads * shape.head_dim:
                return (Part(size, heads),)
    return (Part(size, size),)
