"""Head counts that attention modules keep for themselves: made those of this rank."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

_QUERY_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_KEY_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")


def localise_heads(attention: nn.Module, heads: int, kv_heads: int) -> None:
    """Corrects the counts that `attention` was built with; `heads` and `kv_heads` are those of this rank.

    Its configuration too is its own from here on: some modules look counts up there.
    """
    module: Any = attention
    for names, count in ((_QUERY_COUNTS, heads), (_KEY_COUNTS, kv_heads)):
        for name in names:
            if isinstance(vars(module).get(name), int):
                setattr(module, name, count)
    if isinstance(vars(module).get("num_key_value_groups"), int):
        module.num_key_value_groups = heads // kv_heads
    config = vars(module).get("config")
    if config is not None:
        width = getattr(module, "head_dim", None)
        local = copy.copy(config)
        local.num_attention_heads = heads
        if getattr(config, "num_key_value_heads", None) is not None:
            local.num_key_value_heads = kv_heads
        if isinstance(width, int) and hasattr(config, "head_dim"):
            local.head_dim = width
        module.config = local
