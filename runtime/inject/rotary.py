"""Rotary embeddings that choose their frequencies by the length of the text, each document by its own.

`longrope` and `dynamic` of Hugging Face look at the largest position that they are given, and `dynamic` keeps what a
longer text has left. Among packed documents all would take the frequencies of the longest; of the ranks of a sequence
each would take those of its own tokens; and a step would depend on the steps before it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parcompile.runtime.micro_batch import current

from .ring_place import RingPlace, token_order

_Angles = Tensor | tuple[Tensor, ...]
"""Cosines and sines [B, S, D], or both in one."""


def rotate_by_document(model: nn.Module, place: RingPlace) -> None:
    """Lets each such embedding take the whole length of each document of the micro-batch."""
    for module in embeddings_by_length(model):
        module.forward = _ByDocument(module, place)


def embeddings_by_length(model: nn.Module) -> Iterator[nn.Module]:
    """The rotary embeddings of a model whose frequencies, or whose scale, depend on the length of a text."""
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        named = kinds if isinstance(kinds, Mapping) else {None: kinds}
        if kinds and any(_depends_on_length(module, kind, layer_type) for layer_type, kind in named.items()):
            yield module


def _depends_on_length(module: nn.Module, kind: str, layer_type: str | None) -> bool:
    # Phi-MoE scales by the length whatever its frequencies follow.
    return "dynamic" in kind or kind == "longrope" or "long_mscale" in _parameters(module, layer_type)


def _parameters(module: Any, layer_type: str | None) -> Mapping[str, Any]:
    found = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
    return (found if layer_type is None else found.get(layer_type)) or {}


class _ByDocument:
    """Calls an embedding once for all documents that have the same frequencies."""

    def __init__(self, module: Any, place: RingPlace) -> None:
        self._module, self._place, self._right = module, place, module.forward

    def __call__(self, hidden: Tensor, position_ids: Tensor, layer_type: str | None = None) -> _Angles:
        one = () if layer_type is None else (layer_type,)
        self._begin_anew(layer_type)
        if current().alone:  # tokens of generation, which follow those that a cache has kept
            alone: _Angles = self._right(hidden, position_ids, *one)
            return alone
        found: _Angles | None = None
        for last, chosen in self._documents(position_ids, layer_type):
            longer = torch.cat([position_ids.minimum(last), last.expand(*position_ids.shape[:-1], 1)], -1)
            angles = _each(lambda one: one[..., :-1, :], self._right(hidden, longer, *one))
            found = angles if found is None else _where(chosen, angles, found)
        assert found is not None
        return found

    def _documents(self, positions: Tensor, layer_type: str | None) -> Iterator[tuple[Tensor, Tensor | None]]:
        """The last position of documents of the same frequencies, and which tokens are theirs or of longer ones.

        Tokens [1 or B, S]; None: all of them.
        """
        batch = current()
        if batch.packing is None and batch.documents is None:
            last = positions.max().view(1)
            if self._place.group is not None:
                dist.all_reduce(last, dist.ReduceOp.MAX, group=self._place.group)
            yield last, None
            return
        lengths = (
            batch.packing.lengths
            if batch.packing is not None
            else [stop - start for row in batch.documents or () for start, stop in itertools.pairwise(row)]
        )
        by_frequencies: dict[tuple[int, bool], list[int]] = {}
        for length in sorted(set(lengths)):
            by_frequencies.setdefault(self._frequencies(length, layer_type), []).append(length)
        for number, same in enumerate(by_frequencies.values()):
            chosen = None
            if number:  # they are sorted: what is left has these frequencies, or those of longer documents
                order = token_order(self._place, positions.shape[-1], 0, positions.device)
                chosen = order.lengths >= same[0]
            yield positions.new_full((1,), same[-1] - 1), chosen

    def _frequencies(self, length: int, layer_type: str | None) -> tuple[int, bool]:
        """Documents for which this is equal have the same."""
        parameters, kinds = _parameters(self._module, layer_type), self._module.rope_type
        kind = kinds if layer_type is None else kinds[layer_type]
        original = parameters.get("original_max_position_embeddings")
        grown = max(length, self._module.original_max_seq_len) if "dynamic" in kind else 0
        return grown, original is not None and length > original

    def _begin_anew(self, layer_type: str | None) -> None:
        """Forgets the longest text so far, for which `dynamic` keeps its frequencies."""
        module, prefix = self._module, "" if layer_type is None else f"{layer_type}_"
        # A number until a text is longer, and a tensor then, whose value nobody has to wait for.
        if isinstance(getattr(module, f"{prefix}max_seq_len_cached", None), Tensor):
            setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)
            setattr(module, f"{prefix}inv_freq", getattr(module, f"{prefix}original_inv_freq").clone())


def _each(change: Callable[[Tensor], Tensor], angles: _Angles) -> _Angles:
    return change(angles) if isinstance(angles, Tensor) else tuple(map(change, angles))


def _where(chosen: Tensor | None, these: _Angles, others: _Angles) -> _Angles:
    assert chosen is not None
    if isinstance(these, Tensor):
        assert isinstance(others, Tensor)
        return torch.where(chosen[..., None], these, others)
    return tuple(torch.where(chosen[..., None], one, other) for one, other in zip(these, others, strict=True))
