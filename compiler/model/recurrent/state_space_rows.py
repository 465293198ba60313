"""The parameters of state-space layers, and how tensor parallelism cuts them: by heads."""

from __future__ import annotations

from parcompile.model.rows import Rows
from parcompile.model.table import Part, Split, column, row

from .shape import RecurrentShape


def mamba2_rows(rows: Rows, name: str, hidden: int, shape: RecurrentShape) -> None:
    """Adds the rows of a Mamba-2 layer's module.

    Tensor parallelism cuts heads, and groups with them; ranks that have heads of one group hold its rows each.
    """
    heads, values = Part(shape.heads, shape.heads), Part(shape.values, shape.heads)
    groups = Part(shape.keys, shape.groups)
    channels = (values, groups, groups)
    for scalar in ("dt_bias", "A_log", "D"):
        rows.add(f"{name}.{scalar}", (shape.heads,), Split(0, (heads,)))
    rows.add(f"{name}.conv1d.weight", (shape.channels, 1, shape.kernel), Split(0, channels))
    if shape.convolution_bias:
        rows.add(f"{name}.conv1d.bias", (shape.channels,), Split(0, channels))
    # The gate, the channels of the convolution, and the step size of each head.
    fused = Split(0, (values, *channels, heads))
    rows.linear(f"{name}.in_proj", shape.projected, hidden, fused, bias=shape.projection_bias)
    if shape.gated_norm:
        rows.add(f"{name}.norm.weight", (shape.values,), column(shape.values, shape.heads))
    rows.linear(f"{name}.out_proj", hidden, shape.values, row(shape.values, shape.heads), bias=shape.output_bias)
