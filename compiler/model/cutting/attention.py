"""How the attention of a layer is cut: by heads."""

from __future__ import annotations

from collections.abc import Mapping

from parcompile.model.family import Family
from parcompile.model.shape import ModelShape
from parcompile.model.table import Part, Split
from parcompile.model.tables import Repeated

from .cut import FROZEN, PARTIAL, STREAM, Cut, columns, rows
from .keys import leading_key, own_key

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


def attention_cut(module: str, one: Repeated, shape: ModelShape, family: Family) -> Cut:
    """The cut of `module` (`q_proj.weight`) in layers of this shape."""
    if module.startswith(("indexer.", "compressor.indexer.")):
        return FROZEN  # all ranks have to choose the same keys
    name, _, kind = module.rpartition(".")
    if shape.low_rank is not None and name in (_OF_GROUPS, _BEHIND_GROUPS):
        groups = Part(shape.low_rank.output_groups * shape.low_rank.output_rank, shape.low_rank.output_groups)
        return Cut(Split(0, (groups,))) if name == _OF_GROUPS else rows(groups, transposed=False)
    bias, dims, heads = kind == "bias", len(one.shape), shape.num_attention_heads
    if kind in ("weight", "bias") and name in OUTPUTS:
        size = heads * shape.value_dim
        pairs = heads // 2 if shape.paired_heads else heads
        return STREAM if bias else rows(Part(size, pairs), transposed=family.transposed)
    if kind in ("weight", "bias") and name in PROJECTIONS:
        whole = _projected(PROJECTIONS[name], family, shape)
        if shape.paired_heads:
            whole = tuple(half for part in whole for half in (Part(part.size // 2, part.units // 2),) * 2)
        return columns(whole, dims, transposed=family.transposed)
    of_queries = {family.gate, *(_OF_HEADS if shape.mla or shape.low_rank else ())} - {""}
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
    if family.query_gate or shape.mla:
        sizes["q"] = 2 * width if shape.mla is None else shape.mla.qk_head_dim
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
