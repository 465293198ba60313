"""Sequence parallelism: the tokens of a rank over tp."""

from __future__ import annotations

from collections.abc import Iterator

from parcompile.diagnostics import Severity
from parcompile.layout.grid import Axis
from parcompile.spec.resolve import Resolution

from .c_sequence import length_finding
from .places import also
from .registry import Finding, rule


@rule(
    "T007",
    "the sequence does not divide over tp",
    """With sequence parallelism each tensor-parallel rank keeps an equal share of the tokens of its context-parallel
    rank. Where (sequence_length / cp) % tp is not 0 the runtime continues them with padding between the blocks, which
    changes no number and costs the padding's time and memory. Megatron-LM and torchtitan refuse such a length, and get
    no files. Together with zigzag chunks, a length without padding is a multiple of cp · lcm(2, tp).""",
    wrong={"parallelism": {"tp": 8, "sequence_parallel": True}, "training": {"sequence_length": 8188}},
    right={"parallelism": {"tp": 8, "sequence_parallel": True}, "training": {"sequence_length": 8184}},
    severity=Severity.WARNING,
    sources=("Megatron-Core tensor_parallel/mappings.py", "torchtitan#1306"),
)
def sequence_divides_over_tp(spec: Resolution) -> Iterator[Finding]:
    """Fires when the local sequence cannot be split over tp."""
    length, cp, tp = spec.sequence_length, spec.axis(Axis.CP), spec.axis(Axis.TP)
    if spec.sequence_parallel and length % cp == 0 and (length // cp) % tp:
        local = length // cp
        yield length_finding(
            spec,
            f"(sequence_length {length} / cp {cp}) % tp {tp} = {local % tp}: with sequence_parallel the ranks hold "
            f"{-(-local // tp)} tokens each, {-local % tp} of them padding",
            also(spec, ("parallelism", "tp"), ("parallelism", "sequence_parallel")),
        )
