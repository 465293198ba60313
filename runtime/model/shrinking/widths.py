"""Narrow MLPs and experts, and narrow heads of layers that carry a state."""

from __future__ import annotations

from typing import Any

from parcompile.model.families import FAMILIES
from parcompile.model.recurrent import RecurrentKind
from parcompile.model.tables import alias_of
from parcompile.plan import Plan

_WIDTH_OF_A_RANK, _EXPERT_OF_A_RANK, _WIDTH_OF_A_HEAD, _BLOCK = 32, 16, 16, 16
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
    found: dict[str, Any] = {"intermediate_size": min(shape.intermediate_size, _WIDTH_OF_A_RANK * tp)}
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
