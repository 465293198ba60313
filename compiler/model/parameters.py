"""Every parameter of a model in the order in which Hugging Face registers it, with how tensor parallelism cuts it.

A parameter is cut along one dim. What lies along that dim is made of *parts* (query, key and value of a fused
projection, say), each cut on its own, and a part is made of indivisible *units* (attention heads; single rows for an
MLP). A part with fewer units than ranks is replicated: consecutive ranks share a unit. This one rule covers columns,
rows, heads, kv heads and fused projections.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from .shape import ModelShape


@dataclass(frozen=True, slots=True)
class Part:
    """`size` elements along the cut dim, in `units` equal pieces that are never cut."""

    size: int
    units: int


@dataclass(frozen=True, slots=True)
class Split:
    """How tensor parallelism cuts a parameter: along `dim`, each of `parts` on its own.

    `pads_vocabulary` marks the embedding and the head, whose rows are padded before they are cut.
    """

    dim: int
    parts: tuple[Part, ...]
    pads_vocabulary: bool = False


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter, or one of every layer (`{layer}` in the name); `shape` is that of the whole, unpadded tensor."""

    name: str
    shape: tuple[int, ...]
    split: Split | None = None
    expert_dim: int | None = None
    """The dim that expert parallelism cuts, for the weights of routed experts."""
    layers: range | None = None
    """The layers that have it; None when it stands outside the layers."""
    sequence_parallel: bool = False
    """Used on a shard of the sequence under sequence parallelism: its gradient is summed over tp."""

    @property
    def numel(self) -> int:
        """Elements of one such tensor."""
        return math.prod(self.shape)

    @property
    def count(self) -> int:
        """How many such tensors the model has."""
        return 1 if self.layers is None else len(self.layers)


@dataclass(frozen=True, slots=True)
class ParameterTable:
    """All parameters: those before the layers, those of the layers, those after them."""

    before: tuple[Parameter, ...]
    layer: tuple[Parameter, ...]
    after: tuple[Parameter, ...]
    num_layers: int

    def __iter__(self) -> Iterator[Parameter]:
        """Each row once, layers not repeated."""
        yield from self.before
        yield from self.layer
        yield from self.after

    def expanded(self) -> Iterator[tuple[str, Parameter]]:
        """Name and parameter of every tensor, in Hugging Face's order."""
        for parameter in self.before:
            yield parameter.name, parameter
        for index in range(self.num_layers):
            for parameter in self.layer:
                if parameter.layers is not None and index in parameter.layers:
                    yield parameter.name.format(layer=index), parameter
        for parameter in self.after:
            yield parameter.name, parameter

    @property
    def numel(self) -> int:
        """Parameters of the whole model, tied weights counted once."""
        return sum(parameter.numel * parameter.count for parameter in self)


def parameter_table(shape: ModelShape) -> ParameterTable:
    """The parameters of a model of this shape."""
    if shape.model_type == "gpt2":
        return _gpt2(shape)
    if shape.model_type == "gpt_neox":
        return _gpt_neox(shape)
    return _llama_like(shape)


@dataclass
class _Rows:
    """Collects the rows of a table; the prefix of the layers is written once."""

    prefix: str
    layers: range
    rows: list[Parameter] = field(default_factory=list)

    def add(
        self,
        name: str,
        shape: tuple[int, ...],
        split: Split | None = None,
        *,
        expert_dim: int | None = None,
        layers: range | None = None,
        sequence_parallel: bool = False,
    ) -> None:
        self.rows.append(
            Parameter(self.prefix + name, shape, split, expert_dim, layers or self.layers, sequence_parallel)
        )

    def linear(self, name: str, out_size: int, in_size: int, split: Split | None, *, bias: bool = False) -> None:
        """A linear's weight [out, in] and its bias; the bias of a row-parallel linear (split along dim 1) is whole."""
        self.add(f"{name}.weight", (out_size, in_size), split)
        if bias:
            cut = split if split is not None and split.dim == 0 else None
            self.add(f"{name}.bias", (out_size,), cut, sequence_parallel=cut is None)

    def norm(self, name: str, width: int, *, bias: bool = False, in_sequence_region: bool = True) -> None:
        self.add(f"{name}.weight", (width,), sequence_parallel=in_sequence_region)
        if bias:
            self.add(f"{name}.bias", (width,), sequence_parallel=in_sequence_region)


