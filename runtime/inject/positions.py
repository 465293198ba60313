"""Learned tables of positions: each rank adds the rows of its own tokens.

Under sequence parallelism the token embedding gives a rank its share of the sequence, where the table gives a row for
each token that the context-parallel rank has: the share is cut from them, and the gradient of the table is a part.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from parcompile.runtime.collectives import group_rank, group_size

from .regions import SEQUENCE_DIM, Region


def share_positions(model: nn.Module, base: str, name: str, region: Region) -> None:
    """Cuts what the table `name` of the base model gives to this rank's share of the sequence.

    Base models that reshape their hidden states by the shape of the tokens are called with the looked-up tokens.
    """
    if not region.sequence_parallel:
        return
    inner: Any = model.get_submodule(base)

    def share(_: nn.Module, __: Any, rows: Tensor) -> Tensor:
        if rows.dim() == 0:
            return rows  # of a stage that another one precedes
        size, rank = group_size(region.group), group_rank(region.group)
        length = -(-rows.shape[SEQUENCE_DIM] // size)
        rows = F.pad(rows, (0, 0, 0, length * size - rows.shape[SEQUENCE_DIM]))
        return rows.narrow(SEQUENCE_DIM, rank * length, length)

    inner.get_submodule(name).register_forward_hook(share)

    def look_up(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tokens = args[0] if args else kwargs.get("input_ids")
        if tokens is None:
            return args, kwargs
        others = {key: value for key, value in kwargs.items() if key != "input_ids"}
        return (None, *args[1:]), {**others, "inputs_embeds": module.get_input_embeddings()(tokens)}

    inner.register_forward_pre_hook(look_up, with_kwargs=True)
