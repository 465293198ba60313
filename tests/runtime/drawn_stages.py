"""ZeRO stages drawn at random, with layouts, recomputation and families; `.ci/pipeline_matrix.py --draws stages`.

`--draws offload` has the optimizer, weights or both on the host, also of pipelines, with clipping of all gradients, of
some and of none; `--draws overlap` reduces gradients under backward, in buckets of all sizes.
"""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any
from unittest import mock

from closeness import Margin
from drawn_configurations import runs_over
from families import FAMILIES, tiny_config
from ranks import run_ranks
from training_runs import compared, dp_of, make_plan, train_in_one_process, train_with_engine

from parcompile.model.catalogue import RUNTIME_FAMILIES
from parcompile.model.derived_rows import dense_mlps, shared_inputs
from parcompile.model.hf_config import shape_from_config
from parcompile.model.layer_parts import PARTS, why_whole
from parcompile.plan import Plan

STEPS = 3
DRAWN = tuple(family for family in RUNTIME_FAMILIES if family not in ("phimoe", "gemma3n_text"))
"""Of the tiny models of the other two, one process alone draws noise in routers, and has no finite gradient."""
TILED = tuple(family for family in DRAWN if dense_mlps(shape_from_config(tiny_config(family))))
"""Those that have a dense MLP in a module of its own."""
GATHERED = tuple(family for family in DRAWN if shared_inputs(shape_from_config(tiny_config(family))))
"""Those of which some blocks may gather their input again."""
WORDS = ("norms", "attention", "mlp", "attention+norms", "mlp+norms", "attention+mlp", "attention+mlp+norms")
IN_PARTS = tuple(one for one in DRAWN if why_whole(shape_from_config(tiny_config(one)), frozenset(PARTS)) is None)
"""Those whose layers are recomputed in parts."""
KEYS: dict[str, tuple[Any, ...]] = {
    "stage3_param_persistence_threshold": (0, 200, 100_000),
    "stage3_prefetch_bucket_size": (0, 2_000, 50_000_000),
    "stage3_max_live_parameters": (0, 5_000, 1_000_000_000),
    "stage3_max_reuse_distance": (0, 1_000_000_000),
    "sub_group_size": (1_000, 1_000_000_000),
    "reduce_bucket_size": (500, 50_000),
    "reduce_scatter": (True, True, False),
    "overlap_comm": (True, True, False),
    "contiguous_gradients": (True, True, False),
    "stage3_use_all_reduce_for_fetch_params": (False, False, True),
    "stage3_allgather_sequential": (False, False, True),
    "memory_efficient_linear": (True, False),
    "enable_sanity_checks": (False, True),
}
LAYOUTS: tuple[tuple[int, dict[str, Any]], ...] = (
    *((2, one) for one in ({}, {"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"cp": 2})),
    *((4, one) for one in ({"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"cp": 2}, {"tp": 2, "cp": 2})),
    *((4, one) for one in ({"tp": 2, "cp": 2, "sequence_parallel": True}, {"cp": 2, "cp_implementation": "ulysses"})),
    (4, {"cp": 4, "cp_implementation": "all_gather", "cp_layout": "striped"}),
    (4, {"cp": 4, "cp_implementation": "usp", "order": "cp-tp-dp-pp-ep"}),
    (8, {"tp": 2, "cp": 2, "sequence_parallel": True, "order": "dp-cp-tp-pp-ep"}),
)
OF_EXPERTS: tuple[tuple[int, dict[str, Any]], ...] = (
    *((2, one) for one in ({"ep": 2}, {"ep": 2, "cp": 2})),
    *((4, one) for one in ({"ep": 2}, {"ep": 4}, {"tp": 2, "ep": 2}, {"tp": 2, "ep": 4, "expert_tp": 1})),
    *((4, one) for one in ({"ep": 2, "cp": 2}, {"tp": 2, "ep": 2, "cp": 2, "sequence_parallel": True})),
    (8, {"tp": 2, "ep": 2, "cp": 2}),
)


PIPELINES: tuple[tuple[int, dict[str, Any]], ...] = (
    *((2, one) for one in ({"pp": 2}, {"pp": 2, "num_virtual_stages_per_pipeline_rank": 2})),
    *((4, one) for one in ({"pp": 2}, {"pp": 2, "tp": 2, "sequence_parallel": True}, {"pp": 2, "cp": 2})),
)


def draw(
    number: int,
    most_ranks: int,
    *,
    on_host: bool = False,
    implementation: str = "torch",
    switch: str = "",
    in_parts: bool = False,
    overlaps: bool = False,
) -> tuple[Plan, str]:
    """A plan that compiles, and what it is; the same for the same number. Families take turns.

    `in_parts`: named parts of layers are recomputed, beside whatever a plan may have beside that. `overlaps`: gradients
    are reduced as they come.
    """
    drawn = IN_PARTS if in_parts else {"tiled_mlp": TILED, "gather_inputs_again": GATHERED}.get(switch, DRAWN)
    choose, family = random.Random(number), drawn[number % len(drawn)]
    while True:
        dealt = FAMILIES[family].experts is not None and choose.random() < 0.6
        world, parallelism = choose.choice(
            OF_EXPERTS if dealt else LAYOUTS + PIPELINES * (on_host or in_parts or overlaps or switch != "")
        )
        stage = choose.choice((1, 1, 2) if overlaps else (1, 2, 3) if on_host else (0, 1, 2, 3, 3, 3, 3))
        stage, dp = 1 if "pp" in parallelism else stage, dp_of(world, parallelism)
        if world > most_ranks or not runs_over(family, parallelism) or (not stage and "expert_tp" in parallelism):
            continue
        if switch == "gather_inputs_again" and (stage == 3 or "sequence_parallel" not in parallelism):
            continue  # it has no effect
        micro_batches = choose.choice([size for size in (1, 2, 4) if dp * size <= 4])
        training: dict[str, Any] = {
            "micro_batch_size": 4 // dp // micro_batches,
            "activation_checkpointing": choose.choice(["none", "selective", "full"]),
            "optimizer": {"lr": 1e-3, "eps": 1e-4},
            **({"gradient_clipping": choose.choice((0.0, 0.05, 0.5, 100.0))} if on_host or switch or overlaps else {}),
            **({switch: True} if switch else {}),
        }
        if switch == "activation_offloading":
            by_stage = [["full", "none"], ["none", "full"]] if parallelism == {"pp": 2} else []
            training["activation_checkpointing"] = choose.choice(["full", *by_stage])
        if in_parts:
            words = [choose.choice(WORDS), choose.choice((*WORDS, "none", "full"))]
            by_stage = parallelism == {"pp": 2} and words[0] != words[1]
            training["activation_checkpointing"] = words if by_stage else words[0]
            further = ("linear_cross_entropy", *(["tiled_mlp"] if family in TILED else []))
            training |= {key: True for key in further if choose.random() < 0.25}
        zero = {key: choose.choice(values) for key, values in KEYS.items()} if stage == 3 else {}
        if overlaps:
            zero = {"overlap_comm": True, "reduce_bucket_size": choose.choice((500, 5_000, 50_000, 500_000_000))}
        extra: dict[str, Any] = {"zero": {"stage": stage}}
        extra |= {"deepspeed": {"zero_optimization": zero}} if zero else {}
        if on_host:
            extra["zero"]["offload_optimizer"] = {"device": "cpu", "pin_memory": choose.random() < 0.5}
            extra["zero"]["offload_optimizer"]["implementation"] = implementation
            if stage == 3 and number % 3:
                extra["zero"]["offload_param"] = {"device": "cpu", "pin_memory": False}
                extra["zero"] |= {} if number % 3 == 1 else {"offload_optimizer": {"device": "none"}}
        model = tiny_config(family, initializer_range=0.1)
        if "num_key_value_heads" in model and choose.random() < 0.5:
            model["num_key_value_heads"] = 1
        try:
            plan = make_plan(world, parallelism, model=model, whole_model=True, training=training, extra=extra)
        except AssertionError:  # a rule refuses it
            continue
        return plan, _text(family, world, parallelism, training, stage, zero)


def _text(family: str, world: int, parallelism: dict[str, Any], training: dict[str, Any], stage: int, zero: Any) -> str:
    axes = ", ".join(f"{key} {value}" for key, value in parallelism.items()) or "dp"
    keys = ", ".join(f"{key.removeprefix('stage3_')} {value}" for key, value in zero.items() if value != KEYS[key][0])
    batches = f"micro {training['micro_batch_size']}, recompute {training['activation_checkpointing']}"
    batches += "".join(f", {key}" for key in ("linear_cross_entropy", "tiled_mlp") if training.get(key))
    batches += f", clip {training['gradient_clipping']:g}" if "gradient_clipping" in training else ""
    return f"stage {stage}, {family}, {world} ranks: {axes}; {batches}" + (f"; {keys}" if keys else "")


def compare(plan: Plan) -> list[Margin]:
    """How far losses, norms and parameters of the ranks are from those of one process."""
    ranks = run_ranks(plan.world_size, train_in_parts, plan, True, STEPS)
    return compared(plan, ranks, lambda seed: train_in_one_process(plan, masked=True, steps=STEPS, seed=seed))


CHUNK_ELEMENTS = 120
"""Logits of a chunk: tiny models, too, compute theirs in several."""


TILE_TOKENS = 0.1
"""Tokens of a tile of an MLP, for each of its input features."""


def train_in_parts(rank: int, plan: Plan, masked: bool, steps: int) -> dict[str, Any]:
    """`train_with_engine`, with chunks and tiles of a few tokens for a linear cross-entropy and a tiled MLP."""
    with (
        mock.patch("parcompile.layout.shards.LOSS_CHUNK_ELEMENTS", CHUNK_ELEMENTS)
        if plan.spec.training.linear_cross_entropy
        else nullcontext(),
        mock.patch("parcompile.layout.shards.MLP_TILE_TOKENS", TILE_TOKENS),
    ):
        return train_with_engine(rank, plan, masked, steps)
