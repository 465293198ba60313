"""Precision and what goes with it."""

from __future__ import annotations

from collections.abc import Iterator

from parcompile.diagnostics import Edit, Fix, Safety, Severity
from parcompile.layout.groups import Axis
from parcompile.spec import OPTIMIZER_KEYS, Precision
from parcompile.spec.resolve import Resolution

from . import Finding, also, removable, rule

_PRECISION = ("training", "precision")
_SUMS = ("training", "gradient_accumulation_dtype")
_DECAY = ("training", "optimizer", "weight_decay")


@rule("P001")
def accumulation_is_not_narrower(spec: Resolution) -> Iterator[Finding]:
    """Fires when gradient_accumulation_dtype is neither fp32 nor the precision."""
    sums, weights = spec.gradient_accumulation_dtype, spec.precision
    if sums not in (Precision.FP32, weights):
        yield Finding(
            f"gradient_accumulation_dtype {sums.value} with precision {weights.value}",
            _SUMS,
            help=f"write {weights.value} or fp32",
            fixes=tuple(
                Fix(f"accumulate in {name}", Safety.CHANGES_NUMERICS, (Edit(_SUMS, name),))
                for name in dict.fromkeys((weights.value, "fp32"))
            ),
            related=also(spec, _PRECISION),
        )


@rule("P003")
def loss_scale_needs_fp16(spec: Resolution) -> Iterator[Finding]:
    """Fires when a loss scale is given with another precision."""
    path = ("training", "loss_scale")
    if spec.given(*path) and spec.precision is not Precision.FP16:
        yield Finding(
            f"loss_scale {spec.get(*path)} with precision {spec.precision.value}: only fp16 is scaled",
            path,
            help="remove loss_scale, or set precision to fp16",
            fixes=(Fix.removing(path, Safety.SAFE), Fix.setting(_PRECISION, "fp16", Safety.CHANGES_NUMERICS)),
            related=also(spec, _PRECISION),
        )


@rule("P004", severity=Severity.INFO, targets=("deepspeed",))
def pipelined_bf16_accumulates_in_fp32(spec: Resolution) -> Iterator[Finding]:
    """Fires for pp > 1, bf16, ZeRO-1 without fp32 accumulation."""
    pp, sums = spec.axis(Axis.PP), spec.gradient_accumulation_dtype
    if pp > 1 and spec.precision is Precision.BF16 and spec.zero_stage == 1 and sums is Precision.BF16:
        yield Finding(
            f"pp {pp} with precision bf16 and ZeRO stage 1 accumulates in {sums.value}: parcompile.runtime does so, "
            "DeepSpeed's PipelineEngine refuses it",
            _SUMS if spec.given(*_SUMS) else _PRECISION if spec.given(*_PRECISION) else ("parallelism", "pp"),
            help='nothing to do, or set "gradient_accumulation_dtype": "fp32"',
            related=also(spec, ("parallelism", "pp"), ("zero", "stage")),
        )


@rule("P007", severity=Severity.INFO)
def coupled_decay_is_shown(spec: Resolution) -> Iterator[Finding]:
    """Fires for adam with weight decay, also that of the default."""
    path = ("training", "optimizer", "type")
    decay = float(spec.get(*_DECAY))
    kind = spec.get(*path)
    if spec.given(*path) and kind in ("adam", "sgd", "adagrad") and decay > 0:
        yield Finding(
            f"{kind} with weight_decay {decay}: the decay is part of the gradient (L2), not decoupled as in adamw",
            _DECAY if spec.given(*_DECAY) else path,
            help='use "adamw", or set weight_decay to 0',
        )


_OPTIMIZER = ("training", "optimizer")
_LEFT_OUT = (*_OPTIMIZER, "no_weight_decay")


@rule("P009", severity=Severity.WARNING)
def decay_is_left_out_of_some(spec: Resolution) -> Iterator[Finding]:
    """Fires where weight_decay is 0."""
    if spec.given(*_LEFT_OUT) and not spec.get(*_DECAY):
        message = f'weight_decay 0 with no_weight_decay "{spec.get(*_LEFT_OUT)}": nothing is decayed anyway'
        hint = "set a weight_decay, such as 0.1, or remove no_weight_decay"
        yield removable(_LEFT_OUT, message, hint, also(spec, _DECAY), Safety.CHANGES_COST)


_STARTS, _STYLE = ((*_OPTIMIZER, name) for name in ("start_weight_decay", "weight_decay_style"))
_STEPS = ("training", "train_steps")


@rule("P010")
def changing_decay_has_both_ends(spec: Resolution) -> Iterator[Finding]:
    """Fires where train_steps is missing, the start is above the end, or a style has no start."""
    if not spec.given(*_STARTS):
        if spec.given(*_STYLE):
            message = f"weight_decay_style {spec.get(*_STYLE)} without start_weight_decay: "
            message += f"weight decay stays {spec.get(*_DECAY):g}"
            yield removable(_STYLE, message, "set start_weight_decay, such as 0.01, or remove it")
        return
    start, end = float(spec.get(*_STARTS)), float(spec.get(*_DECAY))
    if start > end:
        message = f"start_weight_decay {start:g} > weight_decay {end:g}: weight decay may rise, and not fall"
        hint = f"write a start_weight_decay of {end:g} or less, or remove it"
        yield removable(_STARTS, message, hint, also(spec, _DECAY), Safety.CHANGES_NUMERICS)
    if spec.get(*_STEPS) is None:
        yield Finding(
            f"weight decay goes from {start:g} to {end:g} until the last training step, but train_steps is not given",
            _STARTS,
            help="add train_steps under training",
        )


@rule("P008")
def settings_are_the_optimizers(spec: Resolution) -> Iterator[Finding]:
    """Fires for each key that the type does not read, and for nesterov without momentum under sgd."""
    kind = str(spec.get(*_OPTIMIZER, "type"))
    known = OPTIMIZER_KEYS[kind]
    for key in dict.fromkeys(key for keys in OPTIMIZER_KEYS.values() for key in keys):
        path = (*_OPTIMIZER, key)
        if key not in known and spec.given(*path):
            owners = ", ".join(name for name, keys in OPTIMIZER_KEYS.items() if key in keys)
            message, hint = f"optimizer {kind} has no {key}: it is of {owners}", f"remove it, or choose one of {owners}"
            yield removable(path, message, hint, (), Safety.CHANGES_COST)
    if kind == "sgd" and spec.optimizer.nesterov and not spec.optimizer.momentum:
        path = (*_OPTIMIZER, "nesterov")
        yield Finding("nesterov with momentum 0: torch's SGD refuses it", path, help='set "momentum", such as 0.9')
