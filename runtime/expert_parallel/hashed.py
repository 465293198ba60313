"""Routers that look the experts of a token up by its number (the first layers of DeepSeek-V4).

Models hand them the numbers of tokens from the embedding on. A stage of a pipeline begins with hidden states: its
routers get the numbers from the micro-batch, which every stage has.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from parcompile.model.families import FAMILIES
from parcompile.runtime.errors import RunError
from parcompile.runtime.groups import Mesh
from parcompile.runtime.micro_batch import current

TABLE = "tid2eid"
"""What transformers calls the experts of each token, [vocabulary, k]."""


def hand_tokens(model: nn.Module, mesh: Mesh) -> None:
    """Hands the numbers of tokens to these routers of the layers that this rank holds."""
    moe, family = mesh.plan.spec.model.shape.moe, FAMILIES.get(mesh.plan.spec.model.shape.model_type)
    if moe is None or not moe.hashed or family is None or family.experts is None:
        return
    path, experts = mesh.plan.parameters.layer[0].name.partition(".{layer}")[0], family.experts
    for number, layer in model.get_submodule(path).named_children():
        if int(number) in moe.hashed:
            router: Any = layer.get_submodule(f"{experts.block}.{experts.router}")
            router.register_forward_pre_hook(_with_tokens)


def _with_tokens(router: Any, args: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor]:
    hidden, tokens = args[0], current().tokens
    if tokens is None:
        raise RunError(
            f"a {type(router).__name__} looks experts up by the numbers of tokens: call the model with input_ids",
            everywhere=True,
        )
    return hidden, tokens


def warn_of_empty_tables(model: nn.Module) -> None:
    """Says so where the tables of experts are those that a class begins with: every token visits the first expert."""
    if any(not table.is_meta and not bool(table.any()) for table in _tables(model)):
        warnings.warn(
            f"{TABLE} is all zeros, as transformers begins it: every token visits expert 0 in these layers. Load "
            "weights that have it, or fill it before the model is injected",
            stacklevel=2,
        )


def draw_tables(model: nn.Module, experts: int, generator: torch.Generator) -> None:
    """Draws these tables anew: each token visits other experts."""
    for table in _tables(model):
        drawn = torch.rand(len(table), experts, generator=generator).argsort(1)
        table.copy_(drawn[:, : table.shape[1]])


def _tables(model: nn.Module) -> Iterator[Tensor]:
    return (buffer for name, buffer in model.named_buffers() if name.rpartition(".")[2] == TABLE)
