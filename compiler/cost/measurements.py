"""Measured runs as workloads: the two public files that the coefficients come from, and a plain form for one's own.

The files themselves are not part of the package: only what was fitted to them is.
"""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from parcompile.layout.grid import Axis
from parcompile.layout.stages import Stage
from parcompile.machines.preset import preset_from_tree, preset_tree
from parcompile.model.hf_config import shape_from_config
from parcompile.model.presets import find_preset
from parcompile.model.shape import ModelShape
from parcompile.units import GIB

from .workload import Workload


class MeasurementError(ValueError):
    """A file of measurements that cannot be used; the message is meant for the user."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run: its layout, its peak bytes and the seconds of a step. Both are None when it crashed."""

    model: str
    work: Workload
    peak_bytes: float | None
    step_seconds: float | None

    @property
    def crashed(self) -> bool:
        """Whether nothing was measured."""
        return self.peak_bytes is None and self.step_seconds is None


def llama_shape(
    *, layers: int, hidden: int, heads: int, kv_heads: int, width: int, vocab: int, tied: bool
) -> ModelShape:
    """The shape of a Llama of these sizes."""
    return shape_from_config(
        {
            "model_type": "llama",
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "intermediate_size": width,
            "vocab_size": vocab,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": tied,
        }
    )


def nanotron_models() -> dict[str, ModelShape]:
    """The models of the nanotron measurements."""
    return {
        name: llama_shape(layers=layers, hidden=hidden, heads=32, kv_heads=32, width=8192, vocab=131072, tied=True)
        for name, layers, hidden in (("1B", 16, 2048), ("3B", 28, 3072))
    }


def balanced_stages(shape: ModelShape, pp: int) -> tuple[Stage, ...]:
    """Stages as nanotron cuts them: a block goes to the current stage, which ends when its share of the cost is passed.

    A layer costs 4 · a · dh · h + 3 · f · h, the head V · h. Late stages may stay empty.
    """
    h = shape.hidden_size
    layer = 4 * shape.num_attention_heads * shape.head_dim * h + 3 * shape.intermediate_size * h
    head = shape.vocab_size * h
    total = layer * shape.num_hidden_layers + head
    counts, stage, cost = [0] * pp, 0, 0
    for _ in range(shape.num_hidden_layers):
        cost += layer
        counts[stage] += 1
        if stage < pp - 1 and cost * pp > total * (stage + 1):
            stage += 1
    bounds = [0, *itertools.accumulate(counts)]
    return tuple(
        Stage(range(start, stop), has_embedding=index == 0, has_head=index == stage)
        for index, (start, stop) in enumerate(itertools.pairwise(bounds))
    )


def read_nanotron(path: Path, models: Mapping[str, ModelShape] | None = None) -> list[Measurement]:
    """Runs of nanotron on nodes of 8 H100, S 4096; rows whose batch is not 256 sequences are mislabelled and left out.

    Raises:
        MeasurementError: a model is not known.
    """
    shapes = {**nanotron_models(), **(models or {})}
    stages: dict[tuple[str, int], tuple[Stage, ...]] = {}
    found = []
    for row in _rows(path):
        if row["model"] not in shapes:
            raise MeasurementError(f"{path}: the dimensions of model {row['model']!r} are not known")
        sizes = {name: int(row[name]) for name in ("nodes", "dp", "pp", "tp", "zero", "mbs", "ga", "gbs")}
        if sizes["mbs"] * sizes["ga"] * sizes["dp"] != sizes["gbs"]:
            continue
        shape, key = shapes[row["model"]], (row["model"], sizes["pp"])
        if key not in stages:
            stages[key] = balanced_stages(shape, sizes["pp"])
        work = Workload(
            shape=shape,
            nodes=sizes["nodes"],
            gpus_per_node=8,
            accelerator="h100-sxm",
            sequence_length=4096,
            micro_batch=sizes["mbs"],
            micro_batches=sizes["ga"],
            tp=sizes["tp"],
            dp=sizes["dp"],
            pp=sizes["pp"],
            sequence_parallel=sizes["tp"] > 1,
            zero_stage=sizes["zero"],
            vocab_divisible_by=1,
            stage_layers=stages[key],
            framework="nanotron",
        )
        memory = float(row["mem"]) * GIB if row["mem"] else None
        rate = float(row["tps"]) if row["tps"] else None
        seconds = None if rate is None else work.tokens_per_step / (rate * work.world_size)
        found.append(Measurement(row["model"], work, memory, seconds))
    return found


