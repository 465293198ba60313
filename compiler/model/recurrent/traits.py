"""What a family says of its layers that carry a state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from parcompile.model.layer_runs import LayerPeriod

from .shape import RecurrentKind
from .state_space import SelectiveKeys, StateSpaceKeys


@dataclass(frozen=True, slots=True)
class Recurrent:
    """The name of the module, and which layers have it in the place of attention."""

    kind: RecurrentKind
    module: str = "linear_attn"
    inside: str = ""
    """The module of a layer that it stands in, in some layers."""
    word: str = "linear_attention"
    """What stands for such a layer in the list of layers."""
    attending_words: tuple[str, ...] = ("full_attention",)
    """What stands there for one that attends."""
    layers_key: str = "layer_types"
    layers_alias: str = ""
    """Another name of that key."""
    attending_key: str = ""
    """Where there is no list: the key of the numbers of the layers that attend."""
    attends_by_default: bool = False
    """Whether all layers attend where neither is given."""
    every_key: tuple[str, int] | None = ("full_attention_interval", 4)
    """Where there is no list: the key of a number n, whose every nth layer attends, with its default."""
    by_default: Callable[[Mapping[str, Any], int], tuple[int, ...]] | None = None
    """Which layers carry a state where there is neither, from the configuration and the number of layers."""
    gates_by_few: bool = False
    """Its gates are projected by way of a few features, as many as a head has."""
    follows_attention: bool = False
    """Sizes that a configuration leaves out follow from its attention."""
    sizes: Mapping[str, str] = field(default_factory=dict)
    """What the configuration calls the keys of its sizes, where they have other names."""
    section: str = ""
    """A section of the configuration where the keys of its sizes may stand too, before all others."""
    beside_attention: bool = False
    """Every layer has the module beside its attention: both take the same hidden states, their results are added."""
    state_space: StateSpaceKeys | None = None
    """The keys of the sizes of Mamba-2 layers."""
    selective: SelectiveKeys | None = None
    """The keys of the sizes of Mamba-1 layers."""
    attending_period: LayerPeriod | None = None
    """Where there is no list: which layers attend."""

    @property
    def layers_keys(self) -> tuple[str, ...]:
        """The names of the list of layers."""
        return tuple(filter(None, (self.layers_key, self.layers_alias)))
