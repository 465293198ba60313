"""A DeepSpeed configuration on its own: keys of old, sections without their keys, and what is left to "auto"."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from parcompile.backends.deepspeed.table import Key, find, table
from parcompile.backends.kinds import DEEPSPEED
from parcompile.diagnostics import Edit, Fix, Path, Related, Safety, Severity, format_path
from parcompile.lint import deepspeed as fillers
from parcompile.lint.deepspeed import (
    ACCELERATE,
    BARE,
    GUESSED,
    LIGHTNING,
    TITLES,
    TRANSFORMERS,
    UsageOptions,
    autos,
)
from parcompile.lint.registry import Settings, file_rule
from parcompile.rules import Finding

from .stages import ZERO

# A DeepSpeed configuration on its own: keys of old that still work, and sections that need another key.

_SAMPLING: Path = ("data_efficiency", "data_sampling")


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
    for name, known in _deprecated_keys(settings.usage.version).items():
        for inner, value in settings.section(name).items():
            key = known.get(inner)
            if key is not None and value != "auto":
                yield (name, inner), key


@functools.cache
def _deprecated_keys(version: str) -> dict[str, dict[str, Key]]:
    """Those of a version, by the name of their section and their own."""
    found = {
        name: {inner: key for inner, key in section.keys.items() if key.deprecated is not None}
        for name, section in table(version).keys.items()
    }
    return {name: keys for name, keys in found.items() if keys}


@file_rule("F028", DEEPSPEED)
def data_efficiency_is_complete(settings: Settings) -> Iterator[Finding]:
    """Fires for both."""
    for section, needed in (("curriculum_learning", "curriculum_metrics"), ("dynamic_batching", "max_tokens")):
        path = (*_SAMPLING, section)
        names = tuple(map(str, path))
        if settings.get(*names, "enabled") and settings.left_out(*names, needed):
            yield Finding(f"{section} is enabled without {needed}", (*path, "enabled"), help=f"add {needed}")


@file_rule("F029", DEEPSPEED, severity=Severity.WARNING)
def zero_is_a_section(settings: Settings) -> Iterator[Finding]:
    """Fires for true and false."""
    value = settings.get(ZERO)
    if isinstance(value, bool):
        meant = {"stage": int(value)}
        fix = Fix(f"write {meant}".replace("'", '"'), Safety.SAFE, (Edit((ZERO,), meant),))
        message = f"zero_optimization {str(value).lower()}: DeepSpeed reads it as stage {int(value)}"
        yield Finding(message, (ZERO,), help="write the stage", fixes=(fix,))


# A DeepSpeed configuration on its own: what is left to somebody else, and what those refuse.

_ZERO = "zero_optimization"
_STEPS = "gradient_accumulation_steps"


def _dotted(path: Path, version: str) -> str:
    """The path as the documentation has it, whatever name of a key the file uses."""
    key = find(version, *path)
    return key.path if key is not None else ".".join(map(str, path))


def _fills(filler: str, path: Path, settings: Settings) -> bool:
    return _dotted(path, settings.usage.version) in fillers.filled(filler)


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


@file_rule("F011", DEEPSPEED, usage=UsageOptions(used_with=ACCELERATE))
def the_reader_takes_the_file(settings: Settings) -> Iterator[Finding]:
    """Fires for a missing section under accelerate, and for steps under Lightning; a warning where they are guessed."""
    filler = settings.usage.filler
    if filler in (TRANSFORMERS, ACCELERATE) and settings.left_out(_ZERO):
        path: Path = (_ZERO,)
        fix = Fix("add zero_optimization at stage 0", Safety.SAFE, (Edit(path, {"stage": 0}),))
        message = f"zero_optimization is missing: {TITLES[filler]} refuses the file"
        guessed = settings.usage.filler_from == GUESSED
        advice = 'add "zero_optimization": {"stage": 0}'
        yield Finding(message, path, help=advice, fixes=(fix,), severity=Severity.WARNING if guessed else None)
    if filler == LIGHTNING and _STEPS in settings.tree:
        fix = Fix.removing((_STEPS,), Safety.SAFE)
        message = f"{_STEPS} is set by Lightning's Trainer, which refuses it in the file"
        yield Finding(message, (_STEPS,), help="set accumulate_grad_batches of the Trainer", fixes=(fix,))


def has_filler(settings: Settings) -> bool:
    """Whether somebody fills "auto" before DeepSpeed sees the file."""
    return settings.usage.filler in (TRANSFORMERS, ACCELERATE)


def auto_or(value: Any) -> Any:
    """None for "auto", else the value."""
    return None if value == "auto" else value
