"""Tables of positions: each rank adds the rows of its own tokens.

Under sequence parallelism the token embedding gives a rank its share of the sequence, where the table gives a row for
each token that the context-parallel rank has: the share is cut from them, and the gradient of a learned table is a
part.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parcompile.runtime.collectives import group_rank, group_size
from parcompile.runtime.micro_batch import current

from .regions import SEQUENCE_DIM, Region

_Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


def share_positions(model: nn.Module, base: str, name: str, region: Region) -> None:
    """Cuts what the table `name` of the base model gives to this rank's share of the sequence.

    Base models that reshape their hidden states by the shape of the tokens are called with the looked-up tokens. A
    table that is a buffer is indexed by the positions of the share.
    """
    if not region.sequence_parallel:
        return
    inner: Any = model.get_submodule(base)
    if name in dict(inner.named_buffers(recurse=False)):
        inner.register_forward_pre_hook(
            lambda _, args, kwargs: (args, {**kwargs, "position_ids": _share(_positions(kwargs), region)}),
            with_kwargs=True,
        )
        return

    def share(_: nn.Module, __: Any, rows: Tensor) -> Tensor:
        # A stage that another one precedes adds nothing.
        return rows if rows.dim() == 0 else _share(rows, region)

    inner.get_submodule(name).register_forward_hook(share)
    inner.register_forward_pre_hook(_looked_up, with_kwargs=True)


def write_to_copies(model: nn.Module, base: str) -> None:
    """Calls a base model that scales its embeddings in place with a copy of them.

    What a collective returns, or a stage receives, is not to be written to.
    """

    def look_up(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        args, kwargs = _looked_up(module, args, kwargs)
        return args, {**kwargs, "inputs_embeds": kwargs["inputs_embeds"].clone()}

    model.get_submodule(base).register_forward_pre_hook(look_up, with_kwargs=True)


def _looked_up(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
    """What a base model is called with, its tokens looked up."""
    tokens = args[0] if args else kwargs.get("input_ids")
    if tokens is None:
        return args, kwargs
    others = {key: value for key, value in kwargs.items() if key != "input_ids"}
    return (None, *args[1:]), {**others, "inputs_embeds": module.get_input_embeddings()(tokens)}


def _positions(kwargs: dict[str, Any]) -> Tensor:
    """Of the tokens of this cp rank [1 or B, S]."""
    given: Tensor | None = kwargs.get("position_ids")
    return torch.arange(current().sequence_length or 0).unsqueeze(0) if given is None else given


def _share(rows: Tensor, region: Region) -> Tensor:
    """This rank's share of rows [B, S, ...], zeros where the sequence is continued."""
    size, rank = group_size(region.group), group_rank(region.group)
    length = -(-rows.shape[SEQUENCE_DIM] // size)
    behind = (rows.dim() - SEQUENCE_DIM - 1) * (0, 0)
    rows = F.pad(rows, (*behind, 0, length * size - rows.shape[SEQUENCE_DIM]))
    return rows.narrow(SEQUENCE_DIM, rank * length, length)
