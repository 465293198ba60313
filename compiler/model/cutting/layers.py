"""How the parameters of a layer are cut, by what the layer consists of."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from parcompile.model.family import Experts, Family
from parcompile.model.recurrent.shape import RecurrentKind, RecurrentShape
from parcompile.model.shape import ModelShape
from parcompile.model.shared_blocks import BLOCK
from parcompile.model.table import Part, Split
from parcompile.model.tables import Repeated

from .cut import PARTIAL, STREAM, Cut, rows
from .parts import attention_cut, block_cut, mlp_cut

# How layers that carry a state are cut: by groups of heads, or by channels.

_SCALARS = ("A_log", "D", "dt_bias")


def recurrent_cut(module: str, dims: int, shape: RecurrentShape) -> Cut:
    """The cut of `module` (`in_proj.weight`), a parameter of that many dims, in a layer with a state of this shape."""
    name, _, kind = module.rpartition(".")
    own = (name if kind in ("weight", "bias") else module).rpartition(".")[2]
    if own in ("out_proj", "o_proj"):
        return STREAM if kind == "bias" else rows(Part(shape.values, _units(shape)), transposed=False)
    if own == "x_proj":
        return rows(Part(shape.values, shape.values), transposed=False)
    parts = _OF_KIND.get(shape.kind, _of_heads)(shape).get(own)
    if parts is None:
        return PARTIAL  # one for all heads, or few features of which every rank makes those of its own heads
    return Cut(Split(dims // 2 if own in _SCALARS and dims > len(_SCALARS) else 0, parts))


def _units(shape: RecurrentShape) -> int:
    """The pieces of what the output projection takes that are never cut."""
    if shape.kind in (RecurrentKind.MAMBA1, RecurrentKind.SHORT_CONVOLUTION):
        return shape.values
    return shape.heads if shape.kind is RecurrentKind.MAMBA2 else shape.groups


_Parts = dict[str, tuple[Part, ...]]


def _of_channels(shape: RecurrentShape) -> _Parts:
    channels = (Part(shape.values, shape.values),)
    return {**dict.fromkeys(("A_log", "D", "conv1d", "dt_proj"), channels), "in_proj": channels * 2}


def _of_state_space(shape: RecurrentShape) -> _Parts:
    fused = input_parts(shape)
    return {
        **dict.fromkeys(_SCALARS, fused[4:]),
        "conv1d": fused[1:4],
        "in_proj": fused,
        "norm": fused[:1],
    }


def input_parts(shape: RecurrentShape) -> tuple[Part, ...]:
    """What the input projection of a Mamba-2 layer gives.

    Gate, channels of the convolution (x, B, C), and a step size of each head. Tensor parallelism cuts heads, and groups
    with them; ranks that have heads of one group hold its rows each.
    """
    values, groups = Part(shape.values, shape.heads), Part(shape.keys, shape.groups)
    return values, values, groups, groups, Part(shape.heads, shape.heads)


def _of_convolution(shape: RecurrentShape) -> _Parts:
    channels = (Part(shape.values, shape.values),)
    return {"conv": channels, "in_proj": channels * 3}  # two gates and the values


def _of_heads(shape: RecurrentShape) -> _Parts:
    """Of layers whose heads have a matrix each."""
    groups = shape.groups
    keys, values, heads = (Part(size, groups) for size in (shape.keys, shape.values, shape.heads))
    found: _Parts = {
        # A group has its query, its key, its values and their gates one after the other.
        "in_proj_qkvz": (Part(2 * (shape.keys + shape.values), groups),),
        "in_proj_ba": (Part(2 * shape.heads, groups),),
        # A head has its query, its key and its value one after the other.
        "qkv_proj": (Part(shape.channels, groups),),
        **dict.fromkeys(("in_proj_qkv", "conv1d"), (keys, keys, values)),
        **dict.fromkeys(("q_proj", "k_proj"), (keys,)),
        **dict.fromkeys(("in_proj_z", "v_proj", "g_proj", "f_proj", "output_gate", "f_b_proj", "g_b_proj"), (values,)),
        **dict.fromkeys(("in_proj_b", "in_proj_a", "b_proj", "a_proj", "dt_bias", "A_log"), (heads,)),
    }
    if shape.kind is RecurrentKind.KIMI_DELTA_ATTENTION:
        found["dt_bias"] = (values,)  # a decay for each channel
    if shape.kind is RecurrentKind.LIGHTNING_ATTENTION:
        found["norm"] = (values,)  # over all heads together
    return found


_OF_KIND = {
    RecurrentKind.MAMBA1: _of_channels,
    RecurrentKind.MAMBA2: _of_state_space,
    RecurrentKind.SHORT_CONVOLUTION: _of_convolution,
}


# How the parameters of a layer are cut, by what the layer consists of.


@dataclass(frozen=True, slots=True)
class Place:
    """What layers of one kind consist of."""

    shape: ModelShape
    """A model all of whose layers have the heads and widths of this one."""
    carries_state: bool
    attends: bool
    routed: bool
    """It has experts."""


def places_of(shape: ModelShape) -> list[tuple[Place, frozenset[int]]]:
    """The kinds of a model's layers, each with the numbers of its layers."""
    every = range(shape.num_hidden_layers)
    states = frozenset(shape.recurrent.layers if shape.recurrent is not None else ())
    attending, routed = frozenset(shape.attention_layers), frozenset[int]()
    if shape.blocks is not None:
        routed = frozenset(shape.blocks.experts)
        states -= attending | routed | frozenset(shape.blocks.mlp) if shape.shared_blocks is None else frozenset()
    elif shape.moe is not None:
        routed = frozenset(shape.moe.routed(len(every)))
    kinds = list(shape.by_kind)
    number_of = {layer: number for number, (layers, _) in enumerate(kinds) for layer in layers}
    found: dict[tuple[int, bool, bool, bool], list[int]] = {}
    for layer in every:
        key = (number_of.get(layer, -1), layer in states, layer in attending, layer in routed)
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
    for part in place.shape.parts:
        if (cut := part.cut(own, one.shape)) is not None:
            return cut
    states = place.shape.recurrent
    if states is not None and place.carries_state and family.recurrent is not None:
        traits = family.recurrent
        for prefix in (f"{traits.module}.", f"{traits.inside}.{traits.module}."):
            if own.startswith(prefix):
                return recurrent_cut(own.removeprefix(prefix), len(one.shape), states)
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
    if experts.beside_mlp:
        return block_cut(own, one, family, experts) if own.startswith("experts.") else None
    if own.startswith(f"{experts.block}."):
        return block_cut(own.removeprefix(f"{experts.block}."), one, family, experts)
    if experts.beside not in ("", family.mlp) and own.startswith(f"{experts.beside}."):
        return mlp_cut(own.removeprefix(f"{experts.beside}."), one, family)
    return None


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
