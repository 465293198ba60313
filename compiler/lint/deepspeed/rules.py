"""A DeepSpeed configuration on its own: how its values fit together.

Most of it stands in `rules.json`; here is what its expressions read, and the rules that go through many keys.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from parcompile.backends.deepspeed import (
    MEMORY,
    first_stage,
    has_effect,
    last_stage,
    reach,
    refused_scaling,
    wrong_scale,
)
from parcompile.backends.deepspeed.table import Key, find, order, table
from parcompile.backends.kinds import DEEPSPEED
from parcompile.diagnostics import Edit, Fix, Path, Related, Safety, Severity, closest, format_path
from parcompile.lint.registry import Settings, file_rule
from parcompile.lint.stored import register
from parcompile.rules import Finding
from parcompile.units import first_of

from . import ACCELERATE, BARE, GUESSED, TITLES, TRANSFORMERS, UsageOptions, autos, filled
from .constructors import on_host, optimizers

ZERO = "zero_optimization"
TOTAL, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_PARTS = ("offload_param", "offload_optimizer")

# What expressions read.

_TYPES = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "fp32"),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "fp16"),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
}


def stage_of(settings: Settings) -> int | None:
    """The ZeRO stage of a file: 0 without one, None when it is "auto" or wrong."""
    if settings.get(ZERO) is True:
        return 1  # the old form
    if settings.left_out(ZERO) or settings.left_out(ZERO, "stage"):
        return 0
    stage = settings.number(ZERO, "stage")
    return None if stage is None else int(stage)


def ranks(settings: Settings) -> int | None:
    """The data-parallel ranks that the three batch sizes leave, None when they do not tell."""
    total, micro, steps = (settings.number(name) for name in (TOTAL, MICRO, STEPS))
    if not total or not micro or not steps or total % (micro * steps):
        return None
    return int(total // (micro * steps))


def _name_of_bf16(settings: Settings) -> str:
    """The section of bf16 that DeepSpeed reads: the old name only counts without the new one."""
    return "bfloat16" if settings.left_out("bf16") and not settings.left_out("bfloat16") else "bf16"


def _type_of_weights(settings: Settings) -> str | None:
    """The type of the weights, None where "auto" leaves it open."""
    for name, kind in (("fp16", "fp16"), (_name_of_bf16(settings), "bf16")):
        enabled = settings.tree.get(name, {}).get("enabled") if isinstance(settings.tree.get(name), dict) else None
        if enabled == "auto":
            return None
        if settings.get(name, "enabled") is True:
            return kind
    return "fp32"


def _device(settings: Settings, part: str) -> str | None:
    """Where a part is kept; None when it is "auto" or wrong."""
    if settings.get(ZERO, part) is None or settings.left_out(ZERO, part, "device"):
        return "none"
    found = settings.get(ZERO, part, "device")
    return found if isinstance(found, str) else None


def _lowered(*path: str) -> Callable[[Settings], str | None]:
    return lambda settings: value.lower() if isinstance(value := settings.get(*path), str) else None


_KIND = _lowered("optimizer", "type")


def _count(*path: str) -> Callable[[Settings], int]:
    """A number of ranks, 1 where there is none."""
    return lambda settings: int(settings.number(*path) or 1)


def _names(settings: Settings, path: str) -> list[str]:
    """The names that the version of DeepSpeed takes at a path."""
    key = find(settings.usage.version, *path.split("."))
    return list(key.facts.get("names", ())) if key is not None else []


def _near(settings: Settings, path: str) -> str | None:
    return closest(str(settings.get(*path.split("."))), _names(settings, path))


_WHOLE = re.compile(r"\s*[+-]?\d+\s*")


def _is_no_number(settings: Settings, path: str) -> bool:
    """Whether a switch or, but for the scale itself, the text of a fraction stands for a number."""
    value = settings.get(*path.split("."))
    is_text = isinstance(value, str) and not path.endswith(".loss_scale")
    return isinstance(value, bool) or (is_text and _WHOLE.fullmatch(value) is None)


def _scaling(settings: Settings) -> dict[str, Any]:
    """How gradients are averaged, as `refused_scaling` and `wrong_scale` ask for it."""
    factor = settings.number("gradient_predivide_factor")
    return {
        "stage": stage_of(settings),
        "reduce_scatter": settings.get(ZERO, "reduce_scatter", default=True) is not False,
        "prescale": settings.get("prescale_gradients") is True,
        "predivide": 1.0 if factor is None else factor,
    }


_FACTS: Mapping[str, Callable[..., Any]] = {
    "stage": stage_of,
    "is_no_number.": _is_no_number,
    "names.": _names,
    "near.": _near,
    "others.": lambda settings, path: f"write one of {', '.join(_names(settings, path))}",
    "preset": _lowered("tensor_parallel", "preset_model"),
    "refused_scaling": lambda settings: refused_scaling(**_scaling(settings)),
    "wrong_scale": lambda settings: wrong_scale(**_scaling(settings), ranks=ranks(settings) or 0),
    "ranks": ranks,
    "tp": _count("tensor_parallel", "autotp_size"),
    "ep": _count("expert_parallel", "autoep_size"),
    "kind": _KIND,
    "is_own": lambda settings: _KIND(settings) in optimizers(settings.usage.version),
    "operation": _lowered("gradient_allreduce_op"),
    "on_host": lambda settings: on_host(settings.tree),
    "name_of_bf16": _name_of_bf16,
    "weights": _type_of_weights,
    "type_of_weights": lambda settings: _TYPES.get(str(settings.get("data_types", "param_dtype"))),
    "type_of_sums": lambda settings: _TYPES.get(str(settings.get("data_types", "grad_accum_dtype"))),
    "device_of_weights": lambda settings: _device(settings, "offload_param"),
    "device_of_optimizer": lambda settings: _device(settings, "offload_optimizer"),
    "version": lambda settings: settings.usage.version,
    "release": lambda settings: list(order(settings.usage.version)),
    "filler": lambda settings: settings.usage.filler,
    "reader": lambda settings: TITLES.get(str(settings.usage.filler)),
    "is_guessed": lambda settings: settings.usage.filler_from == GUESSED,
}

register(__package__, DEEPSPEED, _FACTS)

# Rules that go through many keys.


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
        message = f"{first_of(rest, 3)} {'has' if len(rest) == 1 else 'have'} no effect at stage {stage}"
        one = _idle(message, [(ZERO, key) for key in rest], "remove what is not read", Severity.INFO)
        yield replace(one, help="remove what is not read", related=(*related, *one.related))


def _idle(message: str, paths: Sequence[Path], title: str, severity: Severity | None) -> Finding:
    """Keys that are not read, with a fix of this title that removes them."""
    fix = Fix(title, Safety.SAFE, tuple(Edit(path, remove=True) for path in paths))
    related = tuple(Related("and here", path) for path in paths[1:])
    return Finding(message, paths[0], fixes=(fix,), related=related, severity=severity)


_ONLY_NVME = (
    *("nvme_path", "buffer_count", "buffer_size", "max_in_cpu"),
    *("pipeline_read", "pipeline_write", "fast_init"),
)
_DEFAULT_OFF = (None, False)


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
            paths, other = [(ZERO, part, key) for key in idle], "nvme" if device == "cpu" else "cpu"
            severity = Severity.INFO if device == "none" else None
            one = _idle(f"{part}: {names} {does}", paths, f"remove {names}", severity)
            yield replace(one, help=f'remove it, or set device to "{other}"')


# Keys of old that still work.


@file_rule("F010", DEEPSPEED, severity=Severity.WARNING)
def keys_are_those_of_today(settings: Settings) -> Iterator[Finding]:
    """Fires for each deprecated key; an error when the new one stands beside it."""
    for path, key in _deprecated(settings):
        facts = key.deprecated
        assert facts is not None
        new, value = str(facts.get("new_param", "")), settings.get(*map(str, path))
        holder = settings.section(*map(str, path[:-1]))
        target = find(settings.usage.version, *path[:-1], new) if facts.get("set_new_param", True) else None
        if target is None:
            fix = Fix.removing(path, Safety.SAFE)
            advice = f"give it in {new}" if new else "remove it"
            yield Finding(f"{path[-1]} is deprecated and has no effect", path, help=advice, fixes=(fix,))
            continue
        beside = next((name for name in target.names if name in holder), None)
        if beside is not None:
            yield Finding(
                f"{path[-1]} beside {beside}, which replaced it: DeepSpeed refuses the combination",
                path,
                help=f"remove {path[-1]}",
                fixes=(Fix.removing(path, Safety.CHANGES_COST),),
                related=(Related("the new one", (*path[:-1], beside)),),
                severity=Severity.ERROR,
            )
            continue
        changes = facts.get("changes")
        meant = changes.get(str(value).lower()) if changes is not None else value
        edits: tuple[Edit, ...] = (Edit(path, remove=True),)
        if meant is not None and meant is not False:
            edits = (*edits, Edit((*path[:-1], target.name), meant))
        elif value is None:
            continue
        said = target.name if len(edits) > 1 else "leave it out"
        yield Finding(
            f"{path[-1]} is deprecated: DeepSpeed reads it as {target.name}",
            path,
            help=f"write {said}" if len(edits) > 1 else "leave it out: it asks for nothing",
            fixes=(
                Fix(f"replace {path[-1]} by {said}" if len(edits) > 1 else f"remove {path[-1]}", Safety.SAFE, edits),
            ),
        )


def _deprecated(settings: Settings) -> Iterator[tuple[Path, Key]]:
    """The deprecated keys of the file; they stand in sections at the top."""
    for name, section in table(settings.usage.version).keys.items():
        for inner, value in settings.section(name).items():
            key = section.keys.get(inner)
            if key is not None and key.deprecated is not None and value != "auto":
                yield (name, inner), key


# What is left to somebody else, and what those refuse.


def _dotted(path: Path, version: str) -> str:
    """The path as the documentation has it, whatever name of a key the file uses."""
    key = find(version, *path)
    return key.path if key is not None else ".".join(map(str, path))


def _fills(filler: str, path: Path, settings: Settings) -> bool:
    return _dotted(path, settings.usage.version) in filled(filler)


@file_rule("F001", DEEPSPEED, usage=UsageOptions(used_with=TRANSFORMERS))
def auto_is_not_a_value(settings: Settings) -> Iterator[Finding]:
    """Fires for each "auto" at a place that the filler does not fill, and at which it is not a value of its own."""
    usage = settings.usage
    for path in autos(settings.tree):
        key = find(usage.version, *path)
        if key is None or _is_value(key) or key.refused:
            continue  # K001 speaks of an unknown key
        name = format_path(path)
        if usage.filler in (TRANSFORMERS, ACCELERATE):
            if not _fills(usage.filler, path, settings) and not _fills(TRANSFORMERS, path, settings):
                said = TITLES[usage.filler]
                yield Finding(f'{said} refuses "auto" in {name}: it has no value for this key', path, help=_advice(key))
            elif not _fills(usage.filler, path, settings):
                message = f'accelerate alone does not replace "auto" in {name}, only the Trainer of transformers does'
                yield Finding(message, path, help=_advice(key))
        elif key.loose:
            yield Finding(
                f'{_nobody(settings)} "auto" in {name}: DeepSpeed receives the string', path, help=_advice(key)
            )
        elif path[-1] == "stage":
            message = f'{_nobody(settings)} "auto" in {name}: it runs at stage 0, where nothing is sharded'
            yield Finding(message, path, help="write 1, 2 or 3")


def _is_value(key: Key) -> bool:
    """Whether DeepSpeed itself gives "auto" a meaning at a key."""
    return key.default == "auto" or "auto" in str(key.facts.get("in", ""))


def _advice(key: Key) -> str:
    default = key.default
    known = default is not None and not isinstance(default, (dict, list))
    return (
        f"write a value, or remove the key: the default is {default}" if known else "write a value, or remove the key"
    )


def _nobody(settings: Settings) -> str:
    filler = settings.usage.filler or BARE
    return f"with {TITLES[filler]} nobody replaces"


@file_rule("F002", DEEPSPEED, severity=Severity.INFO)
def auto_is_left_to_somebody(settings: Settings) -> Iterator[Finding]:
    """One line for a file with "auto" whose filler was guessed, or whose "auto" falls back to defaults."""
    usage = settings.usage
    paths = [path for path in autos(settings.tree) if (key := find(usage.version, *path)) and not _is_value(key)]
    if not paths:
        return
    if usage.filler in (TRANSFORMERS, ACCELERATE):
        if usage.filler_from == GUESSED:
            count = f'{len(paths)} times "auto"' if len(paths) > 1 else '"auto"'
            message = f"{count}: the file is taken to be for {TITLES[usage.filler]}, which replaces it"
            yield Finding(message, paths[0], help="name the tool that reads the file with --used-with")
        return
    defaults = [path for path in paths if (key := find(usage.version, *path)) and not key.loose and path[-1] != "stage"]
    if defaults:
        names = ", ".join(format_path(path) for path in defaults[:3]) + (" …" if len(defaults) > 3 else "")
        message = f'with {TITLES[usage.filler or BARE]} "auto" becomes DeepSpeed\'s default in {names}'
        related = tuple(Related("and here", path) for path in defaults[1:])
        yield Finding(message, defaults[0], help="write values", related=related, severity=Severity.WARNING)
