"""As many heads, kv heads and groups as show how a rank holds them: a few on each."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from parcompile.model.families import FAMILIES
from parcompile.model.recurrent import RecurrentKind
from parcompile.model.shape import ModelShape
from parcompile.model.tables import class_default
from parcompile.plan import Plan

_WIDTH_OF_A_RANK, _HIDDEN_OF_A_HEAD = 32, 64


def small_heads(plan: Plan, config: Any) -> dict[str, Any]:
    """One or two kv heads on a rank, a few query heads for each; as many ranks as before share a kv head."""
    shape, tp = plan.spec.model.shape, plan.spec.parallelism.tp
    if not shape.attends:
        return _without_attention(plan)
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
    found |= _state_space(plan, found["hidden_size"])
    found |= _windowed_latent(shape, fewer)
    if shape.mla is None and ("head_dim" in plan.spec.model.hf_config or class_default(shape.model_type, "head_dim")):
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


def _without_attention(plan: Plan) -> dict[str, Any]:
    """A few features of hidden states for each rank, and as many channels or heads for each as before."""
    model, hidden = plan.spec.model, _HIDDEN_OF_A_HEAD * plan.spec.parallelism.tp
    states, found = model.shape.recurrent, {"hidden_size": hidden}
    assert states is not None
    if states.groups_key in model.hf_config and states.kind is RecurrentKind.MAMBA1:
        # A key of the channels goes before what says how often the hidden size they are.
        found[states.groups_key] = hidden * max(states.values // model.shape.hidden_size, 1)
    return found | _state_space(plan, hidden)


def _windowed_latent(shape: ModelShape, heads: int) -> dict[str, Any]:
    """Where latent attention has other sizes in windows: those, under the keys of one kind, with as few heads."""
    windows = [one for _, one in shape.by_kind if one.mla is not None and one.sliding_window]
    if not shape.kinds or not windows or (mla := windows[0].mla) is None:
        return {}
    sizes = {**asdict(mla), "head_dim": mla.qk_head_dim, "num_attention_heads": heads, "num_key_value_heads": heads}
    # The list of kinds says which layers have an indexer.
    return {"use_dsa": None, **{f"swa_{name}": value for name, value in sizes.items()}}


def _state_space(plan: Plan, hidden: int) -> dict[str, Any]:
    """A few heads of state-space layers on a rank, and as many ranks as before that share a group of them."""
    model, tp = plan.spec.model, plan.spec.parallelism.tp
    states, traits = model.shape.recurrent, FAMILIES[model.shape.model_type].recurrent
    if states is None or traits is None or traits.state_space is None:
        return {}
    keys = traits.state_space
    groups = min(states.groups, 2 * tp if states.groups % (2 * tp) == 0 else tp) if states.groups > 1 else 1
    features = states.value_dim * 2 * max(groups, tp)
    found: dict[str, Any] = {keys.groups[0]: groups}
    if keys.width is not None:
        found[keys.width[0]] = features
    elif keys.expand is not None:
        features = hidden * (states.values // model.shape.hidden_size)
    heads = max(groups, tp) * (2 if features % (2 * max(groups, tp)) == 0 else 1)
    return {**found, keys.heads[0]: heads, keys.head_dim[0]: features // heads}
