"""Gated delta nets, keys that an indexer chooses by blocks, and embeddings of n-grams (Qwen4-Exp)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parcompile.model.blocks.delta import GatedDeltaTraits
from parcompile.model.blocks.indexer import FULL, NONE, IndexerTraits
from parcompile.model.blocks.ngrams import NgramTraits
from parcompile.model.family import Experts, Family, Refusal
from parcompile.model.tables import OLDER_KINDS

_CARRYING = "linear_attention"
_BLOCK_KEYS = ("indexer_n_heads", "indexer_kv_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio")


def _carrying(config: Mapping[str, Any], count: int) -> set[int]:
    """The layers that carry a state; what is wrong with their list is said where they are read."""
    kinds = config.get("layer_types")
    if isinstance(kinds, list | tuple):
        return {layer for layer, kind in enumerate(kinds) if OLDER_KINDS.get(str(kind), kind) == _CARRYING}
    every = config.get("full_attention_interval", 4)
    return {layer for layer in range(count) if not isinstance(every, int) or every < 1 or (layer + 1) % every}


def _kinds(config: Mapping[str, Any], count: int) -> tuple[str, ...]:
    carrying = _carrying(config, count)
    return tuple(NONE if layer in carrying else FULL for layer in range(count))


def _attends(config: Mapping[str, Any]) -> bool:
    count = config.get("num_hidden_layers", 40)
    return isinstance(count, int) and len(_carrying(config, count)) < count


def _unblocked(config: Mapping[str, Any]) -> bool:
    given = [config.get(key) for key in _BLOCK_KEYS]
    return None in given and (_attends(config) or any(one is not None for one in given))


def _rotated(config: Mapping[str, Any]) -> int:
    rope = config.get("rope_parameters") or {}
    part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    head = config.get("head_dim", 256)
    return int(head * (1.0 if part is None else part)) if isinstance(head, int) else 0


def _narrow(config: Mapping[str, Any]) -> bool:
    width = config.get("indexer_head_dim")
    return isinstance(width, int) and _rotated(config) > width


def _uneven(config: Mapping[str, Any]) -> bool:
    budget, rate = config.get("indexer_budget"), config.get("indexer_compress_ratio")
    return isinstance(budget, int) and isinstance(rate, int) and rate > 0 and budget % rate != 0


QWEN4_EXP_TEXT = Family(
    query_gate=True,
    hyper_streams=("hc_count", 4),
    mixture_rank=("hc_lowrank", 320),
    parts=(
        GatedDeltaTraits(attending_words=("indexed_attention", "full_attention")),
        NgramTraits(among=_carrying),
        IndexerTraits(
            kinds=_kinds,
            sizes={
                "index_n_heads": "indexer_n_heads",
                "index_head_dim": "indexer_head_dim",
                "index_topk": "indexer_budget",
            },
            block_key="indexer_compress_ratio",
            rotated=_rotated,
        ),
    ),
    experts=Experts(
        shared="shared_expert",
        count=("num_experts", 512),
        per_token=("num_experts_per_tok", 10),
        width=("moe_intermediate_size", 512),
        shared_width=("shared_expert_intermediate_size", 512),
        dense_width=("moe_intermediate_size", 512),
    ),
    refusals=(
        Refusal(
            "indexer_n_heads",
            _unblocked,
            f"transformers builds no layer that attends without all of {', '.join(_BLOCK_KEYS)}: write them",
        ),
        Refusal(
            "indexer_kv_heads",
            lambda config: config.get("indexer_kv_heads") not in (None, 1),
            "transformers takes one key head of an indexer only: write 1",
        ),
        Refusal(
            "indexer_budget",
            _uneven,
            "indexer_budget % indexer_compress_ratio is not 0: an indexer chooses whole blocks of so many tokens",
        ),
        Refusal(
            "indexer_head_dim",
            _narrow,
            "it is less than head_dim x partial_rotary_factor, the part of the indexer's heads that is rotated",
        ),
        Refusal(
            "hc_count",
            lambda config: config.get("hc_count") == 1,
            "transformers takes 2 residual streams or more",
        ),
        Refusal(
            "output_gate_type",
            lambda config: (
                (config.get("output_gate_type") or config.get("hidden_act", "silu")) not in ("silu", "sigmoid")
            ),
            "output_gate_type, or else hidden_act, gates what layers with a state give: transformers takes silu "
            "and sigmoid",
        ),
    ),
)