def column(size: int, units: int | None = None) -> Split:
    """Cut along the output rows of a [out, in] weight."""
    return Split(0, (Part(size, units or size),))


def row(size: int, units: int | None = None) -> Split:
    """Cut along the input columns of a [out, in] weight."""
    return Split(1, (Part(size, units or size),))


def vocabulary(size: int) -> Split:
    """Cut along the padded vocabulary."""
    return Split(0, (Part(size, size),), pads_vocabulary=True)


def _llama_like(shape: ModelShape) -> ParameterTable:
    h, layers = shape.hidden_size, range(shape.num_hidden_layers)
    rows = _Rows("model.layers.{layer}.", layers)
    if shape.mla is not None:
        _latent_attention(rows, shape)
    else:
        _attention(rows, shape)
    first_moe = shape.moe.first_moe_layer if shape.moe else len(layers)
    if first_moe > 0:
        _gated_mlp(rows, shape, layers=range(first_moe))
    if shape.moe is not None:
        _experts(rows, shape, range(first_moe, len(layers)))
    rows.norm("input_layernorm", h)
    rows.norm("post_attention_layernorm", h)
    if shape.norms_per_layer == 4:
        rows.norm("pre_feedforward_layernorm", h)
        rows.norm("post_feedforward_layernorm", h)
    after = [Parameter("model.norm.weight", (h,), sequence_parallel=True)]
    if not shape.tie_word_embeddings:
        after.append(Parameter("lm_head.weight", (shape.vocab_size, h), vocabulary(shape.vocab_size)))
    embedding = Parameter("model.embed_tokens.weight", (shape.vocab_size, h), vocabulary(shape.vocab_size))
    return ParameterTable((embedding,), tuple(rows.rows), tuple(after), len(layers))


def _attention(rows: _Rows, shape: ModelShape) -> None:
    h, heads, kv_heads, width = shape.hidden_size, shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
    bias = shape.qkv_bias
    rows.linear("self_attn.q_proj", heads * width, h, column(heads * width, heads), bias=bias)
    rows.linear("self_attn.k_proj", kv_heads * width, h, column(kv_heads * width, kv_heads), bias=bias)
    rows.linear("self_attn.v_proj", kv_heads * width, h, column(kv_heads * width, kv_heads), bias=bias)
    rows.linear("self_attn.o_proj", h, heads * width, row(heads * width, heads), bias=shape.attention_output_bias)
    if shape.qk_norm:
        # One norm for all heads, used on each rank's own heads: a sum over tp whether or not sequences are split.
        rows.norm("self_attn.q_norm", width, in_sequence_region=False)
        rows.norm("self_attn.k_norm", width, in_sequence_region=False)


def _latent_attention(rows: _Rows, shape: ModelShape) -> None:
    mla = shape.mla
    assert mla is not None
    h, heads = shape.hidden_size, shape.num_attention_heads
    queries, keys_values = heads * mla.qk_head_dim, heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    rows.linear("self_attn.q_a_proj", mla.q_lora_rank, h, None)
    rows.norm("self_attn.q_a_layernorm", mla.q_lora_rank)
    rows.linear("self_attn.q_b_proj", queries, mla.q_lora_rank, column(queries, heads))
    rows.linear("self_attn.kv_a_proj_with_mqa", mla.kv_lora_rank + mla.qk_rope_head_dim, h, None)
    rows.norm("self_attn.kv_a_layernorm", mla.kv_lora_rank)
    rows.linear("self_attn.kv_b_proj", keys_values, mla.kv_lora_rank, column(keys_values, heads))
    rows.linear("self_attn.o_proj", h, heads * mla.v_head_dim, row(heads * mla.v_head_dim, heads))


def _gated_mlp(rows: _Rows, shape: ModelShape, *, layers: range, name: str = "mlp", width: int | None = None) -> None:
    h, f = shape.hidden_size, width or shape.intermediate_size
    for projection, size, split in (
        ("gate_proj", (f, h), column(f)),
        ("up_proj", (f, h), column(f)),
        ("down_proj", (h, f), row(f)),
    ):
        rows.add(f"{name}.{projection}.weight", size, split, layers=layers)
        if shape.mlp_bias:
            cut = split if split.dim == 0 else None
            rows.add(f"{name}.{projection}.bias", size[:1], cut, layers=layers, sequence_parallel=cut is None)