def read_megatron(path: Path) -> list[Measurement]:
    """Step times of Megatron-LM of 2021 on nodes of 8 A100, full recomputation, V 51200 (GPT: plain MLP of 4 h)."""
    found = []
    for row in _rows(path):
        world = int(row["# GPUs"])
        dp, micro = int(row["data parallelism"]), int(row["micro batch"])
        work = Workload(
            shape=gpt_shape(int(row["# layers"]), int(row["hidden size"]), int(row["attention heads"])),
            nodes=max(1, world // 8),
            gpus_per_node=8,
            accelerator="a100-80gb",
            sequence_length=int(row["sequence length"]),
            micro_batch=micro,
            micro_batches=max(1, int(row["global batch"]) // (dp * micro)),
            tp=int(row["tensor parallelism"]),
            dp=dp,
            pp=int(row["pipeline parallelism"]),
            recompute="full",
            zero_stage=0,
            framework="megatron-2021",
        )
        name = f"{row['Parameters (billion)']}B"
        found.append(Measurement(name, work, None, float(row["iteration time (ms)"]) / 1000))
    return found


def gpt_shape(layers: int, hidden: int, heads: int, vocab: int = 51200, positions: int = 2048) -> ModelShape:
    """A GPT as Megatron-LM builds it: plain MLP of 4 h, learned positions, tied embeddings."""
    return shape_from_config(
        {
            "model_type": "gpt2",
            "n_embd": hidden,
            "n_layer": layers,
            "n_head": heads,
            "n_positions": positions,
            "vocab_size": vocab,
            "tie_word_embeddings": True,
        }
    )


PLAIN_COLUMNS = ("model", "nodes", "gpus_per_node", "accelerator", "sequence_length", "micro_batch", "micro_batches")


def read_plain(path: Path) -> list[Measurement]:
    """One's own runs: a column for each size of a layout, `peak_bytes` and `step_seconds` (empty when it crashed).

    `model` is the name of a preset, or any name beside `hf_config`, the text of a Hugging Face configuration. Columns
    that are left out keep their default (tp, cp, ep, dp, pp 1, ZeRO 1, …).

    Raises:
        MeasurementError: a column is missing or a value cannot be used.
    """
    found = []
    for line, row in enumerate(_rows(path), 2):
        missing = [name for name in PLAIN_COLUMNS if not row.get(name)]
        if missing:
            raise MeasurementError(f"{path}: columns {', '.join(missing)} are missing or empty")
        try:
            found.append(_plain(row))
        except (ValueError, KeyError) as error:
            raise MeasurementError(f"{path}: line {line}: {error}") from None
    return found


def _plain(row: Mapping[str, str]) -> Measurement:
    given: dict[str, Any] = {name: int(row[name]) for name in PLAIN_COLUMNS if name not in ("model", "accelerator")}
    machine = preset_from_tree(json.loads(row["preset"])) if row.get("preset") else None
    work = Workload(shape=_plain_shape(row), accelerator=row["accelerator"], preset=machine, **given)
    changes: dict[str, Any] = {name: int(row[name]) for name in _PLAIN_SIZES if row.get(name)}
    changes |= {name: row[name] for name in _PLAIN_NAMES if row.get(name)}
    if row.get("sequence_parallel"):
        changes["sequence_parallel"] = row["sequence_parallel"].lower() in ("1", "true")
    if row.get("order"):
        changes["order"] = tuple(map(Axis, row["order"].split("-")))
    if row.get("cp_sizes"):
        inner, outer = row["cp_sizes"].split("x")
        changes["cp_sizes"] = (int(inner), int(outer))
    memory, seconds = (float(row[name]) if row.get(name) else None for name in ("peak_bytes", "step_seconds"))
    return Measurement(row["model"], replace(work, **changes), memory, seconds)


def _plain_shape(row: Mapping[str, str]) -> ModelShape:
    if row.get("hf_config"):
        return shape_from_config(json.loads(row["hf_config"]))
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
        **{name: getattr(work, name) for name in _PLAIN_NAMES},
        "cp_sizes": "x".join(map(str, work.cp_sizes or ())),
        "order": "-".join(work.order),
        "peak_bytes": str(peak_bytes),
        "step_seconds": f"{step_seconds:.6g}",
    }


_PLAIN_NAMES = ("recompute", "framework", "cp_layout", "cp_implementation")
_PLAIN_SIZES = (
    *("tp", "cp", "ep", "dp", "pp", "virtual_stages"),
    *("element_bytes", "gradient_bytes", "zero_stage", "vocab_divisible_by"),
)


def read_measurements(path: Path, models: Mapping[str, ModelShape] | None = None) -> list[Measurement]:
    """The runs of a file, by its columns: nanotron's, Megatron's or the plain form.

    Raises:
        MeasurementError: the columns are none of these.
    """
    header = next(iter(_rows(path)), {})
    if "mbs" in header and "zero" in header:
        return read_nanotron(path, models)
    if "iteration time (ms)" in header:
        return read_megatron(path)
    return read_plain(path)


def _rows(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))
    except OSError as error:
        raise MeasurementError(f"{path} cannot be read: {error.strerror}") from None


def is_possible(one: Measurement) -> bool:
    """Whether every stage has something to do: nanotron cannot start otherwise, which says nothing about memory."""
    stages = one.work.stages
    used = sum(bool(stage.layers) or stage.has_head for stage in stages)
    # The stage behind the head computes the loss.
    return used >= len(stages) - 1
