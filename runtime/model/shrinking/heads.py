"""As many heads, kv heads and groups as show how a rank holds them, narrow MLPs and experts."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from parcompile.model.families import FAMILIES
from parcompile.model.recurrent import RecurrentKind
from parcompile.model.shape import ModelShape
from parcompile.model.tables import alias_of, class_default
from parcompile.plan import Plan

# As many heads, kv heads and groups as show how a rank holds them: a few on each.

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
    # The list of kinds says which layers choose keys.
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


# Narrow MLPs and experts, and narrow heads of layers that carry a state.

_MLP_OF_A_RANK, _EXPERT_OF_A_RANK, _WIDTH_OF_A_HEAD, _BLOCK = 32, 16, 16, 16
_OF_STATES = frozenset(("num_heads", "head_dim", "kda_layers", "full_attn_layers"))
"""Keys of a section for layers with a state that the small model says elsewhere."""


def small_states(plan: Plan) -> dict[str, Any]:
    """Two narrow key heads on a rank, with at most two value heads each, where layers have heads of their own."""
    states, tp = plan.spec.model.shape.recurrent, plan.spec.parallelism.tp
    if states is None:
        return {}
    groups = tp * min(states.groups // tp, 2)
    if states.kind is RecurrentKind.GATED_DELTA_NET:
        return {
            "linear_num_key_heads": groups,
            "linear_num_value_heads": groups * min(states.heads // states.groups, 2),
            "linear_key_head_dim": min(states.key_dim, _WIDTH_OF_A_HEAD),
            "linear_value_head_dim": min(states.value_dim, _WIDTH_OF_A_HEAD),
        }
    if states.kind is RecurrentKind.LIGHTNING_ATTENTION:
        return {"block_size": min(states.chunk, _BLOCK)}
    traits = FAMILIES[plan.spec.model.shape.model_type].recurrent
    if states.kind is RecurrentKind.KIMI_DELTA_ATTENTION and traits is not None:
        found = {"linear_num_heads": groups, "linear_head_dim": min(states.key_dim, _WIDTH_OF_A_HEAD)}
        if not traits.section:  # keys that transformers writes beside those that they are taken from
            return {key: value for key, value in found.items() if key in plan.spec.model.hf_config}
        # What a section says goes before these keys; `layer_types` says which layers they are.
        section = plan.spec.model.hf_config.get(traits.section)
        if section is None:
            return found
        kept = {key: value for key, value in section.items() if key not in _OF_STATES}
        return {**found, traits.section: {**kept, "short_conv_kernel_size": states.kernel}}
    return {}


def small_widths(plan: Plan, config: Any) -> dict[str, Any]:
    """A narrow MLP, and a few narrow experts of every group."""
    shape, tp = plan.spec.model.shape, plan.spec.parallelism.tp
    if not shape.attends:
        return {}  # nor has any layer an MLP
    found: dict[str, Any] = {"intermediate_size": min(shape.intermediate_size, _MLP_OF_A_RANK * tp)}
    experts = FAMILIES[shape.model_type].experts
    if experts is not None:
        found[experts.dense_width[0]] = found["intermediate_size"]
    if shape.moe is None or experts is None:
        return found
    found[experts.width[0]] = min(shape.moe.intermediate_size, _EXPERT_OF_A_RANK * tp)
    if experts.shared_width is not None:
        found[experts.shared_width[0]] = min(shape.moe.shared_intermediate_size, _EXPERT_OF_A_RANK * tp)
    groups, chosen = getattr(config, "n_group", None) or 1, getattr(config, "topk_group", None) or 1
    per_token = shape.moe.num_experts_per_token
    in_group = max(2, -(-per_token // chosen), -(-2 * per_token // groups))
    count = min(shape.moe.num_experts, groups * in_group)
    if experts.identities is not None:
        found[experts.identities[0]] = min(shape.moe.num_identities, count)
    for name in (experts.count[0], alias_of(shape.model_type, experts.count[0])):
        if name is not None and (name == experts.count[0] or name in plan.spec.model.hf_config):
            found[name] = count
    return found
