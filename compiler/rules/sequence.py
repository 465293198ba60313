"""The sequence divides over cp and, with sequence parallelism, over tp."""

from __future__ import annotations

import math
from collections.abc import Iterator

from parcompile.diagnostics import Edit, Fix, Safety, Severity
from parcompile.resolve import Resolution

from .arithmetic import listed, nearest_multiples
from .registry import Finding, rule

_LENGTH = ("training", "sequence_length")


def _divisor(spec: Resolution) -> int:
    """What the sequence length has to be a multiple of, for cp and sequence parallelism together."""
    cp, tp = spec.axis("cp"), spec.axis("tp")
    chunks = spec.cp_layout.chunks_per_rank if cp > 1 else 1
    local = math.lcm(chunks, tp) if spec.sequence_parallel else chunks
    return cp * local


def _finding(spec: Resolution, message: str) -> Finding:
    divisor = _divisor(spec)
    near = nearest_multiples(spec.sequence_length, divisor)
    return Finding(
        f"{message}; nearest: {listed(near)}",
        _LENGTH,
        help=f"write a multiple of {divisor}",
        fixes=tuple(
            Fix(f"set sequence_length to {value}", Safety.CHANGES_NUMERICS, (Edit(_LENGTH, value),)) for value in near
        ),
    )


@rule(
    "C001",
    "the sequence does not divide over cp",
    """Each context-parallel rank holds chunks of equal length: two with the zigzag layout (sequence_length % (2 · cp) = 0), one with the
    contiguous layout (sequence_length % cp = 0).""",
    sources=("Megatron-LM arguments.py", "TransformerEngine context_parallel.py"),
)
def sequence_divides_over_cp(spec: Resolution) -> Iterator[Finding]:
    """Fires when the chunks are not whole."""
    length, cp, layout = spec.sequence_length, spec.axis("cp"), spec.cp_layout
    chunks = cp * layout.chunks_per_rank
    if cp > 1 and length % chunks:
        factor = f"{layout.chunks_per_rank} · cp {cp}" if layout.chunks_per_rank > 1 else f"cp {cp}"
        yield _finding(
            spec,
            f"sequence_length {length} % ({factor}) = {length % chunks}: the {layout.value} layout cuts it into {chunks} chunks",
        )


@rule(
    "T007",
    "the sequence does not divide over tp",
    """With sequence parallelism each tensor-parallel rank keeps an equal share of the tokens of its context-parallel rank:
    (sequence_length / cp) % tp = 0.""",
    sources=("Megatron-Core tensor_parallel/mappings.py",),
)
def sequence_divides_over_tp(spec: Resolution) -> Iterator[Finding]:
    """Fires when the local sequence cannot be split over tp."""
    length, cp, tp = spec.sequence_length, spec.axis("cp"), spec.axis("tp")
    if spec.sequence_parallel and length % cp == 0 and (length // cp) % tp:
        yield _finding(
            spec,
            f"(sequence_length {length} / cp {cp}) % tp {tp} = {(length // cp) % tp}: sequence_parallel splits it over tp",
        )


@rule(
    "C003",
    "the context-parallel layout has no effect",
    """With cp 1 each rank holds whole sequences in their order: there is nothing to deal out.""",
    severity=Severity.INFO,
)
def cp_layout_needs_cp(spec: Resolution) -> Iterator[Finding]:
    """Fires when cp_layout is given at cp 1."""
    path = ("parallelism", "cp_layout")
    if spec.given(*path) and spec.axis("cp") == 1:
        yield Finding(
            f"cp_layout {spec.cp_layout.value} has no effect with cp 1",
            path,
            fixes=(Fix("remove cp_layout", Safety.SAFE, (Edit(path, remove=True),)),),
        )
