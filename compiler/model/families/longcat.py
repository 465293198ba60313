"""LongCat-Flash (arXiv 2509.01322): two layers in one module, whose experts stand beside both.

A module attends, passes an MLP, attends again and passes a second MLP. Its experts take what the first MLP takes, and
their sum joins behind the second one. Some experts give back what they take.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parcompile.model.family import Experts, Family, Latent, Refusal

from .traits import all_heads


def _counts_differ(config: Mapping[str, Any]) -> bool:
    count, modules = config.get("num_hidden_layers"), config.get("num_layers")
    return isinstance(count, int) and (count % 2 > 0 if modules is None else count != 2 * modules)


def _heads_differ(config: Mapping[str, Any]) -> bool:
    wanted = config.get("qk_nope_head_dim", 128) + config.get("qk_rope_head_dim", 64)
    return config.get("qk_head_dim") not in (None, wanted)


LONGCAT: Mapping[str, Family] = {
    "longcat_flash": Family(
        keys={
            "num_hidden_layers": "num_layers",
            "intermediate_size": "ffn_hidden_size",
            "moe_intermediate_size": "expert_ffn_hidden_size",
        },
        layers_per_module=2,
        mlp="mlps",
        latent=Latent(),
        kv_heads=all_heads,
        experts=Experts(
            count=("n_routed_experts", 512),
            identities=("zero_expert_num", 256),
            per_token=("moe_topk", 12),
            width=("moe_intermediate_size", 2048),
            dense_width=("intermediate_size", 12288),
            beside="mlps",
            shared_width=("intermediate_size", 12288),
        ),
        refusals=(
            Refusal(
                "num_hidden_layers",
                _counts_differ,
                "transformers counts two layers for each of num_layers: it has to be twice that, or left out",
            ),
            Refusal(
                "num_key_value_heads",
                lambda config: config.get("num_key_value_heads") not in (None, config.get("num_attention_heads", 64)),
                "every head has its own key and value: it has to be num_attention_heads",
            ),
            Refusal(
                "moe_topk",
                lambda config: config.get("moe_topk") == 1,
                "transformers computes nothing where a token chooses one expert: it has to be 2 or more",
            ),
            Refusal("qk_head_dim", _heads_differ, "it has to be qk_nope_head_dim + qk_rope_head_dim"),
            Refusal(
                "head_dim",
                lambda config: config.get("head_dim", 64) != config.get("qk_rope_head_dim", 64),
                "transformers computes angles for so many features: it has to be qk_rope_head_dim",
            ),
            Refusal(
                "router_bias",
                lambda config: bool(config.get("router_bias")),
                "transformers builds a bias that its router never adds: it has to be false",
            ),
            *(
                Refusal(
                    key,
                    lambda config, key=key: config.get(key) is False,  # type: ignore[misc]
                    "transformers scales compressed queries and keys always: it has to be true",
                )
                for key in ("mla_scale_q_lora", "mla_scale_kv_lora")
            ),
            Refusal(
                "zero_expert_type",
                lambda config: config.get("zero_expert_type", "identity") != "identity",
                "transformers' further experts give back what they take: it has to be 'identity'",
            ),
        ),
    ),
}
