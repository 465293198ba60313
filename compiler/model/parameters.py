"""Every parameter of a model in the order in which Hugging Face registers it, with how tensor parallelism cuts it."""

from __future__ import annotations

from dataclasses import replace

from .altup import projections_of_altup, rows_of_altup
from .derived_rows import by_hand, derived_rows
from .families import FAMILIES
from .family import Family, Norm, QkNorm
from .indexer import IndexerShape
from .layer_inputs import rows_of_inputs, tables_of_inputs
from .layer_runs import LayerRuns
from .recurrent.rows import recurrent_rows
from .rows import Rows, kinds
from .shape import ModelShape
from .shared_block_rows import SharedSizes, shared_rows
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
    if shape.runs is not None:
        return _stacked(shape, shape.runs, family)
    h, v, layers = shape.hidden_size, shape.vocab_size, range(shape.num_hidden_layers)
    rows = Rows(f"{family.base}.{family.layers}.{{layer}}.", layers, family.transposed)
    norm = family.holds(bias=shape.norm_bias)
    for part in family.order:
        if part == "attention":
            if "recurrent" not in family.order:
                _recurrent(rows, shape, family)
            for numbers, one in shape.by_kind:
                (_latent_attention if shape.mla else _attention)(rows.of(numbers), one, family)
        elif part == "mlp":
            _feed_forward(rows, shape, family)
        elif part == "recurrent":
            _recurrent(rows, shape, family)
        elif part == "shared_blocks":
            _shared_blocks(rows, shape)
        elif part == "layer_inputs":
            if shape.layer_inputs is not None:
                rows_of_inputs(rows, shape.layer_inputs, h)
        elif part == "altup":
            if shape.altup is not None:
                rows_of_altup(rows, shape.altup, h)
        elif part == "experts":
            if shape.moe is not None:
                _experts_of_layer(rows, shape, family)
        elif part == "norms" and shape.norm_gate:
            _gated_norms(rows, shape, family)
        else:
            own = family.recurrent is not None and family.recurrent.norms
            attending = rows.of(shape.attention_layers) if own and part == "norms" else rows
            for name in shape.norm_names if part == "norms" else (part,):
                attending.norm(name, h, norm)
    before = [Parameter(f"{family.base}.{family.initial_state}", (h,), trained=False)] if family.initial_state else []
    before.append(Parameter(f"{family.base}.{family.embedding}.weight", (v, h), vocabulary(v)))
    if family.positions:
        size = (shape.max_position_embeddings, h)
        before.append(Parameter(f"{family.base}.{family.positions}.weight", size, sequence_parallel=True))
    if family.embedding_norm:
        before += [
            Parameter(f"{family.base}.{family.embedding_norm}.{kind}", (h,), sequence_parallel=True)
            for kind in kinds(norm)
        ]
    late = [] if shape.layer_inputs is None else tables_of_inputs(family.base, shape.layer_inputs, h, len(layers))
    after = [
        Parameter(f"{family.base}.{family.final_norm}.{kind}", (h,), sequence_parallel=True)
        for kind in (kinds(norm) if family.final_norm else ())
    ]
    if shape.altup is not None:
        late += projections_of_altup(family.base, "altup_projections", shape.altup, h)
    norms = len(after)
    if shape.altup is not None:
        after += projections_of_altup(family.base, "altup_unembed_projections", shape.altup, h)
    if not shape.tie_word_embeddings:
        after.append(Parameter(f"{family.head}.weight", (v, h), vocabulary(v)))
    if shape.head_bias:
        after.append(Parameter(f"{family.head}.bias", (v,), vocabulary(v)))
    return ParameterTable(
        (*before, *late), tuple(rows.rows), tuple(after), len(layers), 0, len(late), norms if late else 0
    )


def _stacked(shape: ModelShape, runs: LayerRuns, family: Family) -> ParameterTable:
    """Of stacks whose layers run several times: the rows of one stack, for the first run of each."""
    one = _decoder(replace(shape, runs=None, num_hidden_layers=runs.layers), family)
    prefix = f"{family.base}.{family.layers}."
    rows = tuple(
        replace(
            row,
            name=f"{family.base}.{name}.{row.name.removeprefix(prefix)}",
            layers=tuple(layer + first for layer in row.layers or ()),
            first=first,
        )
        for name, first in runs.stacks
        for row in one.layer
    )
    return replace(one, layer=rows, num_layers=runs.total)


def _recurrent(rows: Rows, shape: ModelShape, family: Family) -> None:
    if shape.recurrent is not None and family.recurrent is not None:
        for name in family.recurrent.norms:
            rows.of(shape.recurrent.layers).norm(name, shape.hidden_size, family.norm)
        recurrent_rows(rows, shape.hidden_size, shape.recurrent, family.recurrent)


def _shared_blocks(rows: Rows, shape: ModelShape) -> None:
    assert shape.shared_blocks is not None
    assert shape.recurrent is not None
    sizes = SharedSizes(
        shape.hidden_size,
        shape.intermediate_size,
        shape.num_attention_heads,
        shape.num_key_value_heads,
        shape.head_dim,
        shape.mlp_bias,
    )
    shared_rows(rows, shape.shared_blocks, shape.recurrent, sizes)


