"""Head counts that attention modules keep for themselves: made those of this rank."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

QUERY_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "n_local_heads")
KEY_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_local_kv_heads", "kv_heads")
WIDTHS = ("embed_dim", "split_size", "kv_dim")
"""Widths of all heads together, by which fused projections are taken apart."""


def localise_heads(attention: nn.Module, heads: int, kv_heads: int) -> None:
    """Corrects the counts that `attention` was built with; `heads` and `kv_heads` are those of this rank.

    It also gets a copy of its configuration with these counts, since some modules read them there; those whose layers
    have counts of their own read none.
    """
    module: Any = attention
    before = {name: vars(module).get(name) for name in (*QUERY_COUNTS, *KEY_COUNTS)}
    for names, count in ((QUERY_COUNTS, heads), (KEY_COUNTS, kv_heads)):
        for name in names:
            if isinstance(vars(module).get(name), int):
                setattr(module, name, count)
    _localise_widths(module, before, heads, kv_heads)
    for name in ("num_key_value_groups", "n_rep"):
        if isinstance(vars(module).get(name), int):
            setattr(module, name, heads // kv_heads)
    config = vars(module).get("config")
    if not getattr(config, "is_heterogeneous", False) and hasattr(config, "num_attention_heads"):
        width = getattr(module, "head_dim", None)
        local = copy.copy(config)
        local.num_attention_heads = heads
        if getattr(config, "num_key_value_heads", None) is not None:
            local.num_key_value_heads = kv_heads
        computed = isinstance(getattr(type(config), "head_dim", None), property)
        if isinstance(width, int) and hasattr(config, "head_dim") and not computed:
            local.head_dim = width
        module.config = local


def _localise_widths(module: Any, before: dict[str, Any], heads: int, kv_heads: int) -> None:
    """Makes widths of all heads those of this rank's heads; `before` are the counts of the whole module."""
    queries = next((before[name] for name in QUERY_COUNTS if isinstance(before[name], int)), None)
    keys = next((before[name] for name in KEY_COUNTS if isinstance(before[name], int)), queries)
    for name in WIDTHS:
        whole, local = (keys, kv_heads) if name == "kv_dim" else (queries, heads)
        width = vars(module).get(name)
        if whole and isinstance(width, int) and width % whole == 0:
            setattr(module, name, width // whole * local)
