"""The arguments that every implementation of attention over ranks takes; `ring_attention` says what they mean."""

from __future__ import annotations

from typing import TypedDict

import torch.distributed as dist
from torch import Tensor

from parcompile.layout.sequence import CpLayout

from .packing import Documents


class AttentionOptions(TypedDict, total=False):
    """Keyword arguments, all of them optional."""

    group: dist.ProcessGroup | None
    layout: CpLayout | str
    causal: bool
    scale: float | None
    window: int | None
    documents: Documents | None
    per_document: bool
    sinks: Tensor | None
    softcap: float | None
    alibi_slopes: Tensor | None
    bias: Tensor | None
    dropout: float
    dropout_seed: int | None
    first_row: int
    first_head: int


class RingOptions(AttentionOptions, total=False):
    """Those of the ring."""

    inner_ranks: int | None
