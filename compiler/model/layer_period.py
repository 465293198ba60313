"""Layers that come once in a period: what a configuration says by a period and an offset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .layer_kind import LayersError


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
