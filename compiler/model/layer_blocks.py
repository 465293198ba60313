"""Models whose layers are one block each: attention, a recurrence, an MLP or a mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parcompile.model.layer_kind import LayersError

from .tables import OLDER_KINDS

STATE, ATTENTION, MLP, EXPERTS = "linear_attention", "full_attention", "mlp", "moe"


@dataclass(frozen=True, slots=True)
class LayerBlocks:
    """The numbers of the layers of each kind; all others carry a state."""

    attention: tuple[int, ...]
    mlp: tuple[int, ...]
    experts: tuple[int, ...]

    @classmethod
    def of(cls, kinds: Sequence[str]) -> LayerBlocks:
        """From the kind of each layer."""
        attention, mlp, experts = (
            tuple(number for number, kind in enumerate(kinds) if kind == one) for one in (ATTENTION, MLP, EXPERTS)
        )
        return cls(attention, mlp, experts)


_LETTERS = {"M": STATE, "E": EXPERTS, "*": ATTENTION, "-": MLP}
_BY_DEFAULT = (STATE, EXPERTS, ATTENTION, MLP)
_OLDER = {old: kind for old, kind in OLDER_KINDS.items() if kind in _BY_DEFAULT}


def nemotron_kinds(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The kind of each layer of a Nemotron-H: a list, or a pattern with a letter for each layer.

    Raises:
        LayersError: a kind that nobody knows, or another number of layers than `num_hidden_layers` says.
    """
    pattern_key = "hybrid_override_pattern"
    key = next((one for one in ("layers_block_type", "layer_types", pattern_key) if config.get(one) is not None), "")
    given = config.get(key, _BY_DEFAULT)
    if not isinstance(given, str if key == pattern_key else list | tuple) or not given:
        raise LayersError(f"{key} is {given!r}: write the kind of each layer", key)
    known = _LETTERS if key == pattern_key else {**_OLDER, **{kind: kind for kind in _BY_DEFAULT}}
    if unknown := sorted({str(one) for one in given} - set(known)):
        raise LayersError(f"{key} has {', '.join(unknown)}: the kinds are {', '.join(known)}", key)
    counted(config, len(given), key)
    return tuple(known[one] for one in given)


def counted(config: Mapping[str, Any], layers: int, key: str) -> None:
    """Sees to it that `num_hidden_layers`, where it stands, is the number of layers that are listed under a key.

    Args:
        config: of the model.
        layers: how many are listed, or are there by default.
        key: of the list; empty where the configuration has none.

    Raises:
        LayersError: it is another number.
    """
    count = config.get("num_hidden_layers")
    if count in (None, layers):
        return
    found = f"{key} lists {layers} layers" if key else f"without layers_block_type transformers builds {layers} layers"
    raise LayersError(f"num_hidden_layers is {count}, but {found}: list the kind of each layer", "num_hidden_layers")
