"""Megatron-LM arguments: as a list, as the YAML of its test recipes, and as a shell array.

Names, types and defaults are those of Megatron-LM's argument parser at `MEGATRON_VERSION` (`options`).

What an option of Megatron-LM does that has no place in a spec: by its group, or by its name.

Every option is classified, so that an import can say of each what it means that it is not carried. One that nobody has
classified counts as lost.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

import yaml

from parcompile.backends import reading as table
from parcompile.backends.artefacts import Loss, from_template, header, losses_of, variables
from parcompile.backends.reading import Account, Arguments, Effect, Outcome, Row
from parcompile.plan import Plan
from parcompile.user_files import shipped

from . import layout, model, training
from .arguments import line

MEGATRON_VERSION = "d98e8a64"
"""Commit of NVIDIA/Megatron-LM whose parser was read (2026-08-22)."""

ROWS: tuple[Row, ...] = (*layout.ROWS, *model.ROWS, *training.ROWS)
"""The whole table: what Megatron-LM's options are in a spec."""


def arguments(plan: Plan) -> Arguments:
    """Every argument that the plan decides, also those that equal Megatron-LM's defaults: defaults change.

    The names are those of `options`; True is a flag.
    """
    return training.with_further(table.write(ROWS, plan.spec), plan.spec.megatron)


def as_list(found: Arguments) -> list[str]:
    """The arguments as they stand on a command line."""
    listed: list[str] = []
    for name, value in found.items():
        listed.append(_flag(name, value))
        if isinstance(value, list):
            listed.extend(map(str, value))
        elif not isinstance(value, bool):
            listed.append(str(value))
    return listed


def _flag(name: str, value: Any = True) -> str:
    start = "--no-" if value is False else "--"
    return next(flag for flag in line().options[name].newest.flags if flag.startswith(start))


def files(plan: Plan) -> dict[str, Any]:
    """megatron_args.json (a tree), megatron_args.yaml and megatron_args.sh (texts)."""
    found = arguments(plan)
    return {
        "megatron_args.json": {
            "compiler_version": plan.compiler_version,
            "spec_hash": plan.spec_hash,
            "megatron_version": MEGATRON_VERSION,
            "environment": {one.name: one.value for one in variables(plan)},
            "arguments": as_list(found),
        },
        "megatron_args.yaml": _yaml(plan, found),
        "megatron_args.sh": _shell(plan, found),
    }


def losses(plan: Plan) -> list[Loss]:
    """What Megatron-LM does not do as the plan says."""
    return [*table.losses(ROWS, plan.spec), *losses_of("megatron", plan.spec)]


def _yaml(plan: Plan, found: Arguments) -> str:
    tree = {
        "ENV_VARS": {one.name: one.value for one in variables(plan)},
        "MODEL_ARGS": {_flag(name): value for name, value in found.items()},
    }
    body = yaml.safe_dump(tree, sort_keys=False, allow_unicode=False, width=4096)
    return f"{header(plan, 'Megatron-LM arguments, as its functional tests write them.')}\n{body}"


def _shell(plan: Plan, found: Arguments) -> str:
    about = 'Megatron-LM arguments: source this file, then pass "${MEGATRON_ARGS[@]}" to pretrain_gpt.py.'
    lines = (" ".join(map(shlex.quote, as_list({name: value}))) for name, value in found.items())
    return from_template("megatron_args.sh", plan, about, ARGUMENTS="\n".join(f"  {line}" for line in lines))


_STORED: Mapping[str, Mapping[str, list[str]]] = shipped(__package__, "effects.json")


def _by_name(listed: Mapping[str, list[str]]) -> Mapping[str, Effect]:
    return {name: Effect[effect.upper()] for effect, names in listed.items() for name in names}


_GROUPS = _by_name(_STORED["groups"])
"""What all options of a group do, unless their name stands below."""
_OF_NAMES = _by_name(_STORED["options"])
"""What single options do, where their group does not say it or says something else."""

CARRIED = frozenset(name for row in ROWS for name in (row.options if hasattr(row, "options") else (row.option,)))
"""Options that the table speaks of."""


def effect(name: str) -> Effect | None:
    """What an option does; None for one that nobody has classified."""
    if name in _OF_NAMES:
        return _OF_NAMES[name]
    option = line().options.get(name)
    return None if option is None else _GROUPS.get(option.newest.group)


_UNCHANGED = frozenset(
    ("recompute_granularity", "recompute_method", "recompute_modules", "recompute_num_layers", "sequence_parallel")
)


def changes(name: str) -> bool:
    """Whether another value of an option of the table gives other numbers."""
    return name not in _UNCHANGED and effect(name) in (None, Effect.NUMBERS, Effect.OTHER_MODEL)


def fate(name: str, value: object) -> Account | None:
    """What there is to say of an option that the table does not speak of; None for one that no version has."""
    option = line().options.get(name)
    if option is None:
        return None
    found = effect(name)
    if found is None:
        return Account(name, Outcome.LOST, "a spec has no such key")
    if value == option.default and type(value) is type(option.default):
        return Account(name, Outcome.NO_EFFECT, "it is Megatron-LM's own default")
    return found.account(name)