def _experts(rows: _Rows, shape: ModelShape, layers: range) -> None:
    moe = shape.moe
    assert moe is not None
    h, experts, f = shape.hidden_size, moe.num_experts, moe.intermediate_size
    router = ("mlp.gate.weight", (experts, h))
    weights = (
        ("mlp.experts.gate_up_proj", (experts, 2 * f, h), Split(1, (Part(f, f), Part(f, f)))),
        ("mlp.experts.down_proj", (experts, h, f), Split(2, (Part(f, f),))),
    )
    router_first = shape.model_type == "mixtral"
    if router_first:
        rows.add(*router, layers=layers, sequence_parallel=True)
    for name, size, split in weights:
        rows.add(name, size, split, expert_dim=0, layers=layers)
    if not router_first:
        rows.add(*router, layers=layers, sequence_parallel=True)
    if moe.num_shared_experts:
        _gated_mlp(rows, shape, layers=layers, name="mlp.shared_experts", width=moe.num_shared_experts * f)


def _gpt2(shape: ModelShape) -> ParameterTable:
    h, f, heads = shape.hidden_size, shape.intermediate_size, shape.num_attention_heads
    rows = _Rows("transformer.h.{layer}.", range(shape.num_hidden_layers))

    def conv1d(name: str, in_size: int, out_size: int, split: Split) -> None:
        # GPT-2 stores [in, out]: its columns are what other models call rows.
        rows.add(f"{name}.weight", (in_size, out_size), split)
        cut = Split(0, split.parts) if split.dim == 1 else None
        rows.add(f"{name}.bias", (out_size,), cut, sequence_parallel=cut is None)

    rows.norm("ln_1", h, bias=True)
    conv1d("attn.c_attn", h, 3 * h, Split(1, (Part(h, heads),) * 3))
    conv1d("attn.c_proj", h, h, Split(0, (Part(h, heads),)))
    rows.norm("ln_2", h, bias=True)
    conv1d("mlp.c_fc", h, f, Split(1, (Part(f, f),)))
    conv1d("mlp.c_proj", f, h, Split(0, (Part(f, f),)))
    before = (
        Parameter("transformer.wte.weight", (shape.vocab_size, h), vocabulary(shape.vocab_size)),
        Parameter("transformer.wpe.weight", (shape.max_position_embeddings, h), sequence_parallel=True),
    )
    after = [Parameter(f"transformer.ln_f.{kind}", (h,), sequence_parallel=True) for kind in ("weight", "bias")]
    if not shape.tie_word_embeddings:
        after.append(Parameter("lm_head.weight", (shape.vocab_size, h), vocabulary(shape.vocab_size)))
    return ParameterTable(before, tuple(rows.rows), tuple(after), shape.num_hidden_layers)


def _gpt_neox(shape: ModelShape) -> ParameterTable:
    h, f, heads = shape.hidden_size, shape.intermediate_size, shape.num_attention_heads
    rows = _Rows("gpt_neox.layers.{layer}.", range(shape.num_hidden_layers))
    rows.norm("input_layernorm", h, bias=True)
    rows.norm("post_attention_layernorm", h, bias=True)
    # Query, key and value are interleaved head by head: one part whose units are heads.
    rows.linear("attention.query_key_value", 3 * h, h, column(3 * h, heads), bias=shape.qkv_bias)
    rows.linear("attention.dense", h, h, row(h, heads), bias=shape.attention_output_bias)
    rows.linear("mlp.dense_h_to_4h", f, h, column(f), bias=True)
    rows.linear("mlp.dense_4h_to_h", h, f, row(f), bias=True)
    embedding = Parameter("gpt_neox.embed_in.weight", (shape.vocab_size, h), vocabulary(shape.vocab_size))
    after = [
        Parameter(f"gpt_neox.final_layer_norm.{kind}", (h,), sequence_parallel=True) for kind in ("weight", "bias")
    ]
    if not shape.tie_word_embeddings:
        after.append(Parameter("lm_head.weight", (shape.vocab_size, h), vocabulary(shape.vocab_size)))
    return ParameterTable((embedding,), tuple(rows.rows), tuple(after), shape.num_hidden_layers)
