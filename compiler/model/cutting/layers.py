"""How the parameters of a layer are cut, by what the layer consists of."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from parcompile.model.blocks import Block
from parcompile.model.family import Experts, Family
from parcompile.model.shape import ModelShape
from parcompile.model.shared_blocks import BLOCK
from parcompile.model.tables import Repeated

from .cut import PARTIAL, STREAM, Cut
from .parts import attention_cut, block_cut, mlp_cut

# How the parameters of a layer are cut, by what the layer consists of.


@dataclass(frozen=True, slots=True)
class Place:
    """What layers of one kind consist of."""

    shape: ModelShape
    """A model all of whose layers have the heads and widths of this one."""
    parts: tuple[Block, ...]
    """The mechanisms that they have."""
    attends: bool
    routed: bool
    """It has experts."""


def places_of(shape: ModelShape) -> list[tuple[Place, frozenset[int]]]:
    """The kinds of a model's layers, each with the numbers of its layers."""
    every = range(shape.num_hidden_layers)
    attending, routed = frozenset(shape.attention_layers), frozenset[int]()
    if shape.blocks is not None:
        routed = frozenset(shape.blocks.experts)
    elif shape.moe is not None:
        routed = frozenset(shape.moe.routed(len(every)))
    kinds = list(shape.by_kind)
    number_of = {layer: number for number, (layers, _) in enumerate(kinds) for layer in layers}
    found: dict[tuple[int, tuple[Block, ...], bool, bool], list[int]] = {}
    for layer in every:
        parts = tuple(one for one in shape.parts if layer in one.layers)
        key = (number_of.get(layer, -1), parts, layer in attending, layer in routed)
        found.setdefault(key, []).append(layer)
    return [
        (Place(shape if key[0] < 0 else kinds[key[0]][1], *key[1:]), frozenset(layers)) for key, layers in found.items()
    ]


def cuts_of(
    own: str, one: Repeated, places: Sequence[tuple[Place, frozenset[int]]], family: Family
) -> dict[Cut, tuple[int, ...]]:
    """The cuts of a parameter that layers call `own`, each with its layers, those of the first layer first."""
    by_cut: dict[Cut, list[int]] = {}
    for place, layers in places:
        if here := [layer for layer in one.layers or () if layer in layers]:
            by_cut.setdefault(_cut(own, one, place, family), []).extend(here)
    return {cut: tuple(sorted(layers)) for cut, layers in sorted(by_cut.items(), key=lambda pair: min(pair[1]))}


def _cut(own: str, one: Repeated, place: Place, family: Family) -> Cut:
    for part in place.parts:
        if (cut := part.cut(own, one.shape)) is not None:
            return cut
    if place.shape.shared_blocks is not None:
        if not own.startswith(f"{BLOCK}."):
            return STREAM
        own = own.removeprefix(f"{BLOCK}.")
        if "_adapter_list." in own:
            return adapter_cut(own, one, lambda name: _cut(f"{BLOCK}.{name}", one, place, family))
    if place.attends and own.startswith(f"{family.attention}."):
        return attention_cut(own.removeprefix(f"{family.attention}."), one, place.shape, family)
    if family.experts is not None and place.routed:
        cut = _of_experts(own, one, family, family.experts)
        if cut is not None:
            return cut
    prefix = f"{family.mlp}." if family.mlp else ""
    return mlp_cut(own.removeprefix(prefix), one, family) if own.startswith(prefix) else STREAM


def _of_experts(own: str, one: Repeated, family: Family, experts: Experts) -> Cut | None:
    if (part := experts.part_of(own, family.mlp)) is None:
        return None
    in_block, name = part
    return block_cut(name, one, family, experts) if in_block else mlp_cut(name, one, family)


_ADAPTER = re.compile(
    r"^(?P<block>\w+)\.(?:linear_(?P<kind>[qkv])|(?P<up>\w+))_adapter_list\.\d+\.(?P<place>[01])\.weight$"
)


def adapter_cut(own: str, one: Repeated, cut_of: Callable[[str], Cut]) -> Cut:
    """The cut of a matrix of an adapter: the second is cut as the projection that it is added to."""
    found = _ADAPTER.match(own)
    if found is None:
        raise ValueError(f"{one.name} is no adapter of a shared block")
    if found["place"] == "0":
        return PARTIAL  # every rank computes it for its own rows of the second matrix
    name = found["up"] or f"{found['kind']}_proj"
    return cut_of(f"{found['block']}.{name}.weight")
