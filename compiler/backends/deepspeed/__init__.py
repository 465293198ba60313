"""DeepSpeed: what its configuration means for a plan, how it is written, and how it is read.

What its keys mean for a plan stands here, for `write`, `read` and the rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from parcompile.user_files import shipped

# What DeepSpeed's keys mean for a plan: which of them it decides, which break it, and DeepSpeed's own defaults.

_STORED = shipped("parcompile.backends.deepspeed", "facts.json")

VERSION = "0.19.8"
"""DeepSpeed's version whose configuration was read and is tested."""

DECIDED_BY: Mapping[str, str] = _STORED["decided_by"]
"""Keys that the plan writes itself, and where the spec says so."""

FORBIDDEN: Mapping[str, str] = _STORED["forbidden"]
"""Keys, by their dotted paths, that break a plan or do nothing in it, and why."""

SWITCHED: Mapping[str, str] = _STORED["switched"]
"""Switches, by their dotted paths, whose sections break a plan or do nothing in it where they are on, and why."""

FORBIDDEN_ZERO: Mapping[str, str] = _STORED["forbidden_zero"]
"""Keys of zero_optimization that break a plan, and why."""


NO_NVME = (
    "DeepSpeed reads and writes drives at stage 3 alone, through async_io, which needs libaio, with which this never "
    "ran, and checkpoints would lack what lies there"
)
"""Why a plan keeps no optimizer state on NVMe."""


def refusal(path: tuple[Any, ...]) -> str | None:
    """Why a key has no place in a spec's further DeepSpeed keys, whatever stands under it; None when it has one."""
    if path[0] == "zero_optimization":
        if path[1:2] == ("offload_optimizer",) and path[2:] and path[2] not in ("device", "pin_memory"):
            return "of the optimizer on the host a plan says its device and pin_memory"
        return FORBIDDEN_ZERO.get(path[1]) if len(path) > 1 else None
    if path[0] in DECIDED_BY:
        return f"{DECIDED_BY[path[0]]} sets it"
    return FORBIDDEN.get(path[0]) or FORBIDDEN.get(".".join(path[:2]))


DEFAULTS: Mapping[str, Any] = _STORED["defaults"]
"""DeepSpeed's own values for what a configuration leaves out and a spec says (runtime/config.py)."""

ADAM: Mapping[str, Any] = _STORED["adam"]
"""Defaults of ops/adam/fused_adam.py, ops/adam/cpu_adam.py and torch.optim.Adam."""
TORCH_ADAMW: Mapping[str, Any] = {**ADAM, "weight_decay": 0.01}
"""Those of torch.optim.AdamW, which "torch_adam": true brings."""
OPTIMIZERS: Mapping[str, Mapping[str, Any]] = _STORED["optimizers"]
"""Of runtime/zero/muon/original_muon.py, torch.optim.SGD and torch.optim.Adagrad. Muon has two rates, and neither for
both."""
OFF: Mapping[str, Any] = _STORED["off"]
"""Settings of optimizers that a spec has no word for, with the value that switches each off: also the default."""
SAME_NUMBERS = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Settings that choose between implementations."""

SCHEDULERS: Mapping[str, Mapping[str, Any]] = _STORED["schedulers"]
"""Defaults of the schedules that a spec can say (runtime/lr_schedules.py)."""
SCHEDULE_TYPES: Mapping[str, str] = _STORED["schedule_types"]
"""What a spec calls them."""


# At which ZeRO stages DeepSpeed reads a key of zero_optimization; rules of specs and of files ask here.
# `tests/compiler/test_zero_stages.py` reads the same from the code of the installed DeepSpeed.

_STAGES: Sequence[Mapping[str, Any]] = _STORED["stages"]
"""Keys with the first and last stage at which DeepSpeed 0.19.8 reads them (runtime/engine.py, runtime/zero)."""

UNREAD = frozenset({"allgather_partitions"})
"""What DeepSpeed 0.19.8 takes and reads at no stage."""

OWN_CHECKPOINTS: Mapping[str, str] = _STORED["own_checkpoints"]
"""Keys of stage 3 that DeepSpeed reads where the runtime saves and loads in its place, and what the runtime does."""
GATHERED = frozenset(key for key in OWN_CHECKPOINTS if "gather" in key)
"""Of these the keys that ask for whole weights in a saved model, which the runtime writes always."""

MEMORY = frozenset({"offload_param", "offload_optimizer", "zero_hpz_partition_size", "zero_quantized_weights"})
"""Keys whose users count on what they save."""


def first_stage(key: str) -> int:
    """The first stage at which a key has an effect; 0 when it always has."""
    return _range(key)[0]


def last_stage(key: str) -> int:
    """The last one, mostly 3."""
    return _range(key)[1]


def has_effect(key: str, stage: int) -> bool:
    """Whether DeepSpeed reads a key at a stage."""
    return key not in UNREAD and first_stage(key) <= stage <= last_stage(key)


def _range(key: str) -> tuple[int, int]:
    if key.startswith("stage3_"):
        return 3, 3
    return next(((one["first"], one["last"]) for one in _STAGES if key in one["keys"]), (0, 3))


def reach(key: str) -> str:
    """The stages at which a key has an effect, as "from stage 3 on" or "at stages 1 and 2"."""
    if key in UNREAD:
        return "at no stage"
    first, last = _range(key)
    return f"at stages {first} and {last}" if last < 3 and first else f"from stage {first} on"


# How DeepSpeed averages gradients, and when it refuses to or does not; rules of specs and of files ask here.
# Read in runtime/zero/stage_1_and_2.py and stage3.py, and run: with a factor f each rank divides by f before the
# reduction and by (ranks / f) after it. Stage 1 with reduce_scatter divides by the ranks at once, whatever f is.


def refused_scaling(stage: int, *, reduce_scatter: bool, prescale: bool, predivide: float) -> str | None:
    """Why DeepSpeed does not start; None when it does."""
    if stage < 2 or not reduce_scatter:
        return None
    if predivide != 1:
        return f"gradient_predivide_factor {predivide:g} needs reduce_scatter false at stage {stage}"
    return f"prescale_gradients needs reduce_scatter false at stage {stage}" if prescale else None


def wrong_scale(
    stage: int, *, reduce_scatter: bool, prescale: bool, predivide: float, ranks: int, cp: int = 1
) -> str | None:
    """By how much gradients come out wrong on `ranks` ranks (dp · cp); None when they are right."""
    if prescale or predivide == 1 or predivide != ranks:
        return None
    if stage == 3 and not reduce_scatter:
        return f"{predivide:g} times too small: a factor equal to the number of ranks is not multiplied back at stage 3"
    if cp > 1 and stage in (1, 2) and not reduce_scatter:
        return f"{cp} times too small: with a factor equal to dp · cp = {ranks}, the sum over cp is left out"
    return None
