"""ZeRO and what it does not go with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from parcompile.backends.deepspeed import GATHERED, OWN_CHECKPOINTS, has_effect, reach
from parcompile.diagnostics import Edit, Fix, Safety, Severity
from parcompile.layout.groups import Axis
from parcompile.model.blocks.experts import router_biases
from parcompile.model.derived_rows import parameter_table
from parcompile.spec.resolve import Resolution

from . import Finding, also, removable, rule

_STAGE = ("zero", "stage")
_ZERO: tuple[str, ...] = ("deepspeed", "zero_optimization")
_RATE = ("training", "router", "bias_update_rate")


@rule("Z002", targets=("deepspeed",))
def experts_go_with_their_zero_options(spec: Resolution) -> Iterator[Finding]:
    stage, ep = spec.zero_stage, spec.axis(Axis.EP)
    if stage == 3 and spec.given(*_RATE):
        for name in router_biases(row.name for row in parameter_table(spec.shape)):
            yield Finding(
                f"bias_update_rate {spec.get(*_RATE)} at zero.stage 3: {name} of {spec.shape.model_type} is a "
                "parameter, which this stage shards",
                _STAGE,
                help="use stage 2, or remove bias_update_rate",
                fixes=(_at(2), Fix.removing(_RATE, Safety.CHANGES_NUMERICS)),
                related=also(spec, _RATE),
            )
    if not spec.shape.has_moe or ep == 1 or stage not in (1, 2):
        return
    needed = ("reduce_scatter", "contiguous_gradients")[:stage]
    for key in needed:
        path = (*_ZERO, key)
        if spec.given(*path) and spec.get(*path) is False:
            message = f"{key} false with ep {ep} at zero.stage {stage}: DeepSpeed stops with an assertion"
            yield removable(path, message, "remove it", also(spec, ("parallelism", "ep")), Safety.CHANGES_COST)


@rule("Z003", severity=Severity.WARNING, targets=("deepspeed",))
def zero_keys_have_an_effect(spec: Resolution) -> Iterator[Finding]:
    stage = spec.zero_stage
    zero = spec.get("deepspeed", "zero_optimization")
    for key in zero if isinstance(zero, Mapping) else ():
        path = (*_ZERO, key)
        if stage == 3 and key in GATHERED and zero[key] is True:
            continue
        by_runtime = stage == 3 and key in OWN_CHECKPOINTS
        if by_runtime or not has_effect(key, stage):
            reason = OWN_CHECKPOINTS[key] if by_runtime else f"DeepSpeed reads it {reach(key)}"
            message = f"{key} has no effect at zero.stage {stage}: {reason}"
            yield removable(path, message, "remove it", also(spec, _STAGE))


def _at(stage: int) -> Fix:
    return Fix(f"set zero.stage to {stage}", Safety.CHANGES_COST, (Edit(_STAGE, stage),))
