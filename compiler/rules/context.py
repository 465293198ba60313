"""What rules read of context parallelism: attention runs over its ranks by heads and levels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from parcompile.cost.context_exchanges import Heads, heads_of_rank
from parcompile.cost.context_time import context_fault, exchange_fault
from parcompile.layout.groups import Axis, divisors
from parcompile.layout.sequence import ContextParallel, CpImplementation, CpLayout, level_sizes
from parcompile.spec.resolve import Resolution, Unavailable
from parcompile.spec.resolve.training import AUTO

from . import listed


def named(spec: Resolution) -> CpImplementation:
    """The implementation that is written by name, with more than one rank to run on."""
    name = spec.named_implementation
    if name == AUTO or spec.axis(Axis.CP) == 1:
        raise Unavailable("cp_implementation")
    return CpImplementation(name)


def _heads(spec: Resolution) -> Heads:
    """Query and key/value heads of a tensor-parallel rank, for each kind of layer."""
    tp = spec.axis(Axis.TP)
    for _, one in spec.shape.by_kind:
        heads, kv_heads = one.num_attention_heads, one.num_key_value_heads
        if heads % tp or (kv_heads % tp and tp % kv_heads):
            raise Unavailable("model")  # T001 or T002 speaks of it
    return heads_of_rank(spec.shape, tp)


def possible_sizes(spec: Resolution, kind: CpImplementation) -> list[tuple[int, int]]:
    """Sizes of both levels that heads and layout allow, the largest inner level on a node first."""
    heads, cp = _heads(spec), spec.axis(Axis.CP)
    on_node, windows = spec.cluster.gpus_per_node, bool(spec.shape.window_rates)
    found = [
        sizes
        for sizes in level_sizes(cp)
        if context_fault(ContextParallel(kind, cp, sizes), heads, spec.cp_layout, windows=windows) is None
    ]
    return sorted(found, key=lambda sizes: (sizes[0] > on_node, -sizes[0]))


class Exchange(NamedTuple):
    """What an implementation that exchanges heads cannot run with: where that stands, and sizes of levels that fit."""

    said: str
    help: str
    key: str = "cp_implementation"
    tp: str = ""
    sizes: Sequence[list[int]] = ()


def exchange(spec: Resolution) -> Exchange | None:
    """Why the heads are not exchanged, where the implementation that is named does so."""
    kind, cp, sizes = named(spec), spec.axis(Axis.CP), spec.given_sizes
    if (rates := spec.shape.window_rates) and kind in (CpImplementation.ULYSSES, CpImplementation.USP):
        said = f"cp {cp}, and compressed KV of {listed(rates)} tokens"
        return Exchange(said, "the rings and all_gather leave queries where they are")
    has_levels = kind is CpImplementation.USP and sizes is not None and sizes[0] * sizes[1] == cp
    ranks = sizes[0] if sizes is not None and has_levels else cp
    if kind is not CpImplementation.ULYSSES and not has_levels:
        return None
    heads = _heads(spec)
    fault = exchange_fault(heads, ranks)
    if fault is None:
        return None
    fits = [one for one in divisors(math.gcd(*(count for count, _ in heads))) if exchange_fault(heads, one) is None]
    said = f"inner level {ranks}" if has_levels else f"cp {cp}"
    said += f": {fault} (heads / tp {spec.axis(Axis.TP)}); possible: {listed(fits)} ranks"
    instead = "the rings and all_gather take any number of heads"
    key = "hierarchical_cp_sizes" if has_levels else "cp_implementation"
    levels = [list(one) for one in possible_sizes(spec, kind)] if has_levels else []
    return Exchange(said, instead, key, "parallelism.tp", levels)


def why_no_levels(spec: Resolution) -> str | None:
    """Why the implementation that is named has no two levels to run on; None where it has, or needs none."""
    kind, cp = named(spec), spec.axis(Axis.CP)
    if not kind.has_levels or spec.given_sizes is not None:
        return None
    if kind is CpImplementation.USP and (spec.cp_layout is CpLayout.STRIPED or spec.shape.window_rates):
        return None  # C006 or C005 speaks of it
    if possible_sizes(spec, kind):
        return None
    if not (levels := level_sizes(cp)):
        return "cp must be the product of two numbers above 1"
    heads = _heads(spec)
    faults = "; ".join(f"{inner} · {outer}: {exchange_fault(heads, inner)}" for inner, outer in levels)
    return f"no inner level fits the heads ({faults})"
