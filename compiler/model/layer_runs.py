"""Layers that come once in a period, and stacks of layers that run several times in a forward pass.

The layers of a model are its runs, as transformers counts them in `num_hidden_layers`: each attends, computes and keeps
activations. A stack's parameters belong to its first run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .layer_kind import LayersError

# Layers that come once in a period: what a configuration says by a period and an offset.


@dataclass(frozen=True, slots=True)
class LayerPeriod:
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


def whole(config: Mapping[str, Any], key: str, default: int, *, least: int) -> int:
    """The value of a key that tells which layers are meant.

    Raises:
        LayersError: it is no whole number of `least` or more.
    """
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise LayersError(f"{key} is {value!r}: it has to be a whole number of {least} or more", key)
    return value


# Stacks of layers that run several times in a forward pass: runs are counted, parameters exist once.


@dataclass(frozen=True, slots=True)
class LayerRuns:
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
