"""Context parallelism: the sequence divides over cp, and attention runs over its ranks by heads, levels and layouts."""

from __future__ import annotations

import math
from collections.abc import Iterator

from parcompile.cost.context_exchanges import Heads, heads_of_rank
from parcompile.cost.context_time import context_fault, exchange_fault
from parcompile.diagnostics import Fix, Safety
from parcompile.layout.groups import Axis, divisors
from parcompile.layout.sequence import ContextParallel, CpImplementation, CpLayout, level_sizes
from parcompile.spec.resolve import Resolution, Unavailable
from parcompile.spec.resolve.training import AUTO

from . import Finding, also, listed, rule

_CP = ("parallelism", "cp")
_NAME = ("parallelism", "cp_implementation")
_SIZES = ("parallelism", "hierarchical_cp_sizes")


def _named(spec: Resolution) -> CpImplementation:
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


def _use(name: CpImplementation) -> Fix:
    return Fix.setting(_NAME, name.value, Safety.CHANGES_COST)


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


@rule("C005")
def heads_divide_over_ranks(spec: Resolution) -> Iterator[Finding]:
    kind, cp, sizes = _named(spec), spec.axis(Axis.CP), spec.given_sizes
    rings = (_use(CpImplementation.RING), _use(CpImplementation.ALL_GATHER))
    if (rates := spec.shape.window_rates) and kind in (CpImplementation.ULYSSES, CpImplementation.USP):
        yield Finding(
            f"{kind.value} with cp {cp}, and compressed KV of {listed(rates)} tokens",
            _NAME,
            help="the rings and all_gather leave queries where they are",
            fixes=rings,
            related=also(spec, _CP),
        )
        return
    if kind is CpImplementation.ULYSSES:
        ranks, place, path = cp, f"cp {cp}", _NAME
    elif kind is CpImplementation.USP and sizes is not None and sizes[0] * sizes[1] == cp:
        ranks, place, path = sizes[0], f"inner level {sizes[0]}", _SIZES
    else:
        return
    heads = _heads(spec)
    fault = exchange_fault(heads, ranks)
    if fault is None:
        return
    common = math.gcd(*(count for count, _ in heads))
    fits = [one for one in divisors(common) if exchange_fault(heads, one) is None]
    resized = possible_sizes(spec, CpImplementation.USP) if path == _SIZES else []
    yield Finding(
        f"{kind.value} with {place}: {fault} (heads / tp {spec.axis(Axis.TP)}); possible: {listed(fits)} ranks",
        path,
        help="the rings and all_gather take any number of heads",
        fixes=(*(Fix.setting(_SIZES, list(one), Safety.CHANGES_COST) for one in resized), *rings),
        related=also(spec, _CP, ("parallelism", "tp"), *(() if path == _NAME else (_NAME,))),
    )


@rule("C007")
def cp_has_two_levels(spec: Resolution) -> Iterator[Finding]:
    kind, cp = _named(spec), spec.axis(Axis.CP)
    if not kind.has_levels or spec.given_sizes is not None or spec.is_invalid(_SIZES):
        return
    if kind is CpImplementation.USP and (spec.cp_layout is CpLayout.STRIPED or spec.shape.window_rates):
        return  # C006 or C005 speaks of it
    if possible_sizes(spec, kind):
        return
    levels = level_sizes(cp)
    if levels:
        heads = _heads(spec)
        faults = "; ".join(f"{inner} · {outer}: {exchange_fault(heads, inner)}" for inner, outer in levels)
        message = f"{kind.value} with cp {cp}: no inner level fits the heads ({faults})"
    else:
        message = f"{kind.value} with cp {cp}: cp must be the product of two numbers above 1"
    yield Finding(
        message,
        _NAME,
        help="write ring, all_gather or ulysses, which have one level",
        fixes=(_use(CpImplementation.RING), _use(CpImplementation.ALL_GATHER)),
        related=also(spec, _CP, ("parallelism", "tp")),
    )
