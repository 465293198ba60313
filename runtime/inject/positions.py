"""How positions reach a model: tables, rotary frequencies, and queries scaled by their place.

Under sequence parallelism the token embedding gives a rank its share of the sequence, where the table gives a row for
each token that the context-parallel rank has: the share is cut from them, and the gradient of a learned table is a
part.

`longrope` and `dynamic` of Hugging Face look at the largest position that they are given, and `dynamic` keeps what a
longer text has left. Among packed documents all would take the frequencies of the longest; of the ranks of a sequence
each would take those of its own tokens; and a step would depend on the steps before it.

transformers counts the places of a row on its own in each call; here they are counted in each document, over all
context-parallel ranks.

Source: `Llama4TextAttention` of transformers 5.23.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from parcompile.runtime.micro_batch import current
from parcompile.runtime.transport import group_rank, group_size

from .regions import SEQUENCE_DIM, Call, Region
from .ring_place import RingPlace, token_order


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

    def look_up(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        args, kwargs = _looked_up(module, args, kwargs)
        return args, {**kwargs, "inputs_embeds": kwargs["inputs_embeds"].clone()}

    model.get_submodule(base).register_forward_pre_hook(look_up, with_kwargs=True)


def _looked_up(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
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


_TUNED = "parcompile_temperature"


def take_temperatures(model: nn.Module) -> None:
    """Takes the scaling of queries out of the layers that scale them by their place, for `tempered`."""
    for own in scaled_by_place(model):
        own.attn_temperature_tuning = False
        setattr(own, _TUNED, (float(own.floor_scale), float(own.attn_scale)))


def scaled_by_place(model: nn.Module) -> list[Any]:
    """The attentions of a model that scale their queries by their place in a row, whatever its documents."""
    return [
        module
        for module in model.modules()
        if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True)
    ]


def tempered(module: nn.Module, query: Tensor, place: RingPlace) -> Tensor:
    """The query [B, H, S, D] scaled by its place in its document, where the layer does so."""
    tuned = getattr(module, _TUNED, None)
    if tuned is None:
        return query
    if current().alone:
        positions = torch.arange(query.shape[2]).unsqueeze(0)
    else:
        order = token_order(place, query.shape[2], 0, query.device)
        positions = order.places - order.starts
    floor, scale = tuned
    factors = torch.log1p(torch.floor((positions.to(query.device).float() + 1.0) / floor)) * scale + 1.0
    scaled: Tensor = (query * factors[:, None, :, None]).to(query.dtype)
    return scaled


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
        # Phi-MoE scales by the length whatever its frequencies follow.
        if kinds and any(
            "dynamic" in kind or kind == "longrope" or "long_mscale" in _parameters(module, layer_type)
            for layer_type, kind in named.items()
        ):
            yield module


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
            angles: _Angles = tree_map(lambda one: one[..., :-1, :], self._right(hidden, longer, *one))
            if found is not None:
                assert chosen is not None
                angles = tree_map(functools.partial(torch.where, chosen[..., None]), angles, found)
            found = angles
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