def _attention(rows: Rows, shape: ModelShape, family: Family) -> None:
    h, heads, kv_heads, width = shape.hidden_size, shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
    name, values = family.attention, shape.value_dim
    projected = shape.keys_and_values.value

    def output() -> None:
        size = heads * values
        # A pair of heads gives one output, twice as wide.
        units = heads // 2 if shape.paired_heads else heads
        rows.linear(f"{name}.{family.output}", h, size, row(size, units), bias=shape.attention_output_bias)

    def norms(wanted: str) -> None:
        for norm, kind, count in zip(family.qk_norm_names, "qk", (heads, kv_heads), strict=True):
            if kind in projected and kind in wanted:
                _qk_norm(rows, f"{name}.{norm}", count, width, family)

    if family.sinks and shape.sinks:
        rows.add(f"{name}.{family.sinks}", (heads,), column(heads))
    counts = {"q": heads, "k": kv_heads, "v": kv_heads}
    widths = {"q": width, "k": width, "v": values}
    parts = [Part(counts[kind] * widths[kind], counts[kind]) for kind in family.qkv_parts]
    if family.query_gate:
        parts[0] = Part(2 * heads * width, heads)
    if family.heads_interleaved and kv_heads > 1:
        # Queries, key and value follow one another, kv head by kv head: one part whose units are those.
        parts = [Part((heads + 2 * kv_heads) * width, kv_heads)]
    if family.fused_blocks:
        parts = [Part((heads + 2 * kv_heads) * width, family.fused_blocks)]
    if len(family.qkv) == 1:
        size = sum(part.size for part in parts)
        rows.linear(f"{name}.{family.qkv[0]}", size, h, Split(0, tuple(parts)), bias=shape.qkv_bias)
    else:
        for kind, projection, part in zip(family.qkv_parts, family.qkv, parts, strict=True):
            if kind not in projected:
                continue
            halves = (Part(part.size // 2, part.units // 2),) * 2 if shape.paired_heads else (part,)
            rows.linear(f"{name}.{projection}", part.size, h, Split(0, halves), bias=shape.qkv_bias)
            if kind == "q" and family.qk_norms_behind != "all":
                norms("qk" if family.qk_norms_behind == "queries" else "q")
            if kind == "v" and family.qk_norms_behind == "own":
                norms("k")
    output()
    if shape.qk_norm and family.qk_norms_behind == "all":
        norms("qk")
    if shape.attention_gate and family.gate:
        size = heads * shape.attention_gate
        bias = family.gate_as_queries and shape.qkv_bias
        rows.linear(f"{name}.{family.gate}", size, h, column(size, heads), bias=bias)


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
        taken = mla.q_lora_rank
        if family.query_gate:
            queries, taken = queries + heads * shape.attention_gate, 2 * taken
        projection = family.gate if family.query_gate else "q_b_proj"
        rows.linear(f"{name}.{projection}", queries, taken, column(queries, heads))
    compressed("kv_a_proj_with_mqa", mla.kv_lora_rank + mla.qk_rope_head_dim, mla.kv_lora_rank)
    rows.linear(f"{name}.kv_b_proj", keys_values, mla.kv_lora_rank, column(keys_values, heads))
    size = heads * mla.v_head_dim
    rows.linear(f"{name}.{family.output}", h, size, row(size, heads), bias=shape.attention_output_bias)
    if family.rotated_norm:
        rows.add(f"{name}.{family.rotated_norm}.weight", (mla.qk_rope_head_dim,), partial=True)
    if shape.attention_gate and family.gate and not family.query_gate:
        gates = heads * shape.attention_gate
        rows.linear(f"{name}.{family.gate}", gates, h, column(gates, heads))
    if shape.indexer is not None and (own := tuple(set(shape.indexer.layers) & set(rows.layers))):
        assert mla.q_lora_rank is not None, "an indexer takes the compressed queries"
        _indexer(rows.of(tuple(sorted(own))), f"{name}.indexer", h, mla.q_lora_rank, shape.indexer)


def _gated_norms(rows: Rows, shape: ModelShape, family: Family) -> None:
    """Norms behind which a rank gates its own tokens; those behind the first do so in layers with experts only."""
    h, every = shape.hidden_size, range(shape.num_hidden_layers)
    dense = [layer for layer in every if not shape.routed(range(layer, layer + 1))]
    for place, name in enumerate(shape.norm_names):
        gated = tuple(layer for layer in every if place == 0 or layer not in dense)
        if plain := tuple(layer for layer in every if layer not in gated):
            rows.of(plain).norm(name, h, family.norm)
        if gated:
            own = rows.of(gated)
            own.norm(f"{name}.norm", h, family.norm)
            own.add(f"{name}.mlp.fc1.weight", (shape.norm_gate, h), sequence_parallel=True)
            own.add(f"{name}.mlp.fc2.weight", (h, shape.norm_gate), sequence_parallel=True)


_INDEXER_PARAMETERS = 5


def _indexer(rows: Rows, name: str, hidden: int, query_rank: int, shape: IndexerShape) -> None:
    # Whole on every rank, which all have to choose the same keys. Nothing of it gets a gradient.
    rows.linear(f"{name}.wq_b", shape.heads * shape.head_dim, query_rank, None)
    rows.linear(f"{name}.wk", shape.head_dim, hidden, None)
    for kind in kinds(Norm.WEIGHT_AND_BIAS):
        rows.add(f"{name}.k_norm.{kind}", (shape.head_dim,))
    rows.linear(f"{name}.weights_proj", shape.heads, hidden, None)
    added = len(rows.rows) - _INDEXER_PARAMETERS
    rows.rows[added:] = [replace(one, trained=False) for one in rows.rows[added:]]


def _feed_forward(rows: Rows, shape: ModelShape, family: Family) -> None:
    if shape.blocks is not None:
        if shape.blocks.mlp:
            _mlp(rows, shape, family, family.mlp, shape.intermediate_size, shape.blocks.mlp)
        if shape.blocks.experts:
            _experts(rows, shape, family, shape.blocks.experts)
        return
    beside = family.experts is not None and family.experts.beside_mlp
    every: Layers = range(len(rows.layers))
    routed = shape.moe.routed(len(every)) if shape.moe is not None and not beside else ()
    first = routed[0] if routed else len(every)
    # One stretch, where there is one: rows of a stage are found in it at once.
    dense = range(first) if list(routed) == list(every[first:]) else tuple(one for one in every if one not in routed)
    if not shape.kinds and dense:
        _mlp(rows, shape, family, family.mlp, shape.intermediate_size, dense)
    for numbers, one in shape.by_kind if shape.kinds else ():
        if held := tuple(layer for layer in numbers if layer in dense):
            _mlp(rows, one, family, family.mlp, one.intermediate_size, held)
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


def _experts_of_layer(rows: Rows, shape: ModelShape, family: Family) -> None:
    """Router and experts that a layer itself has beside its MLP: the router sees the rank's own tokens."""
    moe, names, h = shape.moe, family.experts, shape.hidden_size
    assert moe is not None
    assert names is not None
    experts, f = moe.num_experts, moe.intermediate_size
    rows.add(f"{names.router}.scale", (h,), sequence_parallel=True)
    rows.add(f"{names.router}.per_expert_scale", (experts,), sequence_parallel=True)
    rows.add(f"{names.router}.proj.weight", (experts, h), sequence_parallel=True)
    both = Split(1, (Part(f, f), Part(f, f)))
    rows.add("experts.gate_up_proj", (experts, 2 * f, h), both, expert_dim=0)
    rows.add("experts.down_proj", (experts, h, f), Split(2, (Part(f, f),)), expert_dim=0)
    for name in names.norms:
        rows.norm(name, h)


def _experts(rows: Rows, shape: ModelShape, family: Family, layers: Layers) -> None:
    moe, names = shape.moe, family.experts
    assert moe is not None
    assert names is not None
    h, experts, f = shape.hidden_size, moe.num_experts, moe.intermediate_size

    def replicated(name: str, size: tuple[int, ...]) -> None:
        # The tokens of the whole sequence pass the router on every rank, and come back from the rank's slice of the
        # experts: the gradient is a part.
        rows.add(f"{names.block}.{name}", size, layers=layers, partial=True)

    def router() -> None:
        replicated(f"{names.router}.weight", (experts, h))

    def shared() -> None:
        if moe.shared_intermediate_size and names.shared:
            _mlp(rows, shape, family, f"{names.block}.{names.shared}", moe.shared_intermediate_size, layers)

    def expert(name: str, size: tuple[int, ...], split: Split | None, *, partial: bool = False) -> None:
        name = f"{names.block}.experts.{name}"
        rows.add(name, size, split, expert_dim=0, layers=layers, partial=partial)

    if names.router_first:
        router()
    # Pairs of a gate and an up column stay together where they alternate.
    up = (Part(2 * f, f),) if names.interleaved else (Part(f, f), Part(f, f))
    across, along = (2, 1) if names.transposed else (1, 2)
    if names.gated:
        expert("gate_up_proj", (experts, h, 2 * f) if names.transposed else (experts, 2 * f, h), Split(across, up))
    else:
        expert("up_proj", (experts, f, h), Split(1, (Part(f, f),)))
    expert("down_proj", (experts, f, h) if names.transposed else (experts, h, f), Split(along, (Part(f, f),)))
    if not names.router_first:
        router()
    shared()
    if names.shared_gate:
        replicated(f"{names.shared_gate}.weight", (1, h))
    if names.norm_after:
        rows.add(f"{names.block}.{names.norm_after}.weight", (h,), layers=layers, sequence_parallel=True)
    if names.beside and moe.shared_intermediate_size:
        wide = moe.shared_intermediate_size
        both = Split(0, (Part(wide, wide),) * 2)
        rows.linear(f"{names.beside}.input_linear", 2 * wide, h, both, layers=layers)
        rows.linear(f"{names.beside}.output_linear", h, wide, row(wide), layers=layers)
