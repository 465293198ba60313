"""Batches of evaluation."""

from __future__ import annotations

from collections.abc import Iterator

from parcompile.diagnostics import Edit, Fix, Safety, Severity
from parcompile.layout.grid import Axis
from parcompile.spec.resolve import Resolution

from .arithmetic import listed, nearest_multiples
from .places import also
from .registry import Finding, rule

_TOTAL = ("training", "eval_global_batch_size")
_MICRO = ("training", "eval_micro_batch_size")


@rule(
    "B008",
    "the evaluation batch does not divide into micro-batches",
    """As in training, every model copy evaluates the same whole number of micro-batches: eval_global_batch_size %
    (eval_micro_batch_size · dp) = 0. What is left out is that of training.""",
    wrong={"training": {"eval_global_batch_size": 12}},
    right={"training": {"eval_global_batch_size": 16}},
    sources=("Megatron-LM arguments.py",),
)
def evaluation_batch_divides(spec: Resolution) -> Iterator[Finding]:
    """Fires when one of both is given and they do not divide."""
    given = [path for path in (_TOTAL, _MICRO) if spec.given(*path)]
    if not given:
        return
    total = spec.eval_batch("global_batch_size", spec.global_batch_size)
    micro, dp = spec.eval_batch("micro_batch_size", spec.micro_batch_size), spec.axis(Axis.DP)
    if total % (micro * dp) == 0:
        return
    near = nearest_multiples(total, micro * dp)
    yield Finding(
        f"eval_global_batch_size {total} / (eval_micro_batch_size {micro} · dp {dp}) = {total} / {micro * dp} is not "
        f"whole; nearest: {listed(near)}",
        given[0],
        help=f"write a multiple of {micro * dp}",
        fixes=(
            *(Fix(f"set {_TOTAL[1]} to {value}", Safety.CHANGES_COST, (Edit(_TOTAL, value),)) for value in near),
            Fix("remove both", Safety.CHANGES_COST, tuple(Edit(path, remove=True) for path in given)),
        ),
        related=also(spec, *given[1:], ("training", "global_batch_size"), ("parallelism", "dp")),
    )


@rule(
    "B009",
    "DeepSpeed has no evaluation batch",
    """DeepSpeed's configuration has no key for the evaluation batch. It is passed to Megatron-LM, and read by
    `parcompile.runtime.evaluate`; another evaluation loop does not see it.""",
    wrong={"training": {"eval_global_batch_size": 16}},
    right={"training": {}},
    severity=Severity.INFO,
    targets=("deepspeed", "runtime"),
)
def evaluation_batch_is_megatrons(spec: Resolution) -> Iterator[Finding]:
    """Fires when one is given."""
    for path in (_TOTAL, _MICRO):
        if spec.given(*path):
            yield Finding(
                f"{path[1]} is not in DeepSpeed's configuration", path, help="parcompile.runtime.evaluate reads it"
            )
