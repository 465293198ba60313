"""Measured runs as workloads: a CSV file with a column for each size of a layout."""

from __future__ import annotations

import csv
import io
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from parcompile.layout.groups import Axis
from parcompile.machines import find_accelerator, preset_from_tree, preset_tree
from parcompile.model.hf_config import shape_from_config
from parcompile.model.layer_parts import WORDS
from parcompile.model.presets import find_preset
from parcompile.model.shape import ModelShape
from parcompile.text.typed import Reader, WrongValueError
from parcompile.user_files import MAX_TABLE_BYTES, parse_json, read_text

from .workload import Workload


class MeasurementError(ValueError):
    """A file of measurements that cannot be used; the message is meant for the user."""


class Measurement(NamedTuple):
    """One run: its layout, its peak bytes and the seconds of a step. Both are None when it crashed."""

    model: str
    work: Workload
    peak_bytes: float | None
    step_seconds: float | None

    @property
    def crashed(self) -> bool:
        """Whether nothing was measured."""
        return self.peak_bytes is None and self.step_seconds is None


PLAIN_COLUMNS = ("model", "nodes", "gpus_per_node", "accelerator", "sequence_length", "micro_batch", "micro_batches")


def read_plain(path: Path) -> list[Measurement]:
    """One's own runs: a column for each size of a layout, `peak_bytes` and `step_seconds` (empty when it crashed).

    `model` is the name of a preset, or any name beside `hf_config`, the text of a Hugging Face configuration. Columns
    that are left out keep their default (tp, cp, ep, dp, pp 1, ZeRO 1, …).

    Raises:
        MeasurementError: a column is missing or a value cannot be used.
    """
    found = []
    for line, row in enumerate(rows_of(path), 2):
        missing = [name for name in PLAIN_COLUMNS if not row.get(name)]
        if missing:
            raise MeasurementError(f"{path}: columns {', '.join(missing)} are missing or empty")
        try:
            found.append(_plain(row))
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise MeasurementError(f"{path}: line {line}: {error}") from None
    return found


def _plain(row: Mapping[str, str]) -> Measurement:
    read = Reader(row)
    counted = (*PLAIN_COLUMNS[1:3], *PLAIN_COLUMNS[4:])
    given: dict[str, Any] = {name: read.integer(name, least=1) for name in counted}
    machine = preset_from_tree(_described(row["preset"], "preset")) if row.get("preset") else None
    work = Workload(shape=_plain_shape(row), accelerator=row["accelerator"], preset=machine, **given)
    if machine is None:
        find_accelerator(work.accelerator)
    least = {"zero_stage": 0}
    changes: dict[str, Any] = {
        name: read.integer(name, least=least.get(name, 1)) for name in _PLAIN_SIZES if row.get(name)
    }
    changes |= {name: row[name] for name in _PLAIN_NAMES if row.get(name)}
    if row.get("recompute"):
        words = tuple(row["recompute"].split())
        pp = changes.get("pp", 1)
        if len(words) not in (1, pp):
            raise ValueError(f"recompute has {len(words)} words for pp {pp}: {row['recompute']!r}")
        wrong = next((word for word in words if word not in WORDS), None)
        if wrong is not None:
            raise WrongValueError("recompute", wrong, f"one of {', '.join(WORDS)}")
        changes["recompute"] = words if len(words) > 1 else words[0]
    if row.get("sequence_parallel"):
        changes["sequence_parallel"] = row["sequence_parallel"].lower() in ("1", "true")
    if row.get("order"):
        changes["order"] = tuple(map(Axis, row["order"].split("-")))
    if row.get("cp_sizes"):
        inner, outer = row["cp_sizes"].split("x")
        changes["cp_sizes"] = (int(inner), int(outer))
    memory, seconds = (read.number(name) if row.get(name) else None for name in ("peak_bytes", "step_seconds"))
    for name, measured in (("peak_bytes", memory), ("step_seconds", seconds)):
        if measured is not None and measured <= 0:
            raise WrongValueError(name, measured, "more than 0, or empty where the run crashed")
    work = replace(work, **changes)
    for stage in work.stages:
        work.stage_parameters(stage)  # raises what this layout does not split
    return Measurement(row["model"], work, memory, seconds)


