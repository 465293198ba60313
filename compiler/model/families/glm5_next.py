"""GLM-5-Next: Kimi delta attention in most layers, latent attention over chosen pools of keys in the others, experts.

Blocks read and write several residual streams, whose mean is the last hidden state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parcompile.model.blocks.delta import KimiDelta, KimiDeltaTraits
from parcompile.model.blocks.indexer import FULL, SHARED, Indexer, IndexerTraits, kinds_between
from parcompile.model.family import Family, Latent, Refusal
from parcompile.model.shape import ModelShape

from .added import all_heads, routed

_HEADS, _POOL, _TOP_K = 64, 16, 2048
_SECTION, _STATE, _CHOSEN = "linear_attn_config", "linear_attention", "indexed_attention"


def _three_of_four(_: Mapping[str, Any], count: int) -> tuple[int, ...]:
    return tuple(layer for layer in range(count) if layer % 4 != 3)


def _kinds(config: Mapping[str, Any], count: int) -> tuple[str, ...]:
    listed = config.get("layer_types")
    if not isinstance(listed, list | tuple):
        return kinds_between(config, count, _three_of_four(config, count))
    return kinds_between(config, count, {layer for layer, kind in enumerate(listed) if kind == _STATE})


def _values_of_layers(_: Mapping[str, Any], shape: ModelShape) -> Mapping[int, Mapping[str, Any]]:
    """Sizes that a section of published files says, and kinds of layers, by the keys that its class makes of them."""
    states, indexer, layers = shape.part(KimiDelta), shape.part(Indexer), range(shape.num_hidden_layers)
    held, full = () if states is None else states.layers, () if indexer is None else indexer.layers
    found: dict[str, Any] = {
        "layer_types": [_STATE if layer in held else _CHOSEN for layer in layers],
        "indexer_types": [FULL if layer in full else SHARED for layer in layers],
    }
    if states is not None:
        found |= {"linear_num_heads": states.heads, "linear_head_dim": states.key_dim}
        found["linear_conv_kernel_dim"] = states.kernel
    return dict.fromkeys(layers, found)


def _bound_is_no_fraction(config: Mapping[str, Any]) -> bool:
    section = config.get(_SECTION)
    bound = section.get("gate_lower_bound") if isinstance(section, Mapping) else None
    return bound is not None and not isinstance(bound, float)


def _uneven(config: Mapping[str, Any]) -> bool:
    pool, chosen = config.get("index_kpool", _POOL), config.get("index_topk", _TOP_K)
    return isinstance(pool, int) and isinstance(chosen, int) and pool > 0 and chosen % pool != 0


GLM5_NEXT_TEXT = Family(
    kv_heads=all_heads,
    latent=Latent(1536, 512, 256, 0, 256),
    parts=(
        KimiDeltaTraits(
            module="self_attn",
            attending_words=(_CHOSEN, "full_attention"),
            by_default=_three_of_four,
            section=_SECTION,
            gates_by_few=True,
        ),
        IndexerTraits(heads=32, top_k=_TOP_K, kinds=_kinds, pool=("index_kpool", _POOL)),
    ),
    defaults={"linear_num_heads": _HEADS},
    hyper_streams=("hc_mult", 4),
    square_mixtures=("hc_sinkhorn_iters", 20),
    values_of_layers=_values_of_layers,
    experts=routed(288, 8, 2048, by_layer="mlp_layer_types", dense_by_default=3),
    refusals=(
        Refusal(
            "num_key_value_heads",
            lambda config: (
                config.get("num_key_value_heads", _HEADS) not in (None, config.get("num_attention_heads", _HEADS))
            ),
            "latent attention has a key of each query head: it has to be num_attention_heads",
        ),
        Refusal(
            "q_lora_rank",
            lambda config: "q_lora_rank" in config and config["q_lora_rank"] is None,
            "it is null, and the indexer takes the compressed queries: write their width",
        ),
        Refusal(
            "qk_rope_head_dim",
            lambda config: bool(config.get("qk_rope_head_dim")),
            "this attention rotates nothing, and transformers builds no such model: write 0",
        ),
        Refusal(
            _SECTION,
            _bound_is_no_fraction,
            "transformers takes a number with a point, as -5.0, or null for its gate_lower_bound",
        ),
        Refusal(
            "index_topk",
            _uneven,
            "index_topk % index_kpool is not 0, and whole pools of keys are chosen: choose a multiple",
        ),
        Refusal(
            "index_kpool_always_select_tail",
            lambda config: (
                config.get("index_kpool_always_select_tail") is False and config.get("index_kpool", _POOL) != 1
            ),
            "the first index_kpool - 1 queries would see no key, of which each attention of transformers makes "
            "something else: write true",
        ),
        Refusal(
            "layer_types",
            lambda config: "attention" in (config.get("layer_types") or ()),
            'transformers makes "full_attention" of the older word "attention", of which its model finds no mask: '
            'write "indexed_attention"',
        ),
    ),
)
