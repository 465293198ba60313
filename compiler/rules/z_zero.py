"""ZeRO and what it does not go with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from parcompile.backends.deepspeed import GATHERED, NO_NVME, OWN_CHECKPOINTS, has_effect, reach
from parcompile.diagnostics import Edit, Fix, Safety, Severity
from parcompile.layout.groups import Axis
from parcompile.model.blocks.experts import router_biases
from parcompile.model.derived_rows import parameter_table
from parcompile.spec.resolve import Resolution

from . import Finding, also, removable, rule

_STAGE = ("zero", "stage")
_ZERO: tuple[str, ...] = ("deepspeed", "zero_optimization")
_RATE = ("training", "router", "bias_update_rate")


@rule("Z001", targets=("deepspeed",))
def zero_2_excludes_pipelines(spec: Resolution) -> Iterator[Finding]:
    """Fires for stage ≥ 2 and pp > 1."""
    stage, pp = spec.zero_stage, spec.axis(Axis.PP)
    if stage >= 2 and pp > 1:
        hint = "use stage 1, or pp 1"
        if stage > 2:
            ranks = spec.axis(Axis.DP) * spec.axis(Axis.CP) * pp
            hint += f": stage 3 then shards the weights over the {ranks} ranks of dp · cp"
        yield Finding(
            f"zero.stage {stage} with pp {pp}: DeepSpeed runs pipelines up to stage 1",
            _STAGE,
            help=hint,
            fixes=(_at(1),),
            related=also(spec, ("parallelism", "pp")),
        )


@rule("Z002", targets=("deepspeed",))
def experts_go_with_their_zero_options(spec: Resolution) -> Iterator[Finding]:
    """Fires for what stages 1 and 2 assert where ep > 1, and for a bias that moves and that stage 3 shards."""
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
    """Fires for each key of zero_optimization that the stage ignores."""
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


@rule("Z004", severity=Severity.INFO)
def zero_has_something_to_shard(spec: Resolution) -> Iterator[Finding]:
    """Says that dp · cp is 1."""
    stage = spec.zero_stage
    if stage > 0 and spec.world_size > 1 and spec.axis(Axis.DP) * spec.axis(Axis.CP) == 1:
        place = _STAGE if spec.given(*_STAGE) else ("parallelism", "dp")
        yield Finding(f"zero.stage {stage} with dp 1 · cp 1 = 1 shard: nothing is divided", place)


@rule("Z005", severity=Severity.INFO, targets=("deepspeed",))
def unsharded_sums_have_the_type_of_weights(spec: Resolution) -> Iterator[Finding]:
    """Says so at stage 0 with sums in another type than the weights."""
    weights, sums = spec.precision.value, spec.gradient_accumulation_dtype.value
    if spec.zero_stage == 0 and weights != sums:
        yield Finding(
            f"zero.stage 0 with weights in {weights} and sums of gradients in {sums}: parcompile.runtime does so, "
            f"DeepSpeed alone sums in {weights}",
            ("training", "gradient_accumulation_dtype"),
            help="nothing to do, or use stage 1",
            related=also(spec, _STAGE),
        )


@rule("Z006")
def the_host_can_hold_the_optimizer(spec: Resolution) -> Iterator[Finding]:
    """Fires for NVMe, below the stage that DeepSpeed offloads from, for Muon, and for DeepSpeed's Adam without Adam."""
    for part, first in (("optimizer", 1), ("param", 3)):
        yield from _part_on_host(spec, part, first)


def _part_on_host(spec: Resolution, part: str, first: int) -> Iterator[Finding]:
    key = f"offload_{part}"
    offload, stage, place = spec.offload_of(part), spec.zero_stage, ("zero", key, "device")
    removal = Fix.removing(place[:2], Safety.CHANGES_COST)
    if offload is not None and offload.device == "nvme":
        yield Finding(
            f"device nvme: {NO_NVME}",
            place,
            help=f'write "cpu", or remove {key}',
            fixes=(Fix('set device to "cpu"', Safety.CHANGES_COST, (Edit(place, "cpu"),)), removal),
        )
    elif offload is not None and stage < first:
        what = "weights at stage 3" if first == 3 else "from stage 1 on"
        yield Finding(
            f"device {offload.device} at zero.stage {stage}: DeepSpeed offloads {what}",
            place,
            help=f"use stage {first}, or remove {key}",
            fixes=(_at(first), removal),
            related=also(spec, _STAGE),
        )
    elif part == "optimizer" and offload is not None and spec.optimizer.is_muon:
        message = f"device {offload.device} with optimizer muon: whole matrices are put together on the accelerators"
        related = also(spec, ("training", "optimizer", "type"))
        yield Finding(message, place, f'remove {key}, or write "type": "adamw"', (removal,), related)
    elif part == "optimizer" and offload is not None and offload.implementation != "torch":
        kind, place = spec.optimizer.type, (*place[:2], "implementation")
        if kind not in ("adam", "adamw"):
            message = f"implementation {offload.implementation} with optimizer {kind}: its kernel is for adamw and adam"
            related = also(spec, ("training", "optimizer", "type"))
            yield removable(
                place, message, 'write "torch", whose kernel steps the others', related, Safety.CHANGES_COST
            )


def _at(stage: int) -> Fix:
    return Fix(f"set zero.stage to {stage}", Safety.CHANGES_COST, (Edit(_STAGE, stage),))
