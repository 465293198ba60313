"""A DeepSpeed configuration on its own: the schedule of the learning rate."""

from __future__ import annotations

from collections.abc import Iterator

from parcompile.backends.deepspeed.versions import order
from parcompile.diagnostics import Edit, Fix, Path, Related, Safety, Severity

from .f_deepspeed_stages import BATCH
from .file_registry import DEEPSPEED, Settings, file_rule
from .registry import Finding

_WARM_UPS = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
_LOWER_UPPER = {
    "WarmupLR": ("warmup_min_lr", "warmup_max_lr"),
    "WarmupDecayLR": ("warmup_min_lr", "warmup_max_lr"),
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
}
_REFUSED_SINCE = "0.19.6"
"""Before this version a warm-up of no steps was silently one of two."""
_SCHEDULE = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 100, "total_num_steps": 1000}}


def _params(name: str) -> Path:
    return ("scheduler", "params", name)


@file_rule(
    "F026",
    DEEPSPEED,
    "a warm-up that does not fit into the run",
    """The warm-up of WarmupDecayLR and WarmupCosineLR is a part of total_num_steps. When it is longer, the peak is
    never reached, and nothing falls. A warm-up has at least one step.""",
    wrong={**BATCH, "scheduler": {**_SCHEDULE, "params": {"warmup_num_steps": 2000, "total_num_steps": 1000}}},
    right={**BATCH, "scheduler": _SCHEDULE},
    severity=Severity.WARNING,
    sources=("DeepSpeed runtime/lr_schedules.py",),
)
def warm_up_fits(settings: Settings) -> Iterator[Finding]:
    """Fires for a warm-up longer than the run, and for one without steps."""
    kind = settings.get("scheduler", "type")
    if kind not in _WARM_UPS:
        return
    warm, total = (settings.number(*_params(name)) for name in ("warmup_num_steps", "total_num_steps"))
    if warm is not None and warm <= 0:
        version = settings.around.version
        refused = order(version) >= order(_REFUSED_SINCE)
        does = (
            f"DeepSpeed refuses it since {_REFUSED_SINCE}" if refused else f"DeepSpeed {version} warms up for 2 steps"
        )
        fix = Fix("set warmup_num_steps to 1", Safety.CHANGES_NUMERICS, (Edit(_params("warmup_num_steps"), 1),))
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


@file_rule(
    "F027",
    DEEPSPEED,
    "the lowest learning rate is above the highest",
    """A schedule rises from the lowest to the highest rate. If the lowest rate is the higher one, the rate falls
    during the warm-up, and DeepSpeed does not report it.""",
    wrong={
        **BATCH,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0.001, "warmup_max_lr": 0.0001}},
    },
    right={
        **BATCH,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0.0001, "warmup_max_lr": 0.001}},
    },
    severity=Severity.WARNING,
    sources=("DeepSpeed runtime/lr_schedules.py",),
)
def rates_rise(settings: Settings) -> Iterator[Finding]:
    """Fires when both are numbers and stand the wrong way round."""
    names = _LOWER_UPPER.get(str(settings.get("scheduler", "type")))
    if names is None:
        return
    low, high = (settings.number(*_params(name)) for name in names)
    rate = settings.number("optimizer", "params", "lr")
    if high is None and names[1] == "warmup_max_lr" and settings.left_out(*_params(names[1])):
        high = rate if order(settings.around.version) >= order("0.17.5") else 0.001
    if low is not None and high is not None and low > high:
        message = f"{names[0]} {low:g} > {names[1]} {high:g}: the rate falls where it should rise"
        edits = (Edit(_params(names[0]), high), Edit(_params(names[1]), low))
        fix = Fix("exchange the two", Safety.CHANGES_NUMERICS, edits)
        related = (Related("the highest", _params(names[1])),)
        yield Finding(message, _params(names[0]), help="exchange the two", fixes=(fix,), related=related)
