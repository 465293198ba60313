"""What attention modules keep of all heads, made that of this rank's: counts, and a norm over all heads."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parcompile.runtime.collectives import copy_to_group, reduce_from_group

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


class SpreadRMSNorm(nn.Module):
    """RMSNorm over a width of which each rank holds a slice: [.., W/tp] to [.., W/tp].

    The squares are summed over the ranks; in backward so is what each rank's slice contributes to their gradient. Where
    `replicas` ranks hold the same slice, it counts once.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        epsilon: float,
        width: int,
        group: dist.ProcessGroup,
        replica_group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__()
        self.weight, self.epsilon, self.width = weight, epsilon, width
        self.group, self.replica_group = group, replica_group
        self.replicas = 1 if replica_group is None else dist.get_world_size(replica_group)

    def forward(self, x: Tensor) -> Tensor:
        """Computed in float32, as Hugging Face's norms are."""
        wide = x.float()
        squares = copy_to_group(reduce_from_group(wide.square().sum(-1, keepdim=True), self.group), self.group)
        wide = wide * torch.rsqrt(squares / (self.width * self.replicas) + self.epsilon)
        return (copy_to_group(self.weight, self.replica_group) * wide).to(x.dtype)

    def extra_repr(self) -> str:
        """The whole width, and the slice."""
        return f"{self.width}, held={self.weight.numel()}, eps={self.epsilon}"
