"""How many parameters a configuration describes, by where they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .completing import TableError
from .parameters import parameters
from .reading import table_of


@dataclass(frozen=True, slots=True)
class Counts:
    """Elements of the parameters of a model, tied weights once."""

    layers: int
    """Of the repeated layers, with their experts."""
    experts: int
    """Of routed experts."""
    others: int
    """Embeddings, the last norm and the head."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.layers + self.others


def counts_of(config: Mapping[str, Any]) -> Counts | None:
    """The parameters of a configuration; None where no table tells them."""
    table = table_of(str(config.get("model_type")))
    if table is None:
        return None
    try:
        found = parameters(table, config)
    except TableError:
        return None
    layers = [one for one in found if "{layer}" in one.row.name]
    return Counts(
        layers=sum(one.numel for one in layers),
        experts=sum(one.numel for one in layers if ".experts." in one.name),
        others=sum(one.numel for one in found if "{layer}" not in one.row.name),
    )
