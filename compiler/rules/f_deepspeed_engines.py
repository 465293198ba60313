"""A DeepSpeed configuration on its own: ZenFlow and DeepCompile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from parcompile.diagnostics import Path, Severity

from .f_deepspeed_stages import BATCH, ZERO, stage_of
from .file_registry import DEEPSPEED, Settings, file_rule
from .registry import Finding

_ZENFLOW: Path = (ZERO, "zenflow")
_HOST = {"device": "cpu"}
_STRATEGIES = ("auto", "step", "epoch")
_ADAM = {"type": "AdamW", "params": {"lr": 0.0001}}


@file_rule(
    "F037",
    DEEPSPEED,
    "a ZenFlow that cannot work",
    """ZenFlow updates the important columns of gradients at once and the rest on the host later: it needs ZeRO stage 1
    to 3 with the optimizer on the host and Adam. The strategy "auto" selects by epoch and sets the interval itself;
    the others need select_interval as a number, no smaller than update_interval. An offload of the selected part needs
    overlap_comm at stage 3.""",
    wrong={
        **BATCH,
        "optimizer": _ADAM,
        ZERO: {
            "stage": 2,
            "offload_optimizer": _HOST,
            "zenflow": {"select_strategy": "step", "select_interval": "auto"},
        },
    },
    right={
        **BATCH,
        "optimizer": _ADAM,
        ZERO: {
            "stage": 2,
            "offload_optimizer": _HOST,
            "zenflow": {"select_strategy": "step", "select_interval": 16, "update_interval": 4},
        },
    },
    sources=(
        "DeepSpeed runtime/zenflow/engine.py, runtime/zenflow/engine_stage3.py, runtime/zenflow/zenflow_config.py",
    ),
)
def zenflow_works(settings: Settings) -> Iterator[Finding]:
    """Fires for each of these conditions that does not hold."""
    flow, stage = settings.section(*map(str, _ZENFLOW)), stage_of(settings)
    if not flow or stage is None:
        return
    yield from _values(flow)
    if stage == 0:
        message = "zenflow has no effect at stage 0"
        yield Finding(message, _ZENFLOW, help="set stage to 1, 2 or 3", severity=Severity.WARNING)
        return
    yield from _intervals(flow)
    if settings.left_out("optimizer"):
        message = "zenflow needs the optimizer in this file: it makes one of its own from optimizer.params"
        yield Finding(message, _ZENFLOW, help='add "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, say')
    if stage == 3 and flow.get("offload") is True and settings.get(ZERO, "overlap_comm") is False:
        yield Finding("zenflow.offload needs overlap_comm at stage 3", (*_ZENFLOW, "offload"), help="switch it on")


def _values(flow: Mapping[str, Any]) -> Iterator[Finding]:
    """What no stage takes."""
    strategy, update = flow.get("select_strategy", "auto"), flow.get("update_interval")
    for name, interval in (("select_interval", flow.get("select_interval")), ("update_interval", update)):
        if isinstance(interval, str) and interval != "auto":
            message = f'{name} "{interval}": ZenFlow takes a number or "auto"'
            yield Finding(message, (*_ZENFLOW, name), help="write the number without quotes")
    if strategy not in _STRATEGIES:
        message = f'select_strategy "{strategy}" is none of ZenFlow\'s'
        yield Finding(message, (*_ZENFLOW, "select_strategy"), help=f"write one of {', '.join(_STRATEGIES)}")
    if isinstance(update, int) and update < 1:
        yield Finding(f"update_interval {update} is below 1", (*_ZENFLOW, "update_interval"), help="write 1 or more")


def _intervals(flow: Mapping[str, Any]) -> Iterator[Finding]:
    """What the engine finds when it starts."""
    strategy = flow.get("select_strategy", "auto")
    select, update = flow.get("select_interval", "auto"), flow.get("update_interval", "auto")
    if strategy == "auto" and _is_whole(select):
        message = f'select_interval {select} with select_strategy "auto", which sets it: DeepSpeed refuses this'
        yield Finding(message, (*_ZENFLOW, "select_interval"), help="remove it, or choose a strategy")
    elif strategy in _STRATEGIES[1:] and select == "auto":
        message = f'select_strategy "{strategy}" needs select_interval as a number'
        yield Finding(message, (*_ZENFLOW, "select_strategy"), help='add "select_interval": 16, say')
    if strategy == "step" and _is_whole(select) and _is_whole(update) and 0 < select < update:
        message = f"select_interval {select} < update_interval {update}"
        yield Finding(message, (*_ZENFLOW, "select_interval"), help=f"write {update} or more")


def _is_whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
