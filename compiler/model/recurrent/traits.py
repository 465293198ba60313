"""What a family says of its layers that carry a state."""

from __future__ import annotations

from dataclasses import dataclass

from .kind import RecurrentKind


@dataclass(frozen=True, slots=True)
class Recurrent:
    """The name of the module, and which layers have it in the place of attention."""

    kind: RecurrentKind
    module: str = "linear_attn"
    word: str = "linear_attention"
    """What stands for such a layer in the list of layers."""
    layers_key: str = "layer_types"
    attending_key: str = ""
    """Where there is no list: the key of the numbers of the layers that attend."""
    attends_by_default: bool = False
    """Whether all layers attend where neither is given."""
    every_key: tuple[str, int] | None = ("full_attention_interval", 4)
    """Where there is no list: the key of a number n, whose every nth layer attends, with its default."""
    projections: tuple[str, ...] = ("in_proj_qkvz", "in_proj_ba")
    """The input projections: fused head by head, or one for each of what they give."""
    output_last: bool = True
    """The output projection is registered behind the input projections."""
