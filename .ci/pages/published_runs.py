"""The two public files of measurements that the coefficients of the package come from, as workloads.

The files are not part of the repository: only what was fitted to them is.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

from parcompile.cost.measurements import Measurement, MeasurementError, rows_of
from parcompile.cost.workload import Workload
from parcompile.layout.pipeline import Stage
from parcompile.model.hf_config import shape_from_config
from parcompile.model.shape import ModelShape
from parcompile.units import GIB


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
    sizes = (("1B", 16, 2048, 8192), ("3B", 28, 3072, 8192), ("8B", 32, 4096, 14336))
    return {
        name: llama_shape(
            layers=layers, hidden=hidden, heads=32, kv_heads=32, width=width, vocab=131072, tied=name != "8B"
        )
        for name, layers, hidden, width in sizes
    }


def balanced_stages(shape: ModelShape, pp: int, *, at_share: bool = False) -> tuple[Stage, ...]:
    """Stages as nanotron cuts them: a block goes to the current stage, which ends when its share of the cost is passed.

    A layer costs 4 · a · dh · h + 3 · f · h, the head V · h. Late stages may stay empty. With `at_share`, a stage ends
    when its share is reached exactly, too.
    """
    h = shape.hidden_size
    layer = 4 * shape.num_attention_heads * shape.head_dim * h + 3 * shape.intermediate_size * h
    head = shape.vocab_size * h
    total = layer * shape.num_hidden_layers + head
    counts, stage, cost = [0] * pp, 0, 0
    for _ in range(shape.num_hidden_layers):
        cost += layer
        counts[stage] += 1
        if stage < pp - 1 and cost * pp + at_share > total * (stage + 1):
            stage += 1
    bounds = [0, *itertools.accumulate(counts)]
    return tuple(
        Stage(range(start, stop), has_embedding=index == 0, has_head=index == stage)
        for index, (start, stop) in enumerate(itertools.pairwise(bounds))
    )


def read_nanotron(
    path: Path, models: Mapping[str, ModelShape] | None = None, *, at_share: bool = False
) -> list[Measurement]:
    """Runs of nanotron on nodes of 8 H100, S 4096; rows whose batch is not 256 sequences are mislabelled and left out.

    With `at_share`, stages are cut otherwise than nanotron's code says (`balanced_stages`).

    Raises:
        MeasurementError: a model is not known.
    """
    shapes = {**nanotron_models(), **(models or {})}
    stages: dict[tuple[str, int], tuple[Stage, ...]] = {}
    found = []
    for row in rows_of(path):
        if row["model"] not in shapes:
            raise MeasurementError(f"{path}: the dimensions of model {row['model']!r} are not known")
        sizes = {name: int(row[name]) for name in ("nodes", "dp", "pp", "tp", "zero", "mbs", "ga", "gbs")}
        if sizes["mbs"] * sizes["ga"] * sizes["dp"] != sizes["gbs"]:
            continue
        shape, key = shapes[row["model"]], (row["model"], sizes["pp"])
        if key not in stages:
            stages[key] = balanced_stages(shape, sizes["pp"], at_share=at_share)
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
    for row in rows_of(path):
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


def is_possible(one: Measurement) -> bool:
    """Whether nanotron can start such a run at all: if not, that says nothing about memory.

    Every stage has something to do, and there are at least as many micro-batches as stages but one: its engine for
    1F1B asserts that (nanotron, parallel/pipeline_parallel/engine.py, `OneForwardOneBackwardPipelineEngine`).
    """
    work = one.work
    if work.framework == "nanotron" and work.micro_batches < work.pp - 1:
        return False
    used = sum(bool(stage.layers) or stage.has_head for stage in work.stages)
    # The stage behind the head computes the loss.
    return used >= len(work.stages) - 1