def _described(text: str, name: str) -> Mapping[str, Any]:
    """The JSON object of a column.

    Raises:
        ValueError: it is none.
    """
    return Reader(parse_json(text), name).tree


def _plain_shape(row: Mapping[str, str]) -> ModelShape:
    if row.get("hf_config"):
        return shape_from_config(_described(row["hf_config"], "hf_config"))
    preset = find_preset(row["model"])
    if preset is None:
        raise ValueError(f"{row['model']!r} is no preset, and there is no column hf_config")
    return shape_from_config(preset.config)


def plain_row(
    work: Workload, *, model: str, hf_config: Mapping[str, Any], peak_bytes: int, step_seconds: float
) -> dict[str, str]:
    """One run as `read_plain` reads it: everything that an estimate needs stands in the row."""
    return {
        "model": model,
        "hf_config": json.dumps(dict(hf_config), sort_keys=True),
        "accelerator": work.accelerator,
        "preset": "" if work.preset is None else json.dumps(preset_tree(work.preset)),
        **{name: str(getattr(work, name)) for name in (*PLAIN_COLUMNS, *_PLAIN_SIZES) if hasattr(work, name)},
        "sequence_parallel": str(work.sequence_parallel).lower(),
        "recompute": work.recompute if isinstance(work.recompute, str) else " ".join(work.recompute),
        **{name: getattr(work, name) for name in _PLAIN_NAMES},
        "cp_sizes": "x".join(map(str, work.cp_sizes or ())),
        "order": "-".join(work.order),
        "peak_bytes": str(peak_bytes),
        "step_seconds": f"{step_seconds:.6g}",
    }


_PLAIN_NAMES = ("framework", "cp_layout", "cp_implementation")
_PLAIN_SIZES = (
    *("tp", "cp", "ep", "dp", "pp", "virtual_stages"),
    *("element_bytes", "gradient_bytes", "zero_stage", "vocab_divisible_by"),
)


def rows_of(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file, by the names of its columns.

    Raises:
        MeasurementError: it cannot be read.
    """
    try:
        return list(csv.DictReader(io.StringIO(read_text(path, MAX_TABLE_BYTES), newline="")))
    except OSError as error:
        raise MeasurementError(f"{path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise MeasurementError(f"{path} is no CSV file in UTF-8: {error}") from None


# Which crashed runs may have crashed for want of memory.


def crashed_of_memory(rows: Sequence[Measurement]) -> list[Measurement]:
    """Crashes that may have been of memory, told from measurements and exact arithmetic alone.

    A crash is left out when a larger micro-batch of the same layout ran. ZeRO 0 holds at most 12 bytes more of each
    parameter than ZeRO 1 did: when that, too, leaves a `CLEAR` share of the device empty, memory was not the reason.
    """
    measured: dict[tuple[object, ...], list[Measurement]] = defaultdict(list)
    for one in rows:
        if one.peak_bytes:
            measured[one.model, _layout(one.work)].append(one)
    return [
        one
        for one in rows
        if one.crashed and not any(_rules_out(ran, one) for ran in measured[one.model, _layout(one.work)])
    ]


CLEAR = 0.2
"""Share of a device that stays empty in a run that cannot have crashed of memory."""


def _rules_out(ran: Measurement, crash: Measurement) -> bool:
    """Whether a run of the same layout shows that a crash was not of memory."""
    if ran.work.micro_batch < crash.work.micro_batch:
        return False
    if ran.work.zero_stage <= crash.work.zero_stage:
        return True
    device = crash.work.machine.memory_bytes
    more = 12 * max(crash.work.stage_parameters(stage) for stage in crash.work.stages)
    return device is not None and (ran.peak_bytes or 0) + more <= (1 - CLEAR) * device


def _layout(work: Workload) -> tuple[int, ...]:
    return (work.nodes, work.tp, work.cp, work.dp, work.pp)
