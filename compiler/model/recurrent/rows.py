"""The parameters of layers that carry a state, and how tensor parallelism cuts them: by groups of heads."""

from __future__ import annotations

from parcompile.model.rows import Rows
from parcompile.model.table import Part, Split, column, row

from .kind import RecurrentKind
from .shape import RecurrentShape
from .traits import Recurrent


def recurrent_rows(rows: Rows, hidden: int, shape: RecurrentShape, traits: Recurrent) -> None:
    """Adds the rows of a layer's module in the order in which Hugging Face registers them."""
    kinds = {
        RecurrentKind.GATED_DELTA_NET: _gated_delta_net,
        RecurrentKind.SHORT_CONVOLUTION: _short_convolution,
    }
    kinds[shape.kind](rows.of(shape.layers), hidden, shape, traits)


def _short_convolution(rows: Rows, hidden: int, shape: RecurrentShape, traits: Recurrent) -> None:
    name, channels = traits.module, Part(hidden, hidden)
    rows.add(f"{name}.conv.weight", (hidden, 1, shape.kernel), column(hidden))
    if shape.convolution_bias:
        rows.add(f"{name}.conv.bias", (hidden,), column(hidden))
    # Two gates and the values.
    rows.linear(f"{name}.in_proj", 3 * hidden, hidden, Split(0, (channels,) * 3), bias=shape.projection_bias)
    rows.linear(f"{name}.out_proj", hidden, hidden, row(hidden), bias=shape.projection_bias)


def _gated_delta_net(rows: Rows, hidden: int, shape: RecurrentShape, traits: Recurrent) -> None:
    name, groups = traits.module, shape.groups
    keys, values = Part(shape.keys, groups), Part(shape.values, groups)
    of_heads = column(shape.heads, groups)

    def output() -> None:
        rows.linear(f"{name}.out_proj", hidden, shape.values, row(shape.values, groups))

    def norm() -> None:
        # One norm for all heads, used on each rank's own heads.
        rows.add(f"{name}.norm.weight", (shape.value_dim,), partial=True)

    rows.add(f"{name}.dt_bias", (shape.heads,), of_heads)
    rows.add(f"{name}.A_log", (shape.heads,), of_heads)
    rows.add(f"{name}.conv1d.weight", (shape.channels, 1, shape.kernel), Split(0, (keys, keys, values)))
    sizes = {
        # A group has its query, its key, its values and their gates one after the other.
        "in_proj_qkvz": (Part(2 * (shape.keys + shape.values), groups),),
        "in_proj_ba": (Part(2 * shape.heads, groups),),
        "in_proj_qkv": (keys, keys, values),
        "in_proj_z": (values,),
        "in_proj_b": of_heads.parts,
        "in_proj_a": of_heads.parts,
    }
    if not traits.output_last:
        norm()
        output()
    for projection in traits.projections:
        parts = sizes[projection]
        rows.linear(f"{name}.{projection}", sum(part.size for part in parts), hidden, Split(0, parts))
    if traits.output_last:
        norm()
        output()
