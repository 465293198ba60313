"""The parameters of embeddings that every layer gets a part of: tables before the layers, and a gate in each."""

from __future__ import annotations

from .rows import Rows
from .shape import LayerInputs
from .table import Parameter, vocabulary


def tables_of_inputs(base: str, inputs: LayerInputs, hidden: int, num_layers: int) -> list[Parameter]:
    """What gives all layers their parts: a table of tokens, and a projection of the embedding with its norm.

    Ranks use the two on their own tokens.
    """
    width = num_layers * inputs.width

    def shared(name: str, shape: tuple[int, ...]) -> Parameter:
        return Parameter(f"{base}.{name}.weight", shape, sequence_parallel=True)

    return [
        Parameter(f"{base}.embed_tokens_per_layer.weight", (inputs.vocab_size, width), vocabulary(inputs.vocab_size)),
        shared("per_layer_model_projection", (width, hidden)),
        shared("per_layer_projection_norm", (inputs.width,)),
    ]


def rows_of_inputs(rows: Rows, inputs: LayerInputs, hidden: int) -> None:
    """What a layer does with its part, on a rank's own tokens."""
    rows.add("per_layer_input_gate.weight", (inputs.width, hidden), sequence_parallel=True)
    rows.add("per_layer_projection.weight", (hidden, inputs.width), sequence_parallel=True)
    rows.norm("post_per_layer_input_norm", hidden)
