"""Every parameter of a model, in the order in which it registers them, with how tensor parallelism cuts each.

Rows of the types of transformers come from their derived tables; those of plug-ins' families are written here.
"""

from __future__ import annotations

from .derived_rows import by_hand, derived_rows
from .families import FAMILIES
from .family import Family
from .plug_in_traits import QkNorm
from .rows import Rows, kinds
from .shape import ModelShape
from .table import Layers, Parameter, ParameterTable, Part, Split, column, row, vocabulary
from .user_parameters import user_module_table


def parameter_table(shape: ModelShape) -> ParameterTable:
    """The parameters of a model of this shape."""
    if shape.user_module is not None:
        return user_module_table(shape, shape.user_module)
    if not by_hand(shape.model_type):
        return derived_rows(shape)
    return _decoder(shape, FAMILIES[shape.model_type])


def _decoder(shape: ModelShape, family: Family) -> ParameterTable:
    """Of a plug-in's family, all of whose layers have attention, and an MLP or experts."""
    h, v, layers = shape.hidden_size, shape.vocab_size, range(shape.num_hidden_layers)
    rows = Rows(f"{family.base}.{family.layers}.{{layer}}.", layers, family.transposed)
    norm = family.holds(bias=shape.norm_bias)
    for part in family.order:
        if part == "attention":
            (_latent_attention if shape.mla else _attention)(rows, shape, family)
        elif part == "mlp":
            _feed_forward(rows, shape, family)
        else:
            for name in shape.norm_names if part == "norms" else (part,):
                rows.norm(name, h, norm)
    before = [Parameter(f"{family.base}.{family.embedding}.weight", (v, h), vocabulary(v))]
    if family.positions:
        size = (shape.max_position_embeddings, h)
        before.append(Parameter(f"{family.base}.{family.positions}.weight", size, sequence_parallel=True))

    def norms(name: str) -> list[Parameter]:
        found = kinds(norm) if name else ()
        return [Parameter(f"{family.base}.{name}.{kind}", (h,), sequence_parallel=True) for kind in found]

    before += norms(family.embedding_norm)
    after = norms(family.final_norm)
    if not shape.tie_word_embeddings:
        after.append(Parameter(f"{family.head}.weight", (v, h), vocabulary(v)))
    if shape.head_bias:
        after.append(Parameter(f"{family.head}.bias", (v,), vocabulary(v)))
    return ParameterTable(tuple(before), tuple(rows.rows), tuple(after), len(layers))


def _attention(rows: Rows, shape: ModelShape, family: Family) -> None:
    h, heads, kv_heads, width = shape.hidden_size, shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
    name = family.attention
    if family.sinks and shape.sinks:
        rows.add(f"{name}.{family.sinks}", (heads,), column(heads))
    counts = {"q": heads, "k": kv_heads, "v": kv_heads}
    parts = [Part(counts[kind] * width, counts[kind]) for kind in family.qkv_parts]
    if family.heads_interleaved and kv_heads > 1:
        # Queries, key and value follow one another, kv head by kv head: one part whose units are those.
        parts = [Part((heads + 2 * kv_heads) * width, kv_heads)]
    if family.fused_blocks:
        parts = [Part((heads + 2 * kv_heads) * width, family.fused_blocks)]
    if len(family.qkv) == 1:
        size = sum(part.size for part in parts)
        rows.linear(f"{name}.{family.qkv[0]}", size, h, Split(0, tuple(parts)), bias=shape.qkv_bias)
    else:
        for projection, part in zip(family.qkv, parts, strict=True):
            rows.linear(f"{name}.{projection}", part.size, h, Split(0, (part,)), bias=shape.qkv_bias)
    rows.linear(
        f"{name}.{family.output}", h, heads * width, row(heads * width, heads), bias=shape.attention_output_bias
    )
    for norm, count in zip(family.qk_norm_names, (heads, kv_heads), strict=True) if shape.qk_norm else ():
        _qk_norm(rows, f"{name}.{norm}", count, width, family)
    if shape.attention_gate and family.gate:
        size = heads * shape.attention_gate
        rows.linear(f"{name}.{family.gate}", size, h, column(size, heads))


def _qk_norm(rows: Rows, name: str, heads: int, width: int, family: Family) -> None:
    if family.qk_norm is QkNorm.HEAD:
        # One norm for all heads, used on each rank's own heads: a sum over tp whether or not sequences are split.
        rows.add(f"{name}.weight", (width,), partial=True)
    elif family.qk_norm is QkNorm.HEADS:
        rows.add(f"{name}.weight", (heads, width), Split(0, (Part(heads, heads),)))
    else:
        rows.add(f"{name}.weight", (heads * width,), column(heads * width, heads))


