"""A DeepSpeed configuration on its own: keys of old, sections without their keys, and what is left to "auto"."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from parcompile.backends.deepspeed.table import Key, find, table
from parcompile.backends.kinds import DEEPSPEED
from parcompile.diagnostics import Edit, Fix, Path, Related, Safety, Severity, format_path
from parcompile.lint import deepspeed as fillers
from parcompile.lint.deepspeed import (
    ACCELERATE,
    BARE,
    GUESSED,
    TITLES,
    TRANSFORMERS,
    UsageOptions,
    autos,
)
from parcompile.lint.registry import Settings, file_rule
from parcompile.rules import Finding

# A DeepSpeed configuration on its own: keys of old that still work, and sections that need another key.


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


# A DeepSpeed configuration on its own: what is left to somebody else, and what those refuse.


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
