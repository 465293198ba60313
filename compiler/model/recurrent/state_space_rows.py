"""The parameters of state-space layers, and how tensor parallelism cuts them: by heads."""

from __future__ import annotations

from parcompile.model.rows import Rows
from parcompile.model.table import Part, Split, column, row

from .shape import RecurrentShape


def input_parts(shape: RecurrentShape) -> tuple[Part, ...]:
    """What the input projection gives: gate, channels of the convolution (x, B, C), and a step size of each head."""
    values, groups = Part(shape.values, shape.heads), Part(shape.keys, shape.groups)
    return values, values, groups, groups, Part(shape.heads, shape.heads)


def mamba2_rows(rows: Rows, name: str, hidden: int, shape: RecurrentShape) -> None:
    """Adds the rows of a Mamba-2 layer's module.

    Tensor parallelism cuts heads, and groups with them; ranks that have heads of one group hold its rows each.
    """
    fused = input_parts(shape)
    channels, heads = fused[1:4], fused[4]
    for scalar in ("dt_bias", "A_log", "D"):
        rows.add(f"{name}.{scalar}", (shape.heads,), Split(0, (heads,)))
    rows.add(f"{name}.conv1d.weight", (shape.channels, 1, shape.kernel), Split(0, channels))
    if shape.convolution_bias:
        rows.add(f"{name}.conv1d.bias", (shape.channels,), Split(0, channels))
    rows.linear(f"{name}.in_proj", shape.projected, hidden, Split(0, fused), bias=shape.projection_bias)
    if shape.gated_norm:
        rows.add(f"{name}.norm.weight", (shape.values,), column(shape.values, shape.heads))
    rows.linear(f"{name}.out_proj", hidden, shape.values, row(shape.values, shape.heads), bias=shape.output_bias)
