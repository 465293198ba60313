"""A DeepSpeed configuration on its own: keys of ZeRO's stages, offload, ZenFlow and DeepCompile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from parcompile.backends.deepspeed import MEMORY, first_stage, has_effect, last_stage, reach
from parcompile.backends.kinds import DEEPSPEED
from parcompile.diagnostics import Edit, Fix, Path, Related, Safety, Severity
from parcompile.lint.deepspeed.constructors import ADAM
from parcompile.lint.registry import Settings, file_rule
from parcompile.rules import Finding
from parcompile.units import first_of

# A DeepSpeed configuration on its own: keys of zero_optimization that the stage does not read.

ZERO = "zero_optimization"


def stage_of(settings: Settings) -> int | None:
    """The ZeRO stage of a file: 0 without one, None when it is "auto" or wrong."""
    if settings.get(ZERO) is True:
        return 1  # the old form
    if settings.left_out(ZERO) or settings.left_out(ZERO, "stage"):
        return 0
    stage = settings.number(ZERO, "stage")
    return None if stage is None else int(stage)


def _is_on(settings: Settings, key: str) -> bool:
    """Whether a key asks for something: an offload to nowhere, a false or a default asks for nothing."""
    value = settings.get(ZERO, key)
    if isinstance(value, dict):
        return value.get("device") not in (None, "none", "auto")
    return value is True or value not in (None, False, 1)


@file_rule("F005", DEEPSPEED, severity=Severity.WARNING)
def zero_keys_have_an_effect(settings: Settings) -> Iterator[Finding]:
    """Fires for keys that the stage does not read; quiet when the stage itself is wrong, missing or "auto"."""
    stage, zero = stage_of(settings), settings.section(ZERO)
    if stage is None or "stage" not in zero:
        return
    related = (Related(f"stage {stage} is set here", (ZERO, "stage")),)
    idle = [key for key in zero if not has_effect(key, stage)]
    heavy = [key for key in idle if (key in MEMORY or stage > last_stage(key)) and _is_on(settings, key)]
    heavy = [key for key in heavy if key in MEMORY or key == "round_robin_gradients"]
    for key in heavy:
        yield Finding(
            f"{key} has no effect at stage {stage}: DeepSpeed reads it {reach(key)}",
            (ZERO, key),
            help=f"remove it, or set stage to {first_stage(key) if stage < first_stage(key) else last_stage(key)}",
            fixes=(Fix.removing((ZERO, key), Safety.SAFE),),
            related=related,
        )
    rest = [key for key in idle if key not in heavy]
    if rest:
        have = "has" if len(rest) == 1 else "have"
        edits = tuple(Edit((ZERO, key), remove=True) for key in rest)
        yield Finding(
            f"{first_of(rest, 3)} {have} no effect at stage {stage}",
            (ZERO, rest[0]),
            help="remove what is not read",
            fixes=(Fix("remove what is not read", Safety.SAFE, edits),),
            related=(*related, *(Related("and here", (ZERO, key)) for key in rest[1:])),
            severity=Severity.INFO,
        )


@file_rule("F007", DEEPSPEED, severity=Severity.WARNING)
def zero_has_a_stage(settings: Settings) -> Iterator[Finding]:
    """Fires when the section has no stage."""
    zero = settings.get(ZERO)
    if isinstance(zero, dict) and settings.left_out(ZERO, "stage"):
        yield Finding(
            "zero_optimization has no stage: the default is 0, nothing is sharded",
            (ZERO,),
            help='write "stage": 1, 2 or 3',
            fixes=(Fix.setting((ZERO, "stage"), 1, Safety.CHANGES_COST),),
        )


# A DeepSpeed configuration on its own: what is kept off the accelerator.

_PARTS = ("offload_param", "offload_optimizer")
_ONLY_NVME = (
    "nvme_path",
    "buffer_count",
    "buffer_size",
    "max_in_cpu",
    "pipeline_read",
    "pipeline_write",
    "fast_init",
)
_DEFAULT_OFF = (None, False)


def _device(settings: Settings, part: str) -> str | None:
    """Where a part is kept; None when it is "auto" or wrong."""
    if settings.get(ZERO, part) is None or settings.left_out(ZERO, part, "device"):
        return "none"
    found = settings.get(ZERO, part, "device")
    return found if isinstance(found, str) else None


@file_rule("F012", DEEPSPEED)
def nvme_has_a_path(settings: Settings) -> Iterator[Finding]:
    """Fires for each part on NVMe without a path, where the stage reads it."""
    stage = stage_of(settings)
    for part in _PARTS:
        if _device(settings, part) == "nvme" and settings.get(ZERO, part, "nvme_path") is None and stage == 3:
            path: Path = (ZERO, part, "device")
            yield Finding(f'{part} to "nvme" needs nvme_path', path, help='add "nvme_path": "/local_nvme", say')
    if _device(settings, "offload_optimizer") == "nvme" and stage in (1, 2):
        message = f"the optimizer goes to NVMe at stage 3 only: at stage {stage} it is kept on the host"
        yield Finding(message, (ZERO, "offload_optimizer", "device"), help='write "cpu"', severity=Severity.WARNING)


@file_rule("F017", DEEPSPEED, severity=Severity.WARNING)
def offload_keys_have_an_effect(settings: Settings) -> Iterator[Finding]:
    """Fires once for each section: a warning with device cpu, a remark with none."""
    for part in _PARTS:
        device, section = _device(settings, part), settings.section(ZERO, part)
        if device == "cpu":
            idle = [key for key in _ONLY_NVME if key in section and section[key] not in _DEFAULT_OFF]
            does = 'has no effect with device "cpu": it is for "nvme"'
        elif device == "none":
            idle = [key for key in section if key != "device" and section[key] not in (*_DEFAULT_OFF, "none")]
            does = 'has no effect with device "none"'
        else:
            continue
        if idle:
            names = ", ".join(idle)
            if len(idle) > 1:
                does = does.replace("has", "have", 1).replace("it is", "they are")
            yield Finding(
                f"{part}: {names} {does}",
                (ZERO, part, idle[0]),
                help='remove it, or set device to "nvme"' if device == "cpu" else 'remove it, or set device to "cpu"',
                fixes=(
                    Fix(f"remove {names}", Safety.SAFE, tuple(Edit((ZERO, part, key), remove=True) for key in idle)),
                ),
                related=tuple(Related("and here", (ZERO, part, key)) for key in idle[1:]),
                severity=Severity.INFO if device == "none" else None,
            )


@file_rule("F018", DEEPSPEED)
def partial_offload_has_its_stage(settings: Settings) -> Iterator[Finding]:
    """Fires for a ratio below 1 and for super_offload elsewhere."""
    stage, device = stage_of(settings), _device(settings, "offload_optimizer")
    ratio = settings.number(ZERO, "offload_optimizer", "ratio")
    if ratio is not None and ratio < 1 and stage is not None and stage < 3:
        message = f"offload_optimizer.ratio {ratio:g} at stage {stage}: DeepSpeed refuses it below stage 3"
        yield Finding(message, (ZERO, "offload_optimizer", "ratio"), help="set stage to 3, or ratio to 1")
    kind = settings.get("optimizer", "type")
    is_other = isinstance(kind, str) and kind.lower() not in ADAM
    if ratio is not None and ratio < 1 and stage == 3 and is_other and device != "none":
        message = f"offload_optimizer.ratio {ratio:g} with {kind}: DeepSpeed splits Adam only"
        yield Finding(message, (ZERO, "offload_optimizer", "ratio"), help="use AdamW, or set ratio to 1")
    path: Path = (ZERO, "offload_optimizer", "super_offload")
    if settings.get(*map(str, path)) is not True:
        return
    if stage is not None and stage < 3:
        message = f"super_offload has no effect at stage {stage}: it is for stage 3"
        yield Finding(message, path, help="set stage to 3, or remove it", severity=Severity.WARNING)
    elif device not in (None, "cpu"):
        message = f'super_offload with device "{device}": the optimizer must be on the host'
        yield Finding(message, path, help='set device to "cpu"')
    if is_other and stage == 3:
        message = f"super_offload steps with Adam on the host, not with {kind}"
        yield Finding(message, path, help="use AdamW, or remove it")


# A DeepSpeed configuration on its own: ZenFlow and DeepCompile.

_ZENFLOW: Path = (ZERO, "zenflow")
_STRATEGIES = ("auto", "step", "epoch")


@file_rule("F037", DEEPSPEED)
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
