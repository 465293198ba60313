"""Tensors that published files store under other names than the model's, or expert by expert.

transformers renames and stacks them while it loads; here only the slices that a rank needs are read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

_BACKBONE = "backbone."
"""What stands for `model.` in files of Nemotron-H."""

Opener = Callable[[str], Any]
"""From the name of a stored tensor to its safetensors slice."""

_RENAMED = (
    (r"^lm_head\.weight$", "embed_out.weight"),
    (r"\.mlp\.(gate|router)\.weight$", ".block_sparse_moe.gate.weight"),
    (r"\.mlp\.e_score_correction_bias$", ".block_sparse_moe.e_score_correction_bias"),
    (r"\.mlp\.gate\.e_score_correction_bias$", ".mlp.e_score_correction_bias"),
    (r"\.block_sparse_moe\.router\.weight$", ".block_sparse_moe.router.layer.weight"),
    (r"\.experts\.gate_up_proj$", ".input_linear.weight"),
    (r"\.experts\.down_proj$", ".output_linear.weight"),
    (r"\.experts\.gate_up_proj$", ".experts.fc1.weight"),
    (r"\.experts\.down_proj$", ".experts.fc2.weight"),
    (r"\.mlp\.gate\.weight$", ".mlp.router.gate.weight"),
    (r"\.mlp\.gate\.moe_statics\.", ".mlp.moe_statics."),
    (r"\.mlp\.e_score_correction_bias$", ".mlp.expert_bias"),
    (r"\.mlp\.gate\.e_score_correction_bias$", ".mlp.experts.e_score_correction_bias"),
    (r"\.mlp\.gate\.e_score_correction_bias$", ".moe.router.expert_bias"),
    (r"\.mlp\.shared_experts\.", ".mlp.shared_mlp."),
    (r"\.mlp\.shared_experts\.", ".mlp.shared_expert."),
    (r"\.mlp\.post_mlp_layernorm\.weight$", ".post_mlp_layernorm.weight"),
    (r"\.post_mlp_layernorm\.weight$", ".post_ffn_norm.weight"),
    (r"\.post_self_attn_layernorm\.weight$", ".post_attn_norm.weight"),
    (r"\.self_attn\.sinks$", ".self_attn.softmax_offset"),
)
_EXPERTS = (
    # the model's name, where the experts lie, their parts in order
    (r"\.experts\.gate_up_proj$", ".experts.{}", ("gate_proj", "up_proj")),
    (r"\.experts\.up_proj$", ".experts.{}", ("up_proj",)),
    (r"\.experts\.down_proj$", ".experts.{}", ("down_proj",)),
    (r"\.experts\.gate_up_proj$", ".experts.{}", ("w1", "w3")),
    (r"\.experts\.down_proj$", ".experts.{}", ("w2",)),
    (r"\.mlp\.experts\.gate_up_proj$", ".block_sparse_moe.experts.{}", ("w1", "w3")),
    (r"\.mlp\.experts\.down_proj$", ".block_sparse_moe.experts.{}", ("w2",)),
)


def stored_as(name: str, stored: Collection[str], opened: Opener) -> tuple[Any, set[str]] | None:
    """The slice of a tensor under the model's name, and the stored tensors that it is made of; None: there is none."""
    if name in stored:
        return opened(name), {name}
    if name.startswith("model.") and any(one.startswith(_BACKBONE) for one in stored):
        return stored_as(_BACKBONE + name.removeprefix("model."), stored, opened)
    for pattern, replacement in _RENAMED:
        other = re.sub(pattern, replacement, name)
        if other != name and other in stored:
            return opened(other), {other}
    for pattern, place, parts in _EXPERTS:
        if not re.search(pattern, name):
            continue
        base = re.sub(pattern, place, name)
        rows: list[list[str]] = []
        while all(f"{base.format(len(rows))}.{part}.weight" in stored for part in parts):
            rows.append([f"{base.format(len(rows))}.{part}.weight" for part in parts])
        if rows:
            return StackedExperts([[opened(one) for one in row] for row in rows]), {one for row in rows for one in row}
    return None


class StackedExperts:
    """Many matrices as one [experts, rows, columns]; the rows of an expert's parts follow one another."""

    def __init__(self, experts: list[list[Any]]) -> None:
        self._experts = experts
        self._rows = [part.get_shape()[0] for part in experts[0]]

    def get_shape(self) -> list[int]:
        """As safetensors' slices have it."""
        return [len(self._experts), sum(self._rows), self._experts[0][0].get_shape()[1]]

    def __getitem__(self, index: Any) -> Tensor:
        """The experts, rows and columns of the given slices; only they are read."""
        held, rows, columns = (*(index if isinstance(index, tuple) else (slice(None),)), slice(None), slice(None))[:3]
        start, stop, _ = rows.indices(sum(self._rows))
        return torch.stack([self._expert(parts, start, stop, columns) for parts in self._experts[held]])

    def _expert(self, parts: list[Any], start: int, stop: int, columns: slice) -> Tensor:
        pieces, offset = [], 0
        for part, size in zip(parts, self._rows, strict=True):
            first, last = max(start - offset, 0), min(stop - offset, size)
            if first < last:
                pieces.append(part[first:last, columns])
            offset += size
        return torch.cat(pieces)
