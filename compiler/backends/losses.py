"""What a target cannot express of a plan: said, never dropped in silence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parcompile.spec import Parallelism, Spec


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


def sequence_loss(spec: Spec, target: str) -> list[Loss]:
    """A fatal loss when sequence parallelism would need padding, which only our runtime adds."""
    parallelism, length = spec.parallelism, spec.training.sequence_length
    local, tp = length // parallelism.cp, parallelism.tp
    if not parallelism.sequence_parallel or local % tp == 0:
        return []
    return [
        Loss(
            what=f"sequence_length {length}",
            why=f"{target} does not pad: (sequence_length {length} / cp {parallelism.cp}) % tp {tp} = {local % tp}",
            instead=f"a multiple of {parallelism.cp * tp}, or sequence_parallel false",
            fatal=True,
        )
    ]


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
