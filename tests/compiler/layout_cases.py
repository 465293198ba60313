"""Specs, plans and independent enumerations for the tests of layouts and artefacts."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from parcompile.layout.sequence import Block, CpLayout, blocks_between
from parcompile.pipeline import compile_file
from parcompile.plan import Plan

AXES = ("tp", "cp", "dp", "pp")

MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "intermediate_size": 3584,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "num_local_experts": 4,
}
SMALL_MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 256,
    "max_position_embeddings": 4096,
}


def spec_tree(nodes: int = 1, gpus_per_node: int = 8, **sections: Any) -> dict[str, Any]:
    """A small, valid spec; `parallelism`, `training` and the rest replace or extend its sections."""
    tree: dict[str, Any] = {
        "version": 1,
        "name": "small",
        "model": SMALL_MODEL,
        "cluster": {"nodes": nodes, "gpus_per_node": gpus_per_node, "accelerator": "h100-sxm"},
        "parallelism": {},
        "training": {"sequence_length": 1024, "micro_batch_size": 1, "precision": "bf16"},
    }
    for name, value in sections.items():
        tree[name] = {**tree[name], **value} if name in ("cluster", "parallelism", "training") else value
    return tree


def compile_tree(tree: dict[str, Any], folder: Path) -> Plan:
    """The plan of a spec; the spec has to be valid, whether it fits or not."""
    file = folder / "spec.json"
    file.write_text(json.dumps(tree), encoding="utf-8")
    plan, checked = compile_file(file, must_fit=False)
    assert plan is not None, checked.diagnostics
    return plan


def divisor_tuples(world: int, length: int = 4) -> Iterator[tuple[int, ...]]:
    """Every way to write the world as a product of `length` sizes."""
    if length == 1:
        yield (world,)
        return
    for first in range(1, world + 1):
        if world % first == 0:
            for rest in divisor_tuples(world // first, length - 1):
                yield (first, *rest)


def enumerated(order: tuple[str, ...], sizes: dict[str, int], axes: tuple[str, ...]) -> np.ndarray:
    """Groups over `axes` by brute force: number the ranks on an array, move the axes to the end, cut it into rows."""
    outermost_first = order[::-1]
    grid = np.arange(np.prod([sizes[axis] for axis in order])).reshape([sizes[axis] for axis in outermost_first])
    kept = [axis for axis in outermost_first if axis not in axes]
    moved = [axis for axis in outermost_first if axis in axes]
    rows = grid.transpose([outermost_first.index(axis) for axis in (*kept, *moved)])
    return rows.reshape(-1, int(np.prod([sizes[axis] for axis in moved], initial=1)))


def orders(axes: tuple[str, ...] = AXES) -> list[tuple[str, ...]]:
    """Every order of the axes."""
    return list(itertools.permutations(axes))


@dataclass(frozen=True, slots=True)
class RingStep:
    """One step of the ring: the keys and values of rank `source` are at hand; `blocks` may be empty.

    `send_to` and `receive_from` are the neighbours with which keys and values are exchanged *during* this step, for the
    next one; both are None in the last step. All ranks are indices within the context-parallel group.
    """

    step: int
    source: int
    send_to: int | None
    receive_from: int | None
    blocks: tuple[Block, ...]


def ring_schedule(layout: CpLayout, cp: int, rank: int, *, causal: bool = True) -> tuple[RingStep, ...]:
    """What `rank` computes and exchanges in each of the `cp` steps of the ring.

    Step 0 is the rank's own keys and values (the diagonal), so `cp - 1` exchanges are made.
    """
    return tuple(
        RingStep(
            step=step,
            source=(rank - step) % cp,
            send_to=(rank + 1) % cp if step < cp - 1 else None,
            receive_from=(rank - 1) % cp if step < cp - 1 else None,
            blocks=blocks_between(layout, cp, rank, (rank - step) % cp, causal=causal),
        )
        for step in range(cp)
    )
