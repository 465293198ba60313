"""A DeepSpeed configuration on its own: batch sizes, optimizers and the schedule of the learning rate."""

from __future__ import annotations

from collections.abc import Iterator

from parcompile.backends.deepspeed.table import order
from parcompile.backends.kinds import DEEPSPEED
from parcompile.diagnostics import Edit, Fix, Path, Related, Safety, Severity
from parcompile.lint.deepspeed.constructors import ADAM, on_host, optimizers
from parcompile.lint.registry import Settings, file_rule
from parcompile.rules import Finding, listed, nearest_multiples

from .stages import ZERO, stage_of

TOTAL, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def ranks(settings: Settings) -> int | None:
    """The data-parallel ranks that the three batch sizes leave, None when they do not tell."""
    total, micro, steps = (settings.number(name) for name in (TOTAL, MICRO, STEPS))
    if not total or not micro or not steps or total % (micro * steps):
        return None
    return int(total // (micro * steps))


@file_rule("F003", DEEPSPEED)
def batches_multiply(settings: Settings) -> Iterator[Finding]:
    """Fires when no number of ranks gives the batch."""
    for name in (TOTAL, MICRO, STEPS):
        size = settings.number(name)
        if size is not None and size <= 0:
            yield Finding(
                f"{name} {size:g}: DeepSpeed stops at a batch without samples", (name,), help="write 1 or more"
            )
    total, factors = settings.number(TOTAL), {name: settings.number(name) for name in (MICRO, STEPS)}
    given = {name: int(value) for name, value in factors.items() if value and value > 0}
    if not total or total < 0 or not given:
        return
    divisor = given.get(MICRO, 1) * given.get(STEPS, 1)
    if int(total) % divisor:
        terms = " · ".join(f"{name} {value}" for name, value in given.items())
        near = nearest_multiples(int(total), divisor)
        yield Finding(
            f"{TOTAL} {int(total)} / ({terms}) is not whole; nearest: {listed(near)}",
            (TOTAL,),
            help=f"write a multiple of {divisor}",
            fixes=tuple(Fix.setting((TOTAL,), value, Safety.CHANGES_NUMERICS) for value in near),
            related=tuple(Related(f"{name} is set here", (name,)) for name in given),
        )


# A DeepSpeed configuration on its own: optimizers and what they do not go with.

_TYPE: Path = ("optimizer", "type")
_TESTED = frozenset({"adam", "adamw", "adagrad", "lion", "muon"})
_TESTED_OF_TORCH = frozenset({"Adam", "AdamW", "Adagrad"})
_COMPRESSED = frozenset({"onebitadam", "onebitlamb", "zerooneadam"})


@file_rule("F008", DEEPSPEED)
def optimizer_goes_with_zero(settings: Settings) -> Iterator[Finding]:
    """Fires for untested and for compressed optimizers at stage 1 and above."""
    kind, stage = settings.get(*_TYPE), stage_of(settings)
    if not isinstance(kind, str) or not stage:
        return
    related = (Related(f"stage {stage} is set here", (ZERO, "stage")),)
    own = kind.lower() in optimizers(settings.usage.version)
    if own and kind.lower() in _COMPRESSED:
        message = f"{kind} compresses gradients itself and cannot be combined with ZeRO stage {stage}"
        fixes = (Fix.setting((ZERO, "stage"), 0, Safety.CHANGES_COST),)
        yield Finding(message, _TYPE, help="use stage 0, or AdamW", fixes=fixes, related=related)
    elif not (own and kind.lower() in _TESTED) and kind not in _TESTED_OF_TORCH:
        if settings.get("zero_allow_untested_optimizer") is True:
            return
        allow = Edit(("zero_allow_untested_optimizer",), value=True)
        yield Finding(
            f"{kind} is not among the optimizers that DeepSpeed has tested with ZeRO: it refuses stage {stage}",
            _TYPE,
            help='write "zero_allow_untested_optimizer": true',
            fixes=(Fix("allow it", Safety.CHANGES_COST, (allow,)),),
            related=related,
        )


@file_rule("F023", DEEPSPEED)
def implementation_has_it(settings: Settings) -> Iterator[Finding]:
    """Fires for amsgrad with DeepSpeed's own implementations."""
    kind, params = settings.get(*_TYPE), settings.section("optimizer", "params")
    if not isinstance(kind, str) or settings.get("optimizer", "params", "amsgrad") is not True:
        return
    fused = kind.lower() in ADAM and not params.get("torch_adam") and not on_host(settings.tree)
    if fused or kind.lower() == "lamb":
        path: Path = ("optimizer", "params", "amsgrad")
        fix = Fix.removing(path, Safety.CHANGES_NUMERICS)
        yield Finding(f"DeepSpeed's {kind} has no AMSGrad and refuses it", path, help="remove it", fixes=(fix,))


@file_rule("F024", DEEPSPEED)
def muon_has_whole_matrices(settings: Settings) -> Iterator[Finding]:
    """Fires at stage 3 with reduce_scatter."""
    kind, path = settings.get(*_TYPE), (ZERO, "reduce_scatter")
    if not isinstance(kind, str) or kind.lower() != "muon" or stage_of(settings) != 3:
        return
    if settings.get(*path, default=True) is not False:
        yield Finding(
            "Muon at stage 3 with reduce_scatter: DeepSpeed refuses the combination",
            _TYPE,
            help='write "reduce_scatter": false',
            fixes=(Fix.setting(path, False, Safety.CHANGES_COST),),
        )


@file_rule("F025", DEEPSPEED)
def switches_work(settings: Settings) -> Iterator[Finding]:
    """Fires for both."""
    stage = stage_of(settings)
    path: Path = (ZERO, "legacy_stage1")
    if settings.get(*path) is True and stage:
        fix = Fix.removing(path, Safety.SAFE)
        yield Finding(
            "legacy_stage1: DeepSpeed has no such implementation any more", path, help="remove it", fixes=(fix,)
        )
    path = (ZERO, "elastic_checkpoint")
    if settings.get(*path) is True and stage == 3:
        fix = Fix.removing(path, Safety.SAFE)
        message = "elastic_checkpoint has no effect at stage 3"
        advice = "use universal checkpoints: checkpoint.load_universal"
        yield Finding(message, path, help=advice, fixes=(fix,), severity=Severity.WARNING)


# A DeepSpeed configuration on its own: the schedule of the learning rate.

_WARM_UPS = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
_LOWER_UPPER = {
    "WarmupLR": ("warmup_min_lr", "warmup_max_lr"),
    "WarmupDecayLR": ("warmup_min_lr", "warmup_max_lr"),
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
}
_REFUSED_SINCE = "0.19.6"
"""Before this version a warm-up of no steps was silently one of two."""


def _params(name: str) -> Path:
    return ("scheduler", "params", name)


@file_rule("F026", DEEPSPEED, severity=Severity.WARNING)
def warm_up_fits(settings: Settings) -> Iterator[Finding]:
    """Fires for a warm-up longer than the run, and for one without steps."""
    kind = settings.get("scheduler", "type")
    if kind not in _WARM_UPS:
        return
    warm, total = (settings.number(*_params(name)) for name in ("warmup_num_steps", "total_num_steps"))
    if warm is not None and warm <= 0:
        version = settings.usage.version
        refused = order(version) >= order(_REFUSED_SINCE)
        does = (
            f"DeepSpeed refuses it since {_REFUSED_SINCE}" if refused else f"DeepSpeed {version} warms up for 2 steps"
        )
        fix = Fix.setting(_params("warmup_num_steps"), 1, Safety.CHANGES_NUMERICS)
        yield Finding(
            f"warmup_num_steps {warm:g}: {does}",
            _params("warmup_num_steps"),
            help="write 1 for hardly any warm-up",
            fixes=(fix,),
            severity=Severity.ERROR if refused else Severity.WARNING,
        )
    elif warm is not None and total is not None and warm > total and kind != "WarmupLR":
        yield Finding(
            f"warmup_num_steps {warm:g} > total_num_steps {total:g}: the run ends inside its warm-up",
            _params("warmup_num_steps"),
            help=f"write less than {total:g}",
            related=(Related("the length of the run", _params("total_num_steps")),),
        )


@file_rule("F027", DEEPSPEED, severity=Severity.WARNING)
def rates_rise(settings: Settings) -> Iterator[Finding]:
    """Fires when both are numbers and stand the wrong way round."""
    names = _LOWER_UPPER.get(str(settings.get("scheduler", "type")))
    if names is None:
        return
    low, high = (settings.number(*_params(name)) for name in names)
    rate = settings.number("optimizer", "params", "lr")
    if high is None and names[1] == "warmup_max_lr" and settings.left_out(*_params(names[1])):
        high = rate if order(settings.usage.version) >= order("0.17.5") else 0.001
    if low is not None and high is not None and low > high:
        message = f"{names[0]} {low:g} > {names[1]} {high:g}: the rate falls where it should rise"
        edits = (Edit(_params(names[0]), high), Edit(_params(names[1]), low))
        fix = Fix("exchange the two", Safety.CHANGES_NUMERICS, edits)
        related = (Related("the highest", _params(names[1])),)
        yield Finding(message, _params(names[0]), help="exchange the two", fixes=(fix,), related=related)
