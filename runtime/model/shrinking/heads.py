"""As many heads, kv heads and groups as show how a rank holds them, narrow MLPs and experts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from parcompile.model.families import FAMILIES
from parcompile.model.shape import ModelShape
from parcompile.model.tables import class_default
from parcompile.plan import Plan

# As many heads, kv heads and groups as show how a rank holds them: a few on each.

_WIDTH_OF_A_RANK, _HIDDEN_OF_A_HEAD = 32, 64


def small_heads(plan: Plan, config: Any) -> dict[str, Any]:
    """One or two kv heads on a rank, a few query heads for each; as many ranks as before share a kv head."""
    shape, tp = plan.spec.model.shape, plan.spec.parallelism.tp
    if not shape.attends:
        return {"hidden_size": _HIDDEN_OF_A_HEAD * tp}
    heads, kv_heads = shape.num_attention_heads, shape.num_key_value_heads
    exchanging = plan.spec.parallelism.context.head_ranks
    ratio, family = heads // kv_heads, FAMILIES[shape.model_type]
    of_rank = max(kv_heads // tp, 1)
    few = max(exchanging, 2 if tp <= 4 else 1)
    if of_rank > few and of_rank % exchanging == 0:
        of_rank = few
    fewer = of_rank * tp if kv_heads >= tp else kv_heads
    # Heads that work in pairs, or lie in blocks, are cut as they were.
    fewer = math.lcm(fewer, math.gcd(kv_heads, max(family.fused_blocks, 2 * family.paired_heads, 1) * tp))
    unit = math.lcm(max(tp // kv_heads, 1), exchanging // math.gcd(of_rank, exchanging))
    if ratio % unit == 0:
        ratio = min(ratio, unit if unit > 1 else 2)
    of_head = max(shape.hidden_size // heads, 1)
    if shape.kinds and not family.hidden_is_heads:  # heads have widths of their own
        of_head = min(of_head, _HIDDEN_OF_A_HEAD)
    found: dict[str, Any] = {"num_attention_heads": fewer * ratio, "hidden_size": fewer * ratio * of_head}
    if shape.kinds or hasattr(config, "num_key_value_heads"):
        found["num_key_value_heads"] = fewer
    found |= _low_rank(plan, of_head)
    found |= _windowed(shape, fewer)
    if shape.projections is None and (
        "head_dim" in plan.spec.model.hf_config or class_default(shape.model_type, "head_dim")
    ):
        found["head_dim"] = shape.head_dim
    return found


def _low_rank(plan: Plan, of_head: int) -> dict[str, Any]:
    """Two heads in each group whose outputs are projected together, a group or two on a rank, narrow projections."""
    shape, tp = plan.spec.model.shape, plan.spec.parallelism.tp
    if shape.low_rank is None:
        return {}
    low = shape.low_rank
    groups = tp * (2 if tp == 1 and low.output_groups % 2 == 0 else 1)
    heads = groups * min(shape.num_attention_heads // low.output_groups, 2)
    ranks = {"q_lora_rank": low.query_rank, "o_lora_rank": low.output_rank}
    narrow = {key: min(rank, _WIDTH_OF_A_RANK) for key, rank in ranks.items()}
    return {**narrow, "o_groups": groups, "num_attention_heads": heads, "hidden_size": heads * of_head}


def _windowed(shape: ModelShape, heads: int) -> Mapping[str, Any]:
    """Where attention has other sizes in windows: those, with as few heads."""
    if not shape.kinds:
        return {}
    windows = (one.projections for _, one in shape.by_kind if one.projections is not None and one.sliding_window)
    return next((one.small_windows(heads) for one in windows), {})


# Narrow MLPs.

_MLP_OF_A_RANK = 32


def small_widths(plan: Plan) -> dict[str, Any]:
    """A narrow MLP."""
    shape, tp = plan.spec.model.shape, plan.spec.parallelism.tp
    if not shape.attends:
        return {}  # nor has any layer an MLP
    found: dict[str, Any] = {"intermediate_size": min(shape.intermediate_size, _MLP_OF_A_RANK * tp)}
    experts = FAMILIES[shape.model_type].experts
    if experts is not None:
        found[experts.dense_width[0]] = found["intermediate_size"]
    return found
