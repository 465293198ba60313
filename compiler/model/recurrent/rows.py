"""The parameters of layers that carry a state, and how tensor parallelism cuts them: by groups of heads."""

from __future__ import annotations

from parcompile.model.rows import Rows
from parcompile.model.table import Part, Split, column, row

from .kind import RecurrentKind
from .selective_rows import mamba1_rows
from .shape import RecurrentShape
from .state_space_rows import mamba2_rows
from .traits import Recurrent


def recurrent_rows(rows: Rows, hidden: int, shape: RecurrentShape, traits: Recurrent) -> None:
    """Adds the rows of a layer's module in the order in which Hugging Face registers them."""
    if shape.kind is RecurrentKind.MAMBA2:
        mamba2_rows(rows.of(shape.layers), traits.module, hidden, shape)
        return
    if traits.selective is not None:
        mamba1_rows(rows.of(shape.layers), traits.module, hidden, shape, norms=traits.selective.norms)
        return
    kinds = {RecurrentKind.SHORT_CONVOLUTION: _short_convolution}
    kinds.get(shape.kind, _heads)(rows.of(shape.layers), hidden, shape, traits)


def _short_convolution(rows: Rows, hidden: int, shape: RecurrentShape, traits: Recurrent) -> None:
    name, channels = traits.module, Part(hidden, hidden)
    rows.add(f"{name}.conv.weight", (hidden, 1, shape.kernel), column(hidden))
    if shape.convolution_bias:
        rows.add(f"{name}.conv.bias", (hidden,), column(hidden))
    # Two gates and the values.
    rows.linear(f"{name}.in_proj", 3 * hidden, hidden, Split(0, (channels,) * 3), bias=shape.projection_bias)
    rows.linear(f"{name}.out_proj", hidden, hidden, row(hidden), bias=shape.projection_bias)


def _heads(rows: Rows, hidden: int, shape: RecurrentShape, traits: Recurrent) -> None:
    """The parameters of layers whose heads have a matrix each, in the order that the family says."""
    groups = shape.groups
    keys, values = Part(shape.keys, groups), Part(shape.values, groups)
    of_heads = column(shape.heads, groups)
    sizes = {
        # A group has its query, its key, its values and their gates one after the other.
        "in_proj_qkvz": (Part(2 * (shape.keys + shape.values), groups),),
        "in_proj_ba": (Part(2 * shape.heads, groups),),
        "in_proj_qkv": (keys, keys, values),
        # A head has its query, its key and its value one after the other.
        "qkv_proj": (Part(shape.channels, groups),),
        **dict.fromkeys(("q_proj", "k_proj"), (keys,)),
        **dict.fromkeys(("in_proj_z", "v_proj", "g_proj", "f_proj", "output_gate"), (values,)),
        **dict.fromkeys(("in_proj_b", "in_proj_a", "b_proj", "a_proj"), of_heads.parts),
    }
    by_channel = shape.kind is RecurrentKind.KIMI_DELTA_ATTENTION
    for parameter in traits.parameters:
        name, own = f"{traits.module}.{parameter}", parameter.rpartition(".")[2]
        if own == "dt_bias" and by_channel:
            rows.add(name, (shape.values,), column(shape.values, groups))
        elif own in ("dt_bias", "A_log"):
            rows.add(name, (shape.heads,), of_heads)
        elif own == "A_log[1, 1, H, 1]":
            rows.add(name.partition("[")[0], (1, 1, shape.heads, 1), Split(2, of_heads.parts))
        elif own == "conv1d":
            rows.add(f"{name}.weight", (shape.channels, 1, shape.kernel), Split(0, (keys, keys, values)))
        elif own == "norm[H V]":
            rows.add(f"{name.partition('[')[0]}.weight", (shape.values,), column(shape.values, groups))
        elif own in ("norm", "o_norm"):
            # One norm for all heads, used on each rank's own heads.
            rows.add(f"{name}.weight", (shape.value_dim,), partial=True)
        elif own in ("out_proj", "o_proj"):
            rows.linear(name, hidden, shape.values, row(shape.values, groups))
        elif own in ("f_a_proj", "g_a_proj"):
            # What every rank computes for its own heads: the gradient is a part.
            rows.add(f"{name}.weight", (shape.gate_rank, hidden), partial=True)
        elif own in ("f_b_proj", "g_b_proj"):
            rows.linear(name, shape.values, shape.gate_rank, column(shape.values, groups))
        else:
            parts = sizes[own]
            rows.linear(name, sum(part.size for part in parts), hidden, Split(0, parts))
