"""gpt-neox's configuration of a plan: its own options by the table, DeepSpeed's by the exporter of DeepSpeed.

The names are those of `options`, with inner keys of DeepSpeed's sections dotted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from parcompile.backends import table
from parcompile.backends.deepspeed.write import ds_config
from parcompile.backends.losses import Loss
from parcompile.backends.table import Arguments, Row
from parcompile.plan import Plan

from . import layout, model, training

ROWS: tuple[Row, ...] = (*layout.ROWS, *model.ROWS, *training.ROWS)
"""The whole table: what gpt-neox's options are in a spec."""
_DEEPSPEEDS = ("zero_optimization", "fp16", "bf16", "data_types")
"""DeepSpeed's sections whose values a plan decides."""


def arguments(plan: Plan) -> Arguments:
    """Every option that the plan decides, also those that equal gpt-neox's defaults: defaults change."""
    written = table.write(ROWS, plan.spec)
    sections = (*_DEEPSPEEDS, *plan.spec.deepspeed)
    shared = {name: value for name, value in flat(ds_config(plan)).items() if name.partition(".")[0] in sections}
    return {**shared, **written}


def losses(plan: Plan) -> list[Loss]:
    """What gpt-neox does not do as the plan says."""
    return list(table.losses(ROWS, plan.spec))


def tree(found: Arguments) -> dict[str, Any]:
    """Options as they stand in a file."""
    made: dict[str, Any] = {}
    for name, value in found.items():
        node = made
        *path, last = name.split(".")
        for step in path:
            node = node.setdefault(step, {})
        node[last] = value
    return made


def flat(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a tree by their dotted names; an empty section is a value."""

    def leaves(node: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        for key, value in node.items():
            if isinstance(value, Mapping) and value:
                yield from leaves(value, (*path, str(key)))
            else:
                yield ".".join((*path, str(key))), value

    return dict(leaves(given, ()))
