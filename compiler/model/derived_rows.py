"""The parameter table of a model whose rows come from the derived table of its type."""

from __future__ import annotations

import functools
import re
from collections.abc import Hashable, Iterable
from dataclasses import replace

from .cutting.attention import attention_cut
from .cutting.cut import STREAM, Cut
from .cutting.feed_forward import beside_cut, block_cut, mlp_cut
from .cutting.keys import own_key
from .families.added import BUILT_IN
from .family import Family, Norm
from .shape import ModelShape
from .table import Layers, Parameter, ParameterTable, vocabulary
from .tables import Repeated, repeated, table_of


def by_hand(model_type: str) -> bool:
    """Whether `parameters.py` writes the rows of a type, and not its derived table.

    These are types without such a table, those of plug-ins, and those with more than attention and an MLP in every
    layer: a state in the place of attention, other heads, one block each, stacks that run several times, gated norms.
    """
    if model_type not in BUILT_IN:
        return True
    family = BUILT_IN[model_type]
    differ = family.recurrent or family.layer_shapes or family.layer_blocks or family.runs or family.norm_gate
    return bool(differ) or table_of(model_type) is None


def derived_rows(shape: ModelShape) -> ParameterTable:
    """The rows of the type's derived table, cut by the heads and widths of the shape."""
    return _rows(shape, shape.stated)


@functools.lru_cache(maxsize=256)
def _rows(shape: ModelShape, values: tuple[tuple[str, Hashable], ...]) -> ParameterTable:
    # Equal shapes may come of configurations that state other values: both are the key.
    family, table = BUILT_IN[shape.model_type], table_of(shape.model_type)
    assert table is not None, shape.model_type
    stated = dict(values)
    for name in ("hidden_size", "num_hidden_layers", "vocab_size"):
        wanted = getattr(shape, name) // (family.layers_per_module if name == "num_hidden_layers" else 1)
        if stated[key := own_key(family, name) or name] != wanted:
            raise ValueError(f"the configuration says {key} {stated[key]}, and the shape {wanted}")
    stack = f"{family.base}.{family.layers}"
    every = [_of_layers(one, stack, family) for one in repeated(table, stack, values)]
    # A linear of width 0 is not built, nor is its bias: there is no shared expert where their number is 0.
    empty = {_module(one) for one in every if 0 in one.shape}
    found = [(one, _parameter(one, stack, shape, family)) for one in every if _module(one) not in empty]
    places = [number for number, (one, _) in enumerate(found) if one.layers is not None]
    early = [one for _, one in found[: places[0]]]
    late = [one for _, one in found[places[-1] + 1 :]]
    last = f"{family.base}.{family.final_norm}." if family.final_norm else None
    before = [one for one in early if last is None or not one.name.startswith(last)]
    first = [one for one in early if one not in before]
    return ParameterTable(
        tuple(before),
        _by_kind(stack, [one for _, one in found if one.layers is not None]),
        (*first, *late),
        shape.num_hidden_layers,
        len(first),
        layers_per_module=family.layers_per_module,
    )


def norm_names(shape: ModelShape) -> tuple[str, ...]:
    """The norms of the residual stream in a layer, those that only some layers have among them."""
    family = BUILT_IN[shape.model_type]
    if family.norm is Norm.NOTHING:
        return family.norms  # they have no parameters
    prefix, end = f"{family.base}.{family.layers}.{{layer}}.", ".weight"
    inner = (
        _of_one(one.name.removeprefix(prefix), family) for one in derived_rows(shape).layer if one.sequence_parallel
    )
    names = (name.removesuffix(end) for name in inner if name.endswith(end))
    return tuple(dict.fromkeys(name for name in names if "." not in name))


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


def _of_layers(one: Repeated, stack: str, family: Family) -> Repeated:
    """The same, with the numbers of layers where a module holds several: in lists one of each, else the first."""
    if one.layers is None or family.layers_per_module == 1:
        return one
    item = _ITEM.match(one.name.removeprefix(f"{stack}.{{layer}}."))
    place = 0 if item is None else int(item[2])
    return replace(one, layers=tuple(family.layers_per_module * module + place for module in one.layers))


def _of_one(own: str, family: Family) -> str:
    """The name of a parameter in a layer, without the place of the layer in its module."""
    return own if family.layers_per_module == 1 else _ITEM.sub(r"\1.", own)


def _parameter(one: Repeated, stack: str, shape: ModelShape, family: Family) -> Parameter:
    cut = _outside(one, family) if one.layers is None else _inside(one, stack, shape, family)
    layers: Layers | None = one.layers
    if one.layers is not None and one.layers == tuple(range(one.layers[0], one.layers[-1] + 1)):
        layers = range(one.layers[0], one.layers[-1] + 1)
    return Parameter(
        one.name,
        one.shape,
        cut.split,
        cut.expert_dim,
        layers,
        cut.sequence_parallel,
        cut.partial,
        cut.trained,
        layers_per_module=family.layers_per_module,
        idle_experts=0 if cut.expert_dim is None or shape.moe is None else one.shape[0] - shape.moe.num_experts,
    )


def _module(one: Repeated) -> str:
    return one.name.rpartition(".")[0]


def _outside(one: Repeated, family: Family) -> Cut:
    if _module(one) in (f"{family.base}.{family.embedding}", family.head):
        return Cut(vocabulary(one.shape[0]))
    return STREAM


def _inside(one: Repeated, stack: str, shape: ModelShape, family: Family) -> Cut:
    own = _of_one(one.name.removeprefix(f"{stack}.{{layer}}."), family)
    layers = one.layers or ()
    here = shape.of_layer(layers[0])
    experts = family.experts
    routed = shape.moe is not None and layers[0] in shape.moe.routed(shape.num_hidden_layers)
    if own.startswith(f"{family.attention}."):
        return attention_cut(own.removeprefix(f"{family.attention}."), one, here, family)
    if experts is not None and routed:
        if own.startswith(f"{experts.block}."):
            return block_cut(own.removeprefix(f"{experts.block}."), one, family, experts)
        if experts.beside not in ("", family.mlp) and own.startswith(f"{experts.beside}."):
            return beside_cut(own.removeprefix(f"{experts.beside}."), one.shape)
    prefix = f"{family.mlp}." if family.mlp else ""
    module = own.removeprefix(prefix)
    if own.startswith(prefix) and (prefix or module.rpartition(".")[0] in (*family.up, family.down)):
        return mlp_cut(module, one, family)
    return STREAM
