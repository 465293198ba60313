"""The peak that preflight counts beside the one that is estimated, for drawn plans, as a table.

    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 python .ci/preflight_peaks.py [--seed 1] [--count 20] [--first 0]
        [--parts | --types]

Draws models (with `--types` of all types that the runtime knows, one after the other, of few layers), axes, ZeRO
stages, precisions, recomputation (with `--parts` of named parts of layers) and sizes of micro-batches; builds and runs
without memory a rank of each stage that is like none before it, and shows the one of them that is furthest off. The
exit code is 1 when a peak is further than 3 % from what was counted.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import re
import statistics
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "runtime"))

from families import FAMILIES, tiny_config

from parcompile.plan import Plan, compile_plan
from parcompile.rules import check
from parcompile.runtime.preflight import distinct_ranks, peak_bytes
from parcompile.runtime.preflight.stand_in import MetaTracker, stand_in
from parcompile.runtime.preflight.step import StepMeasurement, build_sharded, run_step
from parcompile.spec.resolve import Resolution
from parcompile.units import format_bytes

TOLERANCE, NEAR = 0.03, 0.01

_ROWS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
LLAMA = _ROWS["llama"]
MODELS = {name: {**LLAMA, **row} for name, row in _ROWS.items()}
"""What differs from the first, by name."""
GEMMA = MODELS.pop("gemma2")


PARTS = ("norms", "attention", "mlp", "attention+norms", "mlp+norms", "attention+mlp", "attention+mlp+norms")
HEADS = re.compile("(^|_)heads$|^n_head$")
"""Keys of a small configuration that count heads: a model that is so many times as wide has `OF_HEAD` times fewer."""
PER_HEAD = re.compile(
    "head_dim|d_head|qk_nope|qk_rope|v_head|rotary_dim|d_state|state_size|dt_rank|step_rank|per_layer|ple_"
)
"""Sizes of a head and of a state, and those of small second inputs."""
WIDTHS = re.compile("hidden_size|embd|d_model|dim|width|rank|d_inner|ffn|intermediate|n_inner|dff|mamba_d_")
"""Other sizes, but counts and ratios of them."""
COUNTS = re.compile("n_head|num|mult|ratio")
MLPS = re.compile("intermediate|ffn|n_inner|dff")
CHUNKS = re.compile("chunk_size|^block_size$")
OF_HEAD, OF_CHUNK = 16, 32
AS_USUAL = {
    **dict.fromkeys(("sliding_window", "window_size", "local_attention"), 512),
    "index_topk": 256,
    "attention_chunk_size": 1024,
    "vocab_size_per_layer_input": 32000,
    "query_pre_attn_scalar": 128,
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 8192),
}


class Drawn(NamedTuple):
    """A plan, and what was drawn for it."""

    text: str
    plan: Plan


def drawn(seed: int, count: int, *, in_parts: bool = False, of_types: bool = False) -> Iterator[Drawn]:
    """So many plans without an error that the runtime executes.

    `in_parts`: they recompute named parts of layers; `of_types`: of one model type after the other.
    """
    dice = random.Random(seed)
    models = {**MODELS, "gemma2": GEMMA} if in_parts else MODELS
    names = sorted(FAMILIES)
    dice_of_types = random.Random(seed)
    while count:
        if of_types:
            name = names.pop(dice_of_types.randrange(len(names)))
            names = names or sorted(FAMILIES)
            tries = (_draw(dice, {name: _of_type(name, dice)}, in_parts) for _ in range(TRIES))
            one = next((each for each in tries if each is not None), None)
        else:
            one = _draw(dice, models, in_parts)
        if one is not None:
            count -= 1
            yield one


TRIES = 12
"""Of layouts for a model type."""


def _of_type(name: str, dice: random.Random) -> dict[str, Any]:
    """The small configuration of a type, 64 or 128 times as wide: with hidden sizes and heads of models of 1B to 8B."""
    config, wider = tiny_config(name), dice.choice((64, 128))
    for key, value in config.items():
        if type(value) is not int or value < 2:
            continue
        if HEADS.search(key):
            config[key] = value * wider // OF_HEAD
        elif PER_HEAD.search(key):
            config[key] = value * OF_HEAD
        elif CHUNKS.search(key):
            config[key] = value * OF_CHUNK
        elif value > 2 and WIDTHS.search(key) and not COUNTS.search(key):
            config[key] = wider * (32 * dice.choice((1, 2, 3)) // (1 + ("moe" in key)) if MLPS.search(key) else value)
    config |= {key: value for key, value in AS_USUAL.items() if config.get(key)}
    vocabularies = (32000,) if "vocab_size_per_layer_input" in config else (32000, 128256)
    return config | ({"vocab_size": dice.choice(vocabularies)} if "vocab_size" in config else {})


def _draw(dice: random.Random, models: Mapping[str, dict[str, Any]], in_parts: bool) -> Drawn | None:
    name = dice.choice(list(models))
    axes = {axis: dice.choice((1, 1, 2, 4) if axis != "pp" else (1, 1, 2)) for axis in ("tp", "cp", "pp", "dp")}
    if any(key.endswith("experts") for key in models[name]):
        axes["ep"] = dice.choice((1, 2, 4))
    parallelism: dict[str, Any] = {axis: size for axis, size in axes.items() if size > 1}
    parallelism |= {"sequence_parallel": True} if axes["tp"] > 1 and dice.random() < 0.5 else {}
    ranks = axes["tp"] * axes["cp"] * axes["pp"] * axes["dp"]
    precision, recompute = (
        dice.choice(("bf16", "bf16", "fp32")),
        dice.choice(PARTS if in_parts else ("none", "none", "full")),
    )
    stage, micro = dice.choice((0, 1, 1, 2)), dice.choice((1, 2))
    batch = micro * axes["dp"] * dice.choice((1, 2, 4))
    length = dice.choice((2048, 4096, 8192))
    training: dict[str, Any] = {
        "sequence_length": length,
        "micro_batch_size": micro,
        "global_batch_size": batch,
        "precision": precision,
        "activation_checkpointing": recompute,
    }
    if precision == "bf16" and dice.random() < 0.3:
        training["gradient_accumulation_dtype"] = "bf16"
    tree = {
        "version": 1,
        "name": name,
        "model": models[name],
        "cluster": {"gpus_per_node": ranks, "accelerator": "h200"},
        "parallelism": parallelism,
        "training": training,
        "zero": {"stage": stage},
    }
    resolution = Resolution(tree)
    found = check(resolution)
    if any(one.is_error for one in found):
        return None
    plan = compile_plan(resolution.spec(), tree, found)
    if plan.refusals:
        return None
    said = " ".join(f"{axis}{size}" for axis, size in axes.items() if size > 1) or "one rank"
    said += ", sequence parallel" if "sequence_parallel" in parallelism else ""
    sums = ", sums in bf16" if "gradient_accumulation_dtype" in training else ""
    text = (
        f"{name} | {said} | {stage} | {precision}{sums} | {recompute} | "
        f"{micro} × {length}, {plan.spec.training.gradient_accumulation_steps} steps"
    )
    return Drawn(text, plan)


def measured(plan: Plan, rank: int) -> tuple[float, int, StepMeasurement]:
    """The peak of a rank as it is estimated and as it was counted, in bytes."""
    with stand_in(plan, rank) as mesh:
        tracker = MetaTracker(mesh)
        with tracker:
            model, _ = build_sharded(mesh, tracker)
            step = run_step(model, mesh, tracker)
        peaks = peak_bytes(mesh, step)
        del model
        gc.collect()
    return *peaks, step


def _one_of_each_stage(plan: Plan) -> list[int]:
    """A rank of each stage that is like none before it; of those of cp the last, whose pieces all receive states."""
    stages, grid, cp = plan.spec.parallelism.pp, plan.groups.grid, plan.spec.parallelism.cp
    alike = {grid.rank({"pp": stage}): grid.rank({"pp": stage, "cp": cp - 1}) for stage in range(stages)}
    return [alike[rank] for rank in distinct_ranks(plan) if rank in alike]


def main() -> int:
    """One row for each plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--parts", action="store_true", help="layers are recomputed in named parts")
    parser.add_argument("--types", action="store_true", help="of all model types")
    options = parser.parse_args()
    print("| model | layout | ZeRO | precision | recomputed | batch | estimated | counted | off |")
    print("|---|---|---|---|---|---|---|---|---|")
    errors = []
    every = drawn(options.seed, options.count, in_parts=options.parts, of_types=options.types)
    for number, (text, plan) in enumerate(every):
        if number < options.first:
            continue
        peaks = [measured(plan, rank)[:2] for rank in _one_of_each_stage(plan)]
        estimated, counted = max(peaks, key=lambda pair: abs(pair[0] / pair[1] - 1))
        errors.append(abs(estimated / counted - 1))
        off = f"{estimated / counted - 1:+.1%}"
        print(f"| {text} | {format_bytes(estimated)} | {format_bytes(counted)} | {off} |", flush=True)
    wrong = sum(error > TOLERANCE for error in errors)
    mean, median, largest = sum(errors) / len(errors), statistics.median(errors), max(errors)
    near = sum(error <= NEAR for error in errors)
    print(f"\nmean {mean:.1%}, median {median:.1%}, largest {largest:.1%}; {near} of {len(errors)} within {NEAR:.0%},")
    print(f"{wrong} further than {TOLERANCE:.0%}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
