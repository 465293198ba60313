"""Layers of several shapes, layers that come once in a period, stacks that run again, and layers of one block each.

The layers of a model are its runs, as transformers counts them in `num_hidden_layers`: each attends, computes and keeps
activations. A stack's parameters belong to its first run.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from . import ModelConfigError
from .compressed_keys import CompressedKeys
from .tables import OLDER_KINDS

if TYPE_CHECKING:
    from .blocks.latent import MlaShape


class KeysAndValues(enum.Enum):
    """Where an attention takes its keys and values from; the value names the projections that it has."""

    OWN = "qkv"
    KEYS_ARE_VALUES = "qk"
    """One projection gives the keys, and the values too."""
    OF_ANOTHER_LAYER = "q"
    """Those of an earlier layer."""


class LayersError(ModelConfigError):
    """A configuration whose layers cannot be told apart, or whose counts and lists of them are no such thing."""


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """What a layer attends to, and what its queries, keys and values come of."""

    sliding_window: int | None = None
    value_head_dim: int | None = None
    """Width of a value head; None: `head_dim`."""
    keys_and_values: KeysAndValues = KeysAndValues.OWN
    sinks: bool = True
    """Whether there are attention sinks, where the family knows them."""
    projections: MlaShape | None = None
    """None: of hidden states, in heads of `head_dim`; of a kind of layers: as the model has them."""
    compressed: CompressedKeys | None = None
    """Keys that stand for windows of tokens, beside those of the tokens in the layer's own window."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The dimensions that may differ from layer to layer, under the names of `ModelShape`."""

    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    num_attention_heads: int | None = None
    """None: as the model has them."""
    attention: LayerAttention = LayerAttention()


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers of the same shape."""

    layers: tuple[int, ...]
    shape: LayerShape


def kinds_of_layers(shapes: Sequence[LayerShape]) -> tuple[LayerKind, ...]:
    """The kinds of a model's layers, whose shapes are given in order; the kind of the first layer comes first."""
    found: dict[LayerShape, list[int]] = {}
    for layer, shape in enumerate(shapes):
        found.setdefault(shape, []).append(layer)
    return tuple(LayerKind(tuple(layers), shape) for shape, layers in found.items())


# Layers that come once in a period: what a configuration says by a period and an offset.


class LayerPeriod(NamedTuple):
    """The keys of a period and an offset, with defaults: layers whose number leaves the offset, divided by the period.

    The offset has to be smaller than the period, as transformers' classes demand.
    """

    period: tuple[str, int]
    offset: tuple[str, int]

    def layers(self, config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
        """The numbers of these layers.

        Raises:
            LayersError: the period is no whole number of 1 or more, or the offset none below it.
        """
        period, offset = (whole(config, *key, least=least) for key, least in ((self.period, 1), (self.offset, 0)))
        if offset >= period:
            raise LayersError(
                f"{self.offset[0]} {offset} has to be smaller than {self.period[0]} {period}", self.offset[0]
            )
        return tuple(range(offset, num_layers, period))


def whole(config: Mapping[str, Any], key: str, default: int | None, *, least: int = 1) -> int:
    """The value of a key, or its default where it is left out.

    Raises:
        LayersError: it is no whole number of `least` or more.
    """
    return checked(key, config.get(key, default), least)


def checked(key: str, value: Any, least: int = 1) -> int:
    """The value of a key.

    Raises:
        LayersError: it is no whole number of `least` or more.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise LayersError(f"{key} is {value!r}: it has to be a whole number of {least} or more", key)
    return value


# Stacks of layers that run several times in a forward pass: runs are counted, parameters exist once.


class LayerRuns(NamedTuple):
    """The stacks of a model, one after the other as it registers them."""

    stacks: tuple[tuple[str, int], ...]
    """The name of each, and the run in which its first layer runs first."""
    layers: int
    """Of each stack."""
    total: int
    """Runs of layers in a forward pass."""
    untrained: int = 0
    """Those among them that gradients do not pass: nothing is kept of them."""

    @property
    def trained_stacks(self) -> float:
        """Runs of stacks that gradients pass."""
        return (self.total - self.untrained) / self.layers

    @property
    def counted(self) -> float:
        """Runs as operations of training count them: a forward pass is a third of a run."""
        return self.total - self.untrained * 2 / 3


def alternating(layers: int, high_cycles: int, low_cycles: int, trained: Sequence[int]) -> LayerRuns:
    """Cycles of a low stack, and a high one that runs once behind each of them (arXiv 2506.21734).

    Args:
        layers: of each stack.
        high_cycles: how often the high stack runs.
        low_cycles: how often the low one runs before each of these.
        trained: in the last of the high cycles, how many of the low cycles gradients pass; one in those before.
    """
    padded = [1] * max(0, high_cycles - len(trained)) + list(trained)
    passed = sum(max(0, min(low_cycles, cycles)) for cycles in padded[:high_cycles])
    stacks = (("L_module.layers", 0), ("H_module.layers", low_cycles * layers))
    runs = high_cycles * (low_cycles + 1)
    return LayerRuns(stacks, layers, layers * runs, layers * (high_cycles * low_cycles - passed))


STATE = "linear_attention"
ATTENTION, MLP, EXPERTS = "full_attention", "mlp", "moe"


class LayerBlocks(NamedTuple):
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
