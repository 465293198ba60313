"""A DeepSpeed configuration on its own: keys of old that still work, and sections that need another key."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from parcompile.backends.deepspeed.table import Key, find, table
from parcompile.diagnostics import Edit, Fix, Path, Related, Safety, Severity

from .f_deepspeed_stages import BATCH, ZERO
from .file_registry import DEEPSPEED, Settings, file_rule
from .registry import Finding

_SAMPLING: Path = ("data_efficiency", "data_sampling")


@file_rule(
    "F010",
    DEEPSPEED,
    "an old key that another one has replaced",
    """DeepSpeed still reads some old keys and translates them: cpu_offload true means offload_optimizer to the host,
    false means none. It refuses an old key beside its replacement. The fix keeps the meaning.""",
    wrong={**BATCH, ZERO: {"stage": 2, "cpu_offload": True}},
    right={**BATCH, ZERO: {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
    severity=Severity.WARNING,
    sources=("DeepSpeed runtime/config_utils.py, runtime/zero/config.py",),
)
def keys_are_those_of_today(settings: Settings) -> Iterator[Finding]:
    """Fires for each deprecated key; an error when the new one stands beside it."""
    for path, key in _deprecated(settings):
        facts = key.deprecated
        assert facts is not None
        new, value = str(facts.get("new_param", "")), settings.get(*map(str, path))
        holder = settings.section(*map(str, path[:-1]))
        target = find(settings.around.version, *path[:-1], new) if facts.get("set_new_param", True) else None
        if target is None:
            fix = Fix(f"remove {path[-1]}", Safety.SAFE, (Edit(path, remove=True),))
            advice = f"give it in {new}" if new else "remove it"
            yield Finding(f"{path[-1]} is deprecated and has no effect", path, help=advice, fixes=(fix,))
            continue
        beside = next((name for name in target.names if name in holder), None)
        if beside is not None:
            yield Finding(
                f"{path[-1]} beside {beside}, which replaced it: DeepSpeed refuses the combination",
                path,
                help=f"remove {path[-1]}",
                fixes=(Fix(f"remove {path[-1]}", Safety.CHANGES_COST, (Edit(path, remove=True),)),),
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
    for name, known in _deprecated_keys(settings.around.version).items():
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


@file_rule(
    "F028",
    DEEPSPEED,
    "data efficiency without what it needs",
    """Curriculum learning in data_efficiency needs curriculum_metrics, dynamic batching needs max_tokens: DeepSpeed
    stops without.""",
    wrong={
        **BATCH,
        "data_efficiency": {"enabled": True, "data_sampling": {"enabled": True, "dynamic_batching": {"enabled": True}}},
    },
    right={
        **BATCH,
        "data_efficiency": {
            "enabled": True,
            "data_sampling": {"enabled": True, "dynamic_batching": {"enabled": True, "max_tokens": 4096}},
        },
    },
    sources=("DeepSpeed runtime/data_pipeline/config.py",),
)
def data_efficiency_is_complete(settings: Settings) -> Iterator[Finding]:
    """Fires for both."""
    for section, needed in (("curriculum_learning", "curriculum_metrics"), ("dynamic_batching", "max_tokens")):
        path = (*_SAMPLING, section)
        names = tuple(map(str, path))
        if settings.get(*names, "enabled") and settings.left_out(*names, needed):
            yield Finding(f"{section} is enabled without {needed}", (*path, "enabled"), help=f"add {needed}")


@file_rule(
    "F029",
    DEEPSPEED,
    "the old way to switch ZeRO on",
    """"zero_optimization": true is the way of DeepSpeed 0.1: it means stage 1, with the bucket of allgather_size.""",
    wrong={**BATCH, ZERO: True},
    right={**BATCH, ZERO: {"stage": 1}},
    severity=Severity.WARNING,
    sources=("DeepSpeed runtime/zero/config.py",),
)
def zero_is_a_section(settings: Settings) -> Iterator[Finding]:
    """Fires for true and false."""
    value = settings.get(ZERO)
    if isinstance(value, bool):
        meant = {"stage": int(value)}
        fix = Fix(f"write {meant}".replace("'", '"'), Safety.SAFE, (Edit((ZERO,), meant),))
        message = f"zero_optimization {str(value).lower()}: DeepSpeed reads it as stage {int(value)}"
        yield Finding(message, (ZERO,), help="write the stage", fixes=(fix,))
