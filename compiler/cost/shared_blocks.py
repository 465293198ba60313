"""What the uses of shared transformer blocks keep and exchange beside the attention and the MLP in them."""

from __future__ import annotations

from parcompile.model.shape import ModelShape
from parcompile.model.shared_blocks import INPUTS

from .workload import Workload


def uses(shape: ModelShape, layers: range) -> int:
    """How many of these layers use a shared block."""
    return 0 if shape.shared_blocks is None else sum(layer in layers for layer in shape.shared_blocks.layers)


def kept_of_use(work: Workload) -> tuple[float, float]:
    """Bytes that one use keeps for each token: of a rank's own tokens, and of those of the whole sequence.

    The first norm keeps the hidden states and the embedding in fp32 and normalised, the second the attention's result;
    the layer's projection keeps its input. Attention and MLP keep their inputs whole, and adapters what is between
    their two matrices.
    """
    shared, width, hidden = work.shape.shared_blocks, work.element_bytes, work.shape.hidden_size
    if shared is None:
        return 0.0, 0.0
    own = (INPUTS + 1) * hidden * (4 + width) + width * hidden
    adapters = shared.adapter_rank * (4 if shared.attention_adapters else 1)
    whole = width * ((INPUTS + 1) * hidden + adapters)
    return own / (work.tp if work.sequence_parallel else 1), float(whole)
