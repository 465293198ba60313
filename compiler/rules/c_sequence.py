"""The sequence divides over cp and, with sequence parallelism, over tp."""

from __future__ import annotations

import math
from collections.abc import Iterator

from parcompile.diagnostics import Fix, Related, Safety, Severity
from parcompile.layout.groups import Axis
from parcompile.layout.sequence import CpLayout
from parcompile.spec.resolve import Resolution

from .arithmetic import also, listed, nearest_multiples
from .registry import Finding, rule

_LENGTH = ("training", "sequence_length")
_CP = ("parallelism", "cp")
_LAYOUT = ("parallelism", "cp_layout")


def _divisor(spec: Resolution) -> int:
    """What the sequence length has to be a multiple of, for cp and sequence parallelism together."""
    cp, tp = spec.axis(Axis.CP), spec.axis(Axis.TP)
    chunks = spec.cp_layout.chunks_per_rank if cp > 1 else 1
    local = math.lcm(chunks, tp) if spec.sequence_parallel else chunks
    return cp * local


def length_finding(spec: Resolution, message: str, related: tuple[Related, ...]) -> Finding:
    """A length that does not divide, with the lengths next to it that do."""
    divisor = _divisor(spec)
    near = nearest_multiples(spec.sequence_length, divisor)
    return Finding(
        f"{message}; nearest: {listed(near)}",
        _LENGTH,
        help=f"write a multiple of {divisor}",
        fixes=tuple(Fix.setting(_LENGTH, value, Safety.CHANGES_NUMERICS) for value in near),
        related=related,
    )


@rule("C001")
def sequence_divides_over_cp(spec: Resolution) -> Iterator[Finding]:
    """Fires when the chunks are not whole."""
    length, cp, layout = spec.sequence_length, spec.axis(Axis.CP), spec.cp_layout
    chunks = cp * layout.chunks_per_rank
    if cp > 1 and length % chunks:
        factor = f"{layout.chunks_per_rank} · cp {cp}" if layout.chunks_per_rank > 1 else f"cp {cp}"
        yield length_finding(
            spec,
            f"sequence_length {length} % ({factor}) = {length % chunks}: the {layout.value} layout splits it into "
            f"{chunks} chunks",
            also(spec, _CP, _LAYOUT),
        )


@rule("C003", severity=Severity.INFO)
def cp_layout_needs_cp(spec: Resolution) -> Iterator[Finding]:
    """Fires when cp_layout is given at cp 1."""
    if spec.given(*_LAYOUT) and spec.axis(Axis.CP) == 1:
        yield Finding(
            f"cp_layout {spec.cp_layout.value} has no effect with cp 1",
            _LAYOUT,
            fixes=(Fix.removing(_LAYOUT, Safety.SAFE),),
        )


@rule("C010")
def layers_need_stretches(spec: Resolution) -> Iterator[Finding]:
    """Fires for the striped layout with layers that carry a state, or with keys that stand for windows of tokens."""
    if spec.axis(Axis.CP) == 1 or spec.cp_layout is not CpLayout.STRIPED:
        return
    found = []
    found += [f"{len(one.layers)} {one.states}" for one in spec.shape.parts if one.states]
    if rates := spec.shape.window_rates:
        found.append(f"compressed KV of {listed(rates)} tokens")
    for what in found:
        yield Finding(
            f"cp_layout striped with {what}",
            _LAYOUT,
            help="zigzag and contiguous deal pieces of the sequence",
            fixes=tuple(Fix.setting(_LAYOUT, name, Safety.CHANGES_COST) for name in ("zigzag", "contiguous")),
            related=also(spec, _CP),
        )


@rule("C011")
def pieces_hold_a_halo(spec: Resolution) -> Iterator[Finding]:
    """Fires when a piece has fewer tokens than the convolution sees of it."""
    halos = list(filter(None, (part.halo() for part in spec.shape.parts)))
    cp, length = spec.axis(Axis.CP), spec.sequence_length
    pieces = cp * spec.cp_layout.chunks_per_rank
    if not halos or cp == 1 or length % pieces:
        return
    longest = max(halos, key=lambda halo: halo.tokens)
    if length // pieces >= longest.tokens:
        return
    least = pieces * longest.tokens
    yield Finding(
        f"sequence_length {length} / {pieces} pieces = {length // pieces} tokens < {longest.told}: the "
        f"convolution of the next piece sees {longest.tokens} tokens of it",
        _LENGTH,
        help=f"write {least} or more, or a smaller cp",
        fixes=(Fix.setting(_LENGTH, least, Safety.CHANGES_NUMERICS),),
        related=also(spec, _CP, _LAYOUT),
    )


@rule("C004", severity=Severity.WARNING)
def chunks_are_balanced(spec: Resolution) -> Iterator[Finding]:
    """Fires for the contiguous layout where more than one rank has chunks of its own."""
    cp = spec.axis(Axis.CP)
    if not spec.shape.attends:
        return  # every token of a state costs the same
    if cp > 1 and spec.cp_layout is CpLayout.CONTIGUOUS and spec.context_parallel.ring_ranks > 1:
        share = float(spec.context_parallel.balance(CpLayout.CONTIGUOUS))
        yield Finding(
            f"cp_layout contiguous with cp {cp}: on average a rank does {share:.0%} of the busiest rank's attention",
            _LAYOUT,
            help="zigzag gives all ranks equal work",
            fixes=(Fix.setting(_LAYOUT, "zigzag", Safety.CHANGES_COST),),
            related=also(spec, _CP),
        )