def _latent_attention(rows: Rows, shape: ModelShape, family: Family) -> None:
    mla, name, bias = shape.mla, family.attention, shape.qkv_bias
    assert mla is not None
    h, heads = shape.hidden_size, shape.num_attention_heads
    queries, keys_values = heads * mla.qk_head_dim, heads * (mla.qk_nope_head_dim + mla.v_head_dim)

    def compressed(what: str, size: int, rank: int) -> None:
        # What every rank computes for its own heads: the gradient is a part.
        rows.add(f"{name}.{what}.weight", (size, h), partial=True)
        if bias:
            rows.add(f"{name}.{what}.bias", (size,), partial=True)
        rows.add(f"{name}.{what.partition('_a_')[0]}_a_layernorm.weight", (rank,), partial=True)

    if mla.q_lora_rank is None:
        rows.linear(f"{name}.q_proj", queries, h, column(queries, heads))
    else:
        compressed("q_a_proj", mla.q_lora_rank, mla.q_lora_rank)
        rows.linear(f"{name}.q_b_proj", queries, mla.q_lora_rank, column(queries, heads))
    compressed("kv_a_proj_with_mqa", mla.kv_lora_rank + mla.qk_rope_head_dim, mla.kv_lora_rank)
    rows.linear(f"{name}.kv_b_proj", keys_values, mla.kv_lora_rank, column(keys_values, heads))
    size = heads * mla.v_head_dim
    rows.linear(f"{name}.{family.output}", h, size, row(size, heads), bias=shape.attention_output_bias)


def _feed_forward(rows: Rows, shape: ModelShape, family: Family) -> None:
    every: Layers = range(len(rows.layers))
    routed = shape.moe.routed(len(every)) if shape.moe is not None else ()
    if dense := tuple(layer for layer in every if layer not in routed):
        # One stretch, where there is one: rows of a stage are found in it at once.
        layers: Layers = range(len(dense)) if dense == tuple(range(len(dense))) else dense
        _mlp(rows, shape, family, family.mlp, shape.intermediate_size, layers)
    if routed:
        _experts(rows, shape, family, routed)


def _mlp(rows: Rows, shape: ModelShape, family: Family, name: str, f: int, layers: Layers) -> None:
    h, bias = shape.hidden_size, shape.mlp_bias
    inside = family.experts is not None and name != family.mlp
    prefix = f"{name}." if name else ""
    parts = (Part(f, f),) * (2 if family.gated else 1)
    if len(family.up) == 1:
        rows.linear(
            f"{prefix}{family.up[0]}", len(parts) * f, h, Split(0, parts), bias=bias, layers=layers, inside=inside
        )
    else:
        for projection in family.up:
            rows.linear(f"{prefix}{projection}", f, h, column(f), bias=bias, layers=layers, inside=inside)
    rows.linear(f"{prefix}{family.down}", h, f, row(f), bias=bias, layers=layers, inside=inside)


def _experts(rows: Rows, shape: ModelShape, family: Family, layers: Layers) -> None:
    moe, names = shape.moe, family.experts
    assert moe is not None
    assert names is not None
    h, experts, f = shape.hidden_size, moe.num_experts, moe.intermediate_size

    def replicated(name: str, size: tuple[int, ...]) -> None:
        # The tokens of the whole sequence pass the router on every rank, and come back from the rank's slice of the
        # experts: the gradient is a part.
        rows.add(f"{names.block}.{name}", size, layers=layers, partial=True)

    def expert(name: str, size: tuple[int, ...], split: Split | None, *, partial: bool = False) -> None:
        name = f"{names.block}.experts.{name}"
        rows.add(name, size, split, expert_dim=0, layers=layers, partial=partial)

    replicated(f"{names.router}.weight", (experts, h))
    # Pairs of a gate and an up column stay together where they alternate.
    up = (Part(2 * f, f),) if names.interleaved else (Part(f, f), Part(f, f))
    across, along = (2, 1) if names.transposed else (1, 2)
    if names.gated:
        expert("gate_up_proj", (experts, h, 2 * f) if names.transposed else (experts, 2 * f, h), Split(across, up))
    else:
        expert("up_proj", (experts, f, h), Split(1, (Part(f, f),)))
    expert("down_proj", (experts, f, h) if names.transposed else (experts, h, f), Split(along, (Part(f, f),)))
    if moe.shared_intermediate_size and names.shared:
        _mlp(rows, shape, family, f"{names.block}.{names.shared}", moe.shared_intermediate_size, layers)
    if names.shared_gate:
        replicated(f"{names.shared_gate}.weight", (1, h))
