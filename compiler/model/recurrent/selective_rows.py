"""The parameters of Mamba-1 layers, and how tensor parallelism cuts them: by channels."""

from __future__ import annotations

from parcompile.model.rows import Rows
from parcompile.model.table import Part, Split, column, row

from .shape import RecurrentShape

STEP, WRITE, READ = "dt_layernorm", "b_layernorm", "c_layernorm"
"""The norms of what the step sizes are projected from, of what writes to the states and of what reads them."""


def mamba1_rows(rows: Rows, name: str, hidden: int, shape: RecurrentShape, *, norms: bool) -> None:
    """Adds the rows of a Mamba-1 layer's module.

    Every rank has the norms, where they have weights, and uses them for its own channels: their gradients are parts.
    """
    channels, state = shape.values, shape.key_dim
    rows.add(f"{name}.A_log", (channels, state), column(channels))
    rows.add(f"{name}.D", (channels,), column(channels))
    rows.add(f"{name}.conv1d.weight", (channels, 1, shape.kernel), column(channels))
    if shape.convolution_bias:
        rows.add(f"{name}.conv1d.bias", (channels,), column(channels))
    both = Split(0, (Part(channels, channels),) * 2)
    rows.linear(f"{name}.in_proj", 2 * channels, hidden, both, bias=shape.projection_bias)
    rows.linear(f"{name}.x_proj", shape.selected, channels, row(channels))
    rows.linear(f"{name}.dt_proj", channels, shape.step_rank, column(channels), bias=True)
    rows.linear(f"{name}.out_proj", hidden, channels, row(channels), bias=shape.output_bias)
    for norm, width in ((STEP, shape.step_rank), (WRITE, state), (READ, state)) if norms else ():
        rows.add(f"{name}.{norm}.weight", (width,), partial=True)
