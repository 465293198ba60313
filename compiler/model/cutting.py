"""How tensor parallelism cuts the parameters that a derived table names: attention, MLPs, experts, whole layers."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from . import FROZEN, PARTIAL, STREAM, Cut, Part, Split, columns, rows
from .blocks import Block
from .family import Experts, Family
from .shape import ModelShape
from .shared_blocks import BLOCK
from .tables import Derived

# Which key of a configuration the expression of a dim counts.


@functools.cache
def leading_key(text: str) -> str | None:
    """The key that a dim is a multiple of, as the expression writes it first: `heads` of `heads * width`."""
    return _leading(ast.parse(text, mode="eval").body)


def _leading(node: ast.expr) -> str | None:
    if isinstance(node, ast.IfExp):
        return _leading(node.body)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Add):
        found = _leading(node.left)
        return found if found is not None or isinstance(node.op, ast.Add) else _leading(node.right)
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else None


def own_key(family: Family, name: str) -> str | None:
    """What the configurations of a family call a key; None where they have none."""
    return family.keys.get(name, name)


# How the MLP of a layer and its experts are cut: by the features between their projections.


def mlp_cut(module: str, one: Derived, family: Family, *, inside: bool = False) -> Cut:
    """The cut of `module` (`gate_proj.weight`); `inside` a block of experts its sum is the block's."""
    hidden, dims = own_key(family, "hidden_size"), len(one.shape)
    features = one.row.shape[-1 if family.transposed else 0]
    if module.rpartition(".")[2] not in ("weight", "bias"):
        return PARTIAL  # a number of the activation
    if features == hidden and dims == 1:
        return PARTIAL if inside else STREAM
    if features == hidden:
        width = one.shape[0 if family.transposed else -1]
        return rows(Part(width, width), transposed=family.transposed)
    size = one.shape[-1 if family.transposed else 0]
    count = 2 if features.startswith("2 * ") and leading_key(features) != hidden else 1  # all gates, then all others
    return columns((Part(size // count, size // count),) * count, dims, transposed=family.transposed)


def block_cut(module: str, one: Derived, family: Family, names: Experts) -> Cut:
    """The cut of `module` of a block of experts."""
    first, _, rest = module.partition(".")
    if first == "experts":
        return _expert_cut(rest, one, family, names)
    if names.shared and first == names.shared:
        return mlp_cut(rest, one, family, inside=True)
    if one.row.shape == (own_key(family, "hidden_size"),):
        return STREAM  # a norm of what the block gives
    if names.learns_not(module):
        return FROZEN
    # The tokens of the whole sequence pass the router on every rank, and come back from the rank's slice of the
    # experts: the gradient is a part.
    return PARTIAL


def _expert_cut(name: str, one: Derived, family: Family, names: Experts) -> Cut:
    if name == "down_proj_bias":
        # Whole on every rank, and added by the first: the gradient of the others is zero.
        return Cut(None, 0, partial=True)
    if len(one.shape) == 1:
        return PARTIAL  # a norm of what experts give, of all ranks' tokens
    hidden = own_key(family, "hidden_size") if names.taken is None else names.taken[0]
    dim = next(dim for dim, text in enumerate(one.row.shape) if dim and leading_key(text) != hidden)
    size = one.shape[dim]
    if not name.startswith("gate_up"):
        return Cut(Split(dim, (Part(size, size),)), 0)
    # Pairs of a gate and an up column stay together where they alternate.
    return Cut(Split(dim, (Part(size, size // 2),) if names.interleaved else (Part(size // 2, size // 2),) * 2), 0)


# How the attention of a layer is cut: by heads.

PROJECTIONS: Mapping[str, str] = {
    **dict.fromkeys(("q_proj", "Wq"), "q"),
    **dict.fromkeys(("k_proj", "Wk"), "k"),
    **dict.fromkeys(("v_proj", "Wv"), "v"),
    **dict.fromkeys(("qkv_proj", "query_key_value", "c_attn", "Wqkv"), "qkv"),
}
"""What classes call the projections of queries, keys and values, and of which of them each is."""
OUTPUTS = ("o_proj", "out_proj", "c_proj", "dense", "Wo")
"""What classes call the projection of what the heads give."""
_OF_HEADS = ("q_b_proj", "kv_b_proj")
"""What makes queries, and keys and values, of compressed ones: head by head."""
_OF_GROUPS = "o_a_proj"
"""What projects the outputs of each group of heads on its own."""
_BEHIND_GROUPS = "o_b_proj"
"""What takes the outputs of all groups."""


def attention_cut(module: str, one: Derived, shape: ModelShape, family: Family) -> Cut:
    """The cut of `module` (`q_proj.weight`) in layers of this shape."""
    if shape.attention.compressed is not None and (cut := shape.attention.compressed.cut(module)) is not None:
        return cut
    name, _, kind = module.rpartition(".")
    if shape.heads.low_rank is not None and name in (_OF_GROUPS, _BEHIND_GROUPS):
        groups = Part(
            shape.heads.low_rank.output_groups * shape.heads.low_rank.output_rank, shape.heads.low_rank.output_groups
        )
        return Cut(Split(0, (groups,))) if name == _OF_GROUPS else rows(groups, transposed=False)
    bias, dims, heads = kind == "bias", len(one.shape), shape.num_attention_heads
    if kind in ("weight", "bias") and name in OUTPUTS:
        size = heads * shape.value_dim
        pairs = heads // 2 if shape.heads.paired else heads
        return STREAM if bias else rows(Part(size, pairs), transposed=family.transposed)
    if kind in ("weight", "bias") and name in PROJECTIONS:
        whole = _projected(PROJECTIONS[name], family, shape)
        if shape.heads.paired:
            whole = tuple(half for part in whole for half in (Part(part.size // 2, part.units // 2),) * 2)
        return columns(whole, dims, transposed=family.transposed)
    of_queries = {family.gate, *(_OF_HEADS if shape.attention.projections or shape.heads.low_rank else ())} - {""}
    of_heads = name in of_queries or (family.sinks and module == family.sinks)
    units = heads if of_heads else _heads_of(one.row.shape[0], shape, family)
    if units is not None:
        return Cut(Split(0, (Part(one.shape[0], units),)))
    # One for all heads, used on each rank's own: a sum over tp whether or not sequences are split.
    return STREAM if one.row.shape == (own_key(family, "hidden_size"),) else PARTIAL


def _projected(kinds: str, family: Family, shape: ModelShape) -> tuple[Part, ...]:
    """The queries, keys or values of a projection; of all three, in the order of its parts."""
    fused = len(kinds) > 1
    heads, kv_heads, width = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
    if fused and family.heads_interleaved and kv_heads > 1:
        # Queries, key and value follow one another, kv head by kv head: one part whose units are those.
        return (Part((heads + 2 * kv_heads) * width, kv_heads),)
    if fused and family.fused_blocks:
        return (Part((heads + 2 * kv_heads) * width, family.fused_blocks),)
    sizes = {"q": width, "k": width, "v": shape.value_dim}
    if family.query_gate or shape.attention.projections:
        sizes["q"] = 2 * width if shape.attention.projections is None else shape.attention.projections.key_dim
    counts = {"q": heads, "k": kv_heads, "v": kv_heads}
    return tuple(Part(counts[kind] * sizes[kind], counts[kind]) for kind in (family.qkv_parts if fused else kinds))


def _heads_of(text: str, shape: ModelShape, family: Family) -> int | None:
    """How many heads a dim is made of, as its expression says; None where it is not made of heads."""
    key = leading_key(text)
    if key == own_key(family, "num_attention_heads"):
        return shape.num_attention_heads
    if family.hidden_is_heads and key == own_key(family, "hidden_size"):
        return shape.num_attention_heads
    return shape.num_key_value_heads if key == own_key(family, "num_key_value_heads") else None


# How the parameters of a layer are cut, by what the layer consists of.


class Place(NamedTuple):
    """What layers of one kind consist of."""

    shape: ModelShape
    """A model all of whose layers have the heads and widths of this one."""
    parts: tuple[Block, ...]
    """The mechanisms that they have."""
    attends: bool
    routed: bool
    """It has experts."""
    layers: frozenset[int]


def places_of(shape: ModelShape) -> list[Place]:
    """The kinds of a model's layers."""
    every = range(shape.num_hidden_layers)
    attending, routed = frozenset(shape.attention_layers), frozenset[int]()
    if shape.stack.blocks is not None:
        routed = frozenset(shape.stack.blocks.experts)
    elif shape.moe is not None:
        routed = frozenset(shape.moe.routed(len(every)))
    kinds = list(shape.by_kind)
    number_of = {layer: number for number, (layers, _) in enumerate(kinds) for layer in layers}
    layers_of_parts = [frozenset(one.layers) for one in shape.parts]
    layers_of: dict[tuple[int, tuple[int, ...], bool, bool], list[int]] = {}
    for layer in every:
        parts = tuple(number for number, layers in enumerate(layers_of_parts) if layer in layers)
        key = (number_of.get(layer, -1), parts, layer in attending, layer in routed)
        layers_of.setdefault(key, []).append(layer)
    found = []
    for (kind, numbers, attends, has_experts), layers in layers_of.items():
        like, blocks = shape if kind < 0 else kinds[kind][1], tuple(shape.parts[number] for number in numbers)
        found.append(Place(like, blocks, attends, has_experts, frozenset(layers)))
    return found


def cuts_of(own: str, one: Derived, places: Sequence[Place], family: Family) -> dict[Cut, tuple[int, ...]]:
    """The cuts of a parameter that layers call `own`, each with its layers, those of the first layer first."""
    by_cut: dict[Cut, list[int]] = {}
    for place in places:
        if here := [layer for layer in one.layers or () if layer in place.layers]:
            by_cut.setdefault(_cut(own, one, place, family), []).extend(here)
    return {cut: tuple(sorted(layers)) for cut, layers in sorted(by_cut.items(), key=lambda pair: min(pair[1]))}


def _cut(own: str, one: Derived, place: Place, family: Family) -> Cut:
    for part in place.parts:
        if (cut := part.cut(own, one.shape)) is not None:
            return cut
    if place.shape.stack.shared_blocks is not None:
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


def _of_experts(own: str, one: Derived, family: Family, experts: Experts) -> Cut | None:
    if (part := experts.part_of(own, family.mlp)) is None:
        return None
    in_block, name = part
    return block_cut(name, one, family, experts) if in_block else mlp_cut(name, one, family)


_ADAPTER = re.compile(
    r"^(?P<block>\w+)\.(?:linear_(?P<kind>[qkv])|(?P<up>\w+))_adapter_list\.\d+\.(?P<place>[01])\.weight$"
)


def adapter_cut(own: str, one: Derived, cut_of: Callable[[str], Cut]) -> Cut:
    """The cut of a matrix of an adapter: the second is cut as the projection that it is added to."""
    found = _ADAPTER.match(own)
    if found is None:
        raise ValueError(f"{one.name} is no adapter of a shared block")
    if found["place"] == "0":
        return PARTIAL  # every rank computes it for its own rows of the second matrix
    name = found["up"] or f"{found['kind']}_proj"
    return cut_of(f"{found['block']}.{name}.weight")
