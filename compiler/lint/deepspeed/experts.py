"""A DeepSpeed configuration on its own: its tensor, sequence and expert parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from parcompile.backends.deepspeed.table import find
from parcompile.backends.kinds import DEEPSPEED
from parcompile.diagnostics import Edit, Fix, Path, Related, Safety, Severity, closest
from parcompile.layout.groups import divisors
from parcompile.lint.registry import Settings, file_rule
from parcompile.rules import Finding, listed

from .optimizer import ranks
from .stages import ZERO, stage_of

# A DeepSpeed configuration on its own: DeepSpeed's own tensor and sequence parallelism.

_TP_SECTION = "tensor_parallel"
_SIZE: Path = (_TP_SECTION, "autotp_size")


def autotp_size(settings: Settings) -> int:
    """Ranks over which AutoTP shards the model; 1 when it does not."""
    size = settings.number(_TP_SECTION, "autotp_size")
    return int(size) if size else 1


def _inner(settings: Settings) -> str:
    """The name under which the file has the section of `tp_size`."""
    return "tensor_parallel" if "tensor_parallel" in settings.section(_TP_SECTION) else "tp"


@file_rule("F030", DEEPSPEED)
def tensor_parallelism_shards(settings: Settings) -> Iterator[Finding]:
    """Fires for the size that does nothing, for two different ones, and for an unknown preset."""
    given, inner = settings.number(*_SIZE), _inner(settings)
    path: Path = (_TP_SECTION, inner, "tp_size")
    other = settings.number(*map(str, path))
    if other is not None and other != 1 and not given:
        yield Finding(
            f"{_TP_SECTION}.{inner}.tp_size {other:g} alone shards nothing: DeepSpeed trains with autotp_size",
            path,
            help=f'write "autotp_size": {other:g} in {_TP_SECTION}',
            fixes=(Fix(f"set autotp_size to {other:g}", Safety.CHANGES_COST, (Edit(_SIZE, int(other)),)),),
            severity=Severity.WARNING,
        )
    elif other is not None and given and other not in (1, given):
        fix = Fix(f"set tp_size to {given:g}", Safety.SAFE, (Edit(path, int(given)),))
        message = f"tp_size {other:g} ≠ autotp_size {given:g}: DeepSpeed refuses the combination"
        yield Finding(message, path, help="remove tp_size", fixes=(fix,), related=(Related("the size", _SIZE),))
    preset = settings.get(_TP_SECTION, "preset_model")
    key = find(settings.usage.version, _TP_SECTION, "preset_model")
    names = key.facts.get("names", ()) if key is not None else ()
    if isinstance(preset, str) and names and preset.lower() not in names:
        near = closest(preset, names)
        advice = f"did you mean {near}?" if near else f"write one of {', '.join(names)}"
        message = f'AutoTP has no preset "{preset}" and takes none then'
        yield Finding(message, (_TP_SECTION, "preset_model"), help=advice, severity=Severity.WARNING)


@file_rule("F031", DEEPSPEED, severity=Severity.WARNING)
def autotp_is_alone(settings: Settings) -> Iterator[Finding]:
    """Fires for both at once."""
    size, sequence = autotp_size(settings), settings.number("sequence_parallel_size")
    if size > 1 and sequence is not None and sequence > 1:
        message = f"autotp_size {size} with sequence_parallel_size {sequence:g}: both take the same neighbouring ranks"
        related = (Related("AutoTP", _SIZE),)
        yield Finding(message, ("sequence_parallel_size",), help="remove one of the two", related=related)


@file_rule("F032", DEEPSPEED, severity=Severity.INFO)
def sequence_parallelism_has_groups(settings: Settings) -> Iterator[Finding]:
    """Says that the groups have to come from elsewhere."""
    sequence, data = (settings.number(name) for name in ("sequence_parallel_size", "data_parallel_size"))
    path: Path = ("sequence_parallel_size",)
    if sequence is not None and sequence > 1 and data is None:
        message = f"sequence_parallel_size {sequence:g} alone makes no groups: it only divides the ranks of the batch"
        yield Finding(message, path, help="pass the mpu of Ulysses to deepspeed.initialize, or add data_parallel_size")
    found = ranks(settings)
    if sequence is not None and data is not None and found is not None and found != data:
        message = f"the batch sizes leave {found} data-parallel ranks, data_parallel_size is {data:g}"
        yield Finding(message, ("data_parallel_size",), help=f"write {found}", severity=Severity.WARNING)


# A DeepSpeed configuration on its own: AutoEP, DeepSpeed's expert parallelism for models that were written without.

_SECTION = "expert_parallel"
_ATTRIBUTES = (
    "expert_w1",
    "expert_w2",
    "expert_w3",
    "num_experts_attr",
    "top_k_attr",
    "router_pattern",
    "expert_pattern",
    "shared_experts_pattern",
    "shared_experts_gate_pattern",
)


def _at(key: str) -> Path:
    return (_SECTION, key)


def _value(settings: Settings, key: str, default: Any = None) -> Any:
    return settings.get(_SECTION, key, default=default)


def _enabled(settings: Settings) -> bool:
    return _value(settings, "enabled") is True


def _size(settings: Settings) -> int:
    size = settings.number(_SECTION, "autoep_size")
    return int(size) if size else 1


@file_rule("F033", DEEPSPEED)
def autoep_takes_the_values(settings: Settings) -> Iterator[Finding]:
    """Fires for each value that is none of those; with AutoEP switched off it is a warning."""
    severity = None if _enabled(settings) else Severity.WARNING
    for found in (*_names(settings), *_groups(settings), *_attributes(settings)):
        yield replace(found, severity=severity)


def _names(settings: Settings) -> Iterator[Finding]:
    for name in ("preset_model", "expert_activation"):
        value = _value(settings, name)
        key = find(settings.usage.version, *map(str, _at(name)))
        names = list(key.facts.get("names", ())) if key is not None else []
        if isinstance(value, str) and names and value not in names:
            near = closest(value, names)
            advice = f'did you mean "{near}"?' if near else f"write one of {', '.join(names)}"
            fixes = (Fix(f"write {near}", Safety.CHANGES_NUMERICS, (Edit(_at(name), near),)),) if near else ()
            yield Finding(f'AutoEP has no {name.replace("_", " ")} "{value}"', _at(name), help=advice, fixes=fixes)


def _groups(settings: Settings) -> Iterator[Finding]:
    groups, limited = _value(settings, "num_expert_groups"), _value(settings, "num_limited_groups")
    if isinstance(groups, int) and isinstance(limited, int) and limited > groups:
        message = f"num_limited_groups {limited} > num_expert_groups {groups}"
        related = (Related("the groups", _at("num_expert_groups")),)
        yield Finding(message, _at("num_limited_groups"), help=f"write {groups} or less", related=related)


def _attributes(settings: Settings) -> Iterator[Finding]:
    for name in _ATTRIBUTES:
        value = _value(settings, name)
        if value is not None and (not isinstance(value, str) or not value or "." in value):
            message = f"{name} {value!r}: AutoEP wants the name of an attribute, without dots"
            yield Finding(message, _at(name), help='write it like "experts"')


@file_rule("F034", DEEPSPEED)
def autoep_routes_agree(settings: Settings) -> Iterator[Finding]:
    """Fires for each of the combinations."""
    if not _enabled(settings):
        return
    backend, size, tp = _value(settings, "comm_backend", "comm"), _size(settings), autotp_size(settings)
    if _value(settings, "combine_impl") == "fused_weighted_sum":
        etp = _value(settings, "expert_tensor_parallel_size", 1)
        reasons = {
            f"tensor_parallel.autotp_size {tp}": tp > 1,
            f"expert_tensor_parallel_size {etp}": etp not in (1, None),
            'comm_backend "deepep"': backend == "deepep" and size > 1,
        }
        for reason in (text for text, holds in reasons.items() if holds):
            yield Finding(f'combine_impl "fused_weighted_sum" cannot be combined with {reason}', _at("combine_impl"))
    if _value(settings, "gate_up_impl") == "fused" and _value(settings, "use_grouped_mm", True) is False:
        yield Finding(
            'gate_up_impl "fused" needs use_grouped_mm true', _at("gate_up_impl"), help="remove one of the two"
        )
    if _value(settings, "row_weighting_impl") == "fused":
        if backend != "deepep":
            yield Finding('row_weighting_impl "fused" needs comm_backend "deepep"', _at("row_weighting_impl"))
        if size == 1:
            yield Finding('row_weighting_impl "fused" needs autoep_size > 1', _at("row_weighting_impl"))
    if backend == "deepep" and not _value(settings, "comm_max_tokens_per_rank", 0):
        advice = "write micro-batch · longest sequence"
        yield Finding('comm_backend "deepep" needs comm_max_tokens_per_rank', _at("comm_backend"), help=advice)
    if _value(settings, "async_split_plan") is True and size > 1 and tp > 1:
        message = f"async_split_plan cannot be combined with tensor_parallel.autotp_size {tp}"
        yield Finding(message, _at("async_split_plan"), help="remove one of the two")


@file_rule("F035", DEEPSPEED)
def autoep_has_the_layout(settings: Settings) -> Iterator[Finding]:
    """Fires for each of these conditions that does not hold."""
    if not _enabled(settings):
        return
    size, tp, stage = _size(settings), autotp_size(settings), stage_of(settings)
    etp = _value(settings, "expert_tensor_parallel_size", 1)
    if isinstance(etp, int) and etp > 1:
        message = f"expert_tensor_parallel_size {etp}: AutoEP does not split experts"
        yield Finding(message, _at("expert_tensor_parallel_size"), help="write 1")
    world = ranks(settings)
    if world is not None and world * tp % size:
        near = listed(divisors(world * tp))
        message = f"autoep_size {size} does not divide the {world * tp} ranks that the batch sizes leave"
        yield Finding(message, _at("autoep_size"), help=f"write one of {near}")
    sequence = settings.number("sequence_parallel_size")
    sequence = sequence if sequence and sequence > 1 else None
    if stage == 3:
        yield from _at_stage_3(settings, sequence)
    if tp > 1:
        yield from _with_autotp(settings, tp, size, sequence)


def _at_stage_3(settings: Settings, sequence: float | None) -> Iterator[Finding]:
    related = (Related("AutoEP is enabled here", _at("enabled")),)
    shards = settings.number(ZERO, "zero_hpz_partition_size")
    refused: list[tuple[str, Path, str]] = []
    if sequence is not None:
        refused.append((f" {sequence:g}", ("sequence_parallel_size",), "use stage 1 or 2, or remove it"))
    if settings.get(ZERO, "zero_quantized_gradients") is True:
        refused.append(("", (ZERO, "zero_quantized_gradients"), "remove it"))
    if shards is not None and shards > 1:
        refused.append((f" {shards:g}", (ZERO, "zero_hpz_partition_size"), "remove it"))
    for value, path, advice in refused:
        message = f"{path[-1]}{value} with AutoEP at stage 3: DeepSpeed refuses the combination"
        yield Finding(message, path, help=advice, related=related)


def _with_autotp(settings: Settings, tp: int, size: int, sequence: float | None) -> Iterator[Finding]:
    size_path: Path = ("tensor_parallel", "autotp_size")
    related = (Related("AutoTP is enabled here", size_path),)
    if size == 1:
        yield Finding(
            f"autotp_size {tp} with autoep_size 1: AutoEP beside AutoTP needs more ranks",
            _at("enabled"),
            related=related,
        )
    if sequence is not None:
        message = f"sequence_parallel_size {sequence:g} with autotp_size {tp} and AutoEP: DeepSpeed refuses all three"
        yield Finding(message, size_path, help="remove one of them")
    presets = [settings.get(section, "preset_model") for section in ("tensor_parallel", _SECTION)]
    if all(isinstance(one, str) for one in presets) and presets[0] != presets[1]:
        message = f'preset_model "{presets[1]}" of AutoEP with "{presets[0]}" of AutoTP: they must be the same'
        yield Finding(message, _at("preset_model"), related=(Related("AutoTP's", ("tensor_parallel", "preset_model")),))
    for path, kind in (
        (("use_data_before_expert_parallelism",), bool),
        ((ZERO, "offload_param"), dict),
        ((ZERO, "offload_optimizer"), dict),
        (("compile", "deepcompile"), bool),
    ):
        value = settings.get(*path)
        if isinstance(value, kind) and value is not False:
            message = f"{path[-1]} cannot be combined with AutoEP and AutoTP"
            yield Finding(message, path, help="remove it", related=related)


@file_rule("F036", DEEPSPEED, severity=Severity.WARNING)
def autoep_is_on(settings: Settings) -> Iterator[Finding]:
    """Fires for a section without the switch, and for a size of 1 beside it."""
    section = settings.section(_SECTION)
    if section and settings.left_out(_SECTION, "enabled") and len(section) > 0:
        fix = Fix("switch it on", Safety.CHANGES_COST, (Edit(_at("enabled"), value=True),))
        message = 'expert_parallel has no effect because "enabled" is not set'
        yield Finding(message, (_SECTION,), help='add "enabled": true', fixes=(fix,))
    elif _enabled(settings) and _size(settings) == 1 and autotp_size(settings) == 1:
        message = "autoep_size 1: every rank keeps all experts"
        yield Finding(message, _at("enabled"), help="set autoep_size", severity=Severity.INFO)
    if _value(settings, "shared_experts_pattern") and _value(settings, "has_shared_experts") is not True:
        message = "shared_experts_pattern has no effect without has_shared_experts true"
        yield Finding(message, _at("shared_experts_pattern"), help="set has_shared_experts, or remove it")
