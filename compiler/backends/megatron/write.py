"""Megatron-LM arguments: as a list, as the YAML of its test recipes, and as a shell array.

Names, types and defaults are those of Megatron-LM's argument parser at `MEGATRON_VERSION` (`options`).
"""

from __future__ import annotations

import shlex
from typing import Any

import yaml

from parcompile.backends import reading as table
from parcompile.backends.artefacts import Loss, header, variables
from parcompile.backends.reading import Arguments, Row
from parcompile.plan import Plan

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
    found = list(table.losses(ROWS, plan.spec))
    found.append(Loss("data and tokenizer", "the spec does not name them", "add --data-path and --tokenizer-type"))
    return found


def _yaml(plan: Plan, found: Arguments) -> str:
    tree = {
        "ENV_VARS": {one.name: one.value for one in variables(plan)},
        "MODEL_ARGS": {_flag(name): value for name, value in found.items()},
    }
    body = yaml.safe_dump(tree, sort_keys=False, allow_unicode=False, width=4096)
    return "\n".join(header(plan, "Megatron-LM arguments, as its functional tests write them.")) + "\n" + body


def _shell(plan: Plan, found: Arguments) -> str:
    about = 'Megatron-LM arguments: source this file, then pass "${MEGATRON_ARGS[@]}" to pretrain_gpt.py.'
    lines = ["#!/usr/bin/env bash", *header(plan, about)]
    for one in variables(plan):
        lines += [f"# {one.why}", f"export {one.name}={shlex.quote(one.value)}"]
    lines.append("MEGATRON_ARGS=(")
    for name, value in found.items():
        lines.append("  " + " ".join(shlex.quote(word) for word in as_list({name: value})))
    return "\n".join([*lines, ")"]) + "\n"
