"""How the adapters of a block that several layers share are cut."""

from __future__ import annotations

import re
from collections.abc import Callable

from parcompile.model.tables import Repeated

from .cut import PARTIAL, Cut

_ADAPTER = re.compile(
    r"^(?P<block>\w+)\.(?:linear_(?P<kind>[qkv])|(?P<up>\w+))_adapter_list\.\d+\.(?P<place>[01])\.weight$"
)


def adapter_cut(own: str, one: Repeated, cut_of: Callable[[str], Cut]) -> Cut:
    """The cut of a matrix of an adapter: the second is cut as the projection that it is added to."""
    found = _ADAPTER.match(own)
    if found is None:
        raise ValueError(f"{one.name} is no adapter of a shared block")
    if found["place"] == "0":
        return PARTIAL  # every rank computes it for its own rows of the second matrix
    name = found["up"] or f"{found['kind']}_proj"
    return cut_of(f"{found['block']}.{name}.weight")
