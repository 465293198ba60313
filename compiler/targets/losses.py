"""What a target cannot express of a plan: said, never dropped in silence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parcompile.spec import Parallelism


@dataclass(frozen=True, slots=True)
class Loss:
    """Something that the target does differently. With a `fatal` one it cannot run the layout, and gets no files."""

    what: str
    why: str
    instead: str
    fatal: bool = False


def effective_order(parallelism: Parallelism) -> tuple[str, ...]:
    """The axes larger than 1, innermost first: the others stand nowhere."""
    sizes = {"tp": parallelism.tp, "cp": parallelism.cp, "dp": parallelism.dp, "pp": parallelism.pp}
    return tuple(axis for axis in parallelism.order if sizes.get(axis, 1) > 1)


def order_loss(parallelism: Parallelism, target: str, known: Sequence[tuple[str, ...]]) -> list[Loss]:
    """A fatal loss when the order of the axes is none of the target's."""
    here = effective_order(parallelism)
    if any(here == tuple(axis for axis in order if axis in here) for order in known):
        return []
    allowed = " or ".join("-".join(order) for order in known)
    return [
        Loss(
            what=f"order {'-'.join(here)}",
            why=f"{target} lays ranks out as {allowed} (innermost first): its groups would be other ranks",
            instead=f"compile with order {'-'.join(known[0])}",
            fatal=True,
        )
    ]
