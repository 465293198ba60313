"""Embeddings of n-grams, which layers look up by hashes of neighbouring tokens (Qwen4-Exp).

transformers' own modules compute all but two things. Tokens are hashed here, with those before them that another rank
may have, within their document. And the convolution behind sees the tokens before a rank's own, of the same document.
The table of a layer is cut over tp by its rows.

Shapes: B rows, S tokens of this cp rank, s of them on a tp rank under sequence parallelism, T tokens of all cp ranks,
N heads of a table, D features of each, C features of all residual streams.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parcompile.model.blocks.ngrams import Ngrams
from parcompile.runtime.errors import everywhere
from parcompile.runtime.inject.regions import SEQUENCE_DIM, Call, Region
from parcompile.runtime.inject.ring_place import RingPlace, StatePlace, token_order
from parcompile.runtime.micro_batch import current
from parcompile.runtime.recurrent import convolve
from parcompile.runtime.ring_attention.passes import once
from parcompile.runtime.tensor_parallel import VocabParallelEmbedding

from .mechanism import Placed, refuse_generation


def look_ngrams_up(placed: Placed) -> None:
    """Cuts the tables of layers that have one, and looks up and convolves among the tokens of all ranks."""
    block = placed.shape.part(Ngrams)
    if block is None:
        return
    base = placed.model.get_submodule(placed.family.base)
    base.register_forward_pre_hook(_with_tokens, with_kwargs=True)
    place, states, region = RingPlace.of(placed.mesh), StatePlace.of(placed.mesh), placed.region
    for _, layer in placed.layers(block.layers):
        embedding: Any = layer.get_submodule("ple.ple_embedding")
        if region is not None:
            options = {**region.options, "sequence_dim": SEQUENCE_DIM}
            embedding.ngram_embedding = VocabParallelEmbedding.from_embedding(
                embedding.ngram_embedding, pad_sequence=True, **options
            )
        embedding.forward = functools.partial(_looked_up, embedding, place)
        ple: Any = layer.get_submodule("ple")
        ple._short_conv = functools.partial(_convolved, ple, block, states, region)


def _with_tokens(base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """The numbers of tokens, which a stage of a pipeline that begins with hidden states does not get otherwise."""
    refuse_generation("that adds embeddings of n-grams")
    if (tokens := current().tokens) is None:
        raise everywhere(
            f"a {type(base).__name__} looks n-grams up by the numbers of tokens: call the model with input_ids"
        )
    return args, {**kwargs, "ple_input_ids": tokens}


def _looked_up(embedding: Any, place: RingPlace, input_ids: Tensor, _: Any) -> Tensor:
    """[B, S] to [B, s, N D]."""
    found: Tensor = embedding.ngram_embedding(hashed(embedding, place, input_ids.long()))
    return found.flatten(-2)


def hashed(embedding: Any, place: RingPlace, tokens: Tensor) -> Tensor:
    """The rows of the n-grams that end at each token: [B, S] to [B, S, N].

    In front of a document, and before the last token that ends a text (`eos_token_id`), stand such tokens only.
    """
    order, end = token_order(place, tokens.shape[1], 0, tokens.device), embedding.eos_token_id
    (every,) = once(lambda: (order.gather(tokens, place.group),))
    mixed = tokens * embedding.layer_multipliers[0]
    inside, rows = torch.ones_like(tokens, dtype=torch.bool), []
    for shift in range(1, embedding.ngram_size):
        source = order.places - shift
        inside = inside & (source >= order.starts)
        before = torch.where(inside, every[:, source.clamp(min=0)], end)
        inside = inside & (before != end)
        mixed = torch.bitwise_xor(mixed, before * embedding.layer_multipliers[shift])
        heads = slice((shift - 1) * embedding.heads_per_ngram, shift * embedding.heads_per_ngram)
        sizes, offsets = embedding.ngram_heads_vocab_sizes[heads], embedding.ngram_heads_offsets[heads]
        rows.append(torch.remainder(mixed.unsqueeze(-1), sizes) + offsets)
    return torch.cat(rows, -1)


def _convolved(
    ple: Any, ngrams: Ngrams, states: StatePlace, region: Region | None, hidden_states: Tensor, _: Any
) -> Tensor:
    """[B, s, C] to the same, of tokens that see those before them in their document."""
    splits = region is not None and region.sequence_parallel
    whole = region.enter(hidden_states) if region is not None and splits else hidden_states

    def convolution(x: Tensor) -> Tensor:
        return F.silu(ple.conv1d(F.pad(x, (ngrams.seen, 0))))

    pieces = states.pieces(whole.shape[0], whole.shape[1])
    out = convolve(convolution, pieces, states.chain, whole.mT, ngrams.seen + 1).mT
    if region is None or not splits:
        return out
    share, rank = hidden_states.shape[1], torch.distributed.get_rank(region.group)
    own = out[:, rank * share : (rank + 1) * share]
    return F.pad(own, (0, 0, 0, share - own.shape[1]))
