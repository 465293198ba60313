"""Head counts that attention modules keep for themselves: made those of this rank."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

QUERY_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "n_local_heads")
KEY_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_local_kv_heads")


def localise_heads(attention: nn.Module, heads: int, kv_heads: int) -> None:
    """Corrects the counts that `attention` was built with; `heads` and `kv_heads` are those of this rank.

    It also gets a copy of its configuration with these counts, since some modules read them there.
    """
    module: Any = attention
    for names, count in ((QUERY_COUNTS, heads), (KEY_COUNTS, kv_heads)):
        for name in names:
            if isinstance(vars(module).get(name), int):
                setattr(module, name, count)
    for name in ("num_key_value_groups", "n_rep"):
        if isinstance(vars(module).get(name), int):
            setattr(module, name, heads // kv_heads)
    config = vars(module).get("config")
    if hasattr(config, "num_attention_heads"):
        width = getattr(module, "head_dim", None)
        local = copy.copy(config)
        local.num_attention_heads = heads
        if getattr(config, "num_key_value_heads", None) is not None:
            local.num_key_value_heads = kv_heads
        if isinstance(width, int) and hasattr(config, "head_dim"):
            local.head_dim = width
        module.config = local
