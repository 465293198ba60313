"""What layers that carry a state, and those that choose keys, keep for backward and hold while they work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from parcompile.layout.pipeline import Stage
from parcompile.model import within
from parcompile.model.blocks.delta import KimiDelta
from parcompile.model.blocks.indexer import Indexer
from parcompile.model.blocks.lightning import Lightning
from parcompile.model.blocks.mamba1 import Mamba1
from parcompile.model.blocks.mamba2 import Mamba2
from parcompile.model.blocks.recurrent import STATE_BYTES, Recurrent
from parcompile.model.blocks.short_convolution import ShortConvolution
from parcompile.model.compressed_keys import CompressedKeys, KeyChoice
from parcompile.model.shape import ModelShape

from .activations import LayerBytes
from .blocks import compressed_layers, gathered_bytes, handed_bytes
from .workload import Workload

INDEX_BYTES = 4
"""A chosen key is an int32."""

SCORES_AT_ONCE = 2**24
"""Scores of an indexer that the runtime has in memory at a time."""


def scoring_bytes(work: Workload, stage: Stage) -> float:
    """What an indexer holds while it scores: its scores in fp32, and what is left of them above zero.

    Each row of a batch is scored alone. Of compressed keys this is scaled, too, in a tensor of its own.
    """
    indexer = work.shape.part(Indexer)
    if work.shape.heads.low_rank is not None:
        length, queries = work.sequence_length, work.sequence_length // work.cp
        scored = (queries * choice.heads * keys.count(length) for _, keys, choice in _choices(work.shape, stage.layers))
        return 3.0 * 4 * min(SCORES_AT_ONCE, max(scored, default=0))
    if indexer is None or not within(indexer.layers, stage.layers):
        return 0.0
    if indexer.block:  # what each query sees, twice
        return 2.0 * work.local_tokens * work.sequence_length
    queries = work.local_tokens // work.micro_batch
    return 2 * 4 * min(SCORES_AT_ONCE, queries * indexer.heads * indexer.scored(work.sequence_length))


def choice_bytes(work: Workload, stage: Stage) -> float:
    """What the layers of a stage keep for backward of one micro-batch: what hides keys; recomputed, the choice."""
    if work.shape.heads.low_rank is not None:
        return _compressed_bytes(work, stage)
    indexer = work.shape.part(Indexer)
    if indexer is None:
        return 0.0
    if not work.recomputes_layers:
        return hiding_bytes(work, stage) * len(within(indexer.attending, stage.layers))
    # The places of chosen pools are padded to as many as there may be, with the rest of a pool behind them.
    most = indexer.top_k + indexer.pool - 1 if indexer.pool else min(indexer.top_k, work.sequence_length)
    # Of blocks what each query sees is kept, a byte for each key.
    chosen = work.sequence_length if indexer.block else INDEX_BYTES * most
    return float(work.local_tokens * chosen * len(within(indexer.layers, stage.layers)))


def hiding_bytes(work: Workload, stage: Stage) -> float:
    """What hides keys from the queries of one layer: of compressed keys the most, of later windows too."""
    length, indexer = work.sequence_length, work.shape.part(Indexer)
    hidden = float(length) if indexer is not None and within(indexer.attending, stage.layers) else 0.0
    if work.shape.heads.low_rank is not None:
        hidden = max((keys.count(length) for _, keys, _ in compressed_layers(work.shape, stage.layers)), default=0.0)
    return work.local_tokens * work.element_bytes * hidden


def _choices(shape: ModelShape, layers: range) -> Iterator[tuple[int, CompressedKeys, KeyChoice]]:
    """The same of those among whose compressed keys an indexer chooses."""
    of_kinds = compressed_layers(shape, layers)
    return ((count, keys, keys.choice) for count, keys, _ in of_kinds if keys.choice is not None)


def _compressed_bytes(work: Workload, stage: Stage) -> float:
    """What hides compressed keys, of later windows and such as were not chosen, and the keys of other ranks' windows.

    Recomputed, the choice of each layer. A choice is of 64-bit numbers.
    """
    length, others = work.sequence_length, gathered_bytes(work, stage.layers)
    if not work.recomputes_layers:
        hiding = sum(count * keys.count(length) for count, keys, _ in compressed_layers(work.shape, stage.layers))
        return others + work.local_tokens * work.element_bytes * hiding
    chosen = sum(
        count * min(choice.top_k, keys.count(length)) for count, keys, choice in _choices(work.shape, stage.layers)
    )
    return others + work.local_tokens * 2 * INDEX_BYTES * chosen


def chunks_in_turn(work: Workload) -> int:
    """What the recurrence of a layer takes one after the other on a rank; 0 where no layer carries a state."""
    if (one := work.shape.part(Recurrent)) is None:
        return 0
    pieces = 2 if work.cp > 1 and work.cp_layout == "zigzag" else 1
    return pieces * -(-work.sequence_length // (work.cp * pieces * one.chunk))


def kept_bytes(work: Workload) -> float:
    """What such a layer of transformers keeps of a micro-batch for its backward pass, the block's input left out.

    Counted in transformers' own functions with autograd's hooks for saved tensors: of each token 4 numbers of each key
    in the type of the weights; of each head 8 fp32 numbers of each key, 6 fp32 ones and 5 in the type of the weights of
    each value, and 5 rows of the chunk with 9 numbers; and a state of each chunk. Pieces are padded to whole chunks.
    """
    one = work.shape.part(Recurrent)
    if one is None:
        return 0.0
    width, pieces = work.element_bytes, 2 if work.cp > 1 and work.cp_layout == "zigzag" else 1
    length = -(-work.sequence_length // work.cp // pieces)
    if isinstance(one, ShortConvolution):
        # Counted the same way: 7 numbers of each channel, in the type of the weights.
        return work.micro_batch * pieces * length * 7 * width * one.values / work.tp
    if isinstance(one, Mamba1):
        return _kept_by_mamba1(work, one, work.micro_batch * pieces * length)
    if isinstance(one, Mamba2):
        return _kept_by_mamba2(work, one, work.micro_batch * pieces * -(-length // one.chunk) * one.chunk)
    chunk = one.chunk
    if isinstance(one, Lightning):
        # Counted the same way, in the runtime's functions: of each value 7 numbers in the type of the weights and 17
        # bytes in fp32, two scores with each token of its block, and a state of each block, once more and a quarter.
        chunk = min(chunk, length)
        of_head = (7 * width + 17) * one.value_dim + 8 * chunk + 5 * one.key_dim * one.value_dim / chunk
        of_head += 8 * one.key_dim if work.cp > 1 else 0  # what reads a received state
        return work.micro_batch * pieces * length * one.heads * of_head / work.tp
    tokens = work.micro_batch * pieces * -(-length // chunk) * chunk
    values = one.value_dim + (one.key_dim if work.cp > 1 else 0)
    if isinstance(one, KimiDelta):
        # Counted the same way: three numbers of each channel with each token of the chunk, 59 bytes and two numbers in
        # the type of the weights, times 4, of each key, 6 fp32 numbers of each value; of each row of the chunk's system
        # the rows before it; and a state of each chunk.
        of_head = (12 * chunk + 59 + 8 * width) * one.key_dim + 24 * values + STATE_BYTES * one.key_dim * values / chunk
        of_head += 4 * (chunk - 1) * (2 * chunk - 1) / 6 + 750
        return tokens * one.heads * of_head / work.tp
    of_token: float = 4 * width * one.keys + one.heads * (32 * one.key_dim + 4 * (5 * chunk + 9))
    of_token += one.heads * (24 * values + 5 * width * one.value_dim)
    # Where a piece may receive a state, its values and its output too have these columns: half of the pieces' worth.
    of_token += 4 * one.heads * values if work.cp > 1 else 0
    of_token += STATE_BYTES * one.heads * one.key_dim * values / chunk
    return tokens * of_token / work.tp


def backward_bytes(work: Workload) -> float:
    """What the backward pass of such a layer makes, and lets go of at its end.

    Of a Mamba-1 layer, whose scan in transformers goes token by token: the gradients of all discrete A and of what is
    written to the states, in fp32, and of both those of one token among zeros; for one piece at a time. Of Kimi delta
    attention the gradient of what each channel of a key has with each token of its chunk, in fp32: the sum, what is
    added to it and what comes of it. Of other layers nothing is counted.
    """
    one = work.shape.part(Recurrent)
    if one is None or not isinstance(one, Mamba1 | KimiDelta):
        return 0.0
    pieces = 2 if work.cp > 1 and work.cp_layout == "zigzag" else 1
    length = -(-work.sequence_length // work.cp // pieces)
    if isinstance(one, KimiDelta):
        padded = work.micro_batch * -(-length // one.chunk) * one.chunk
        return 3.0 * STATE_BYTES * padded * one.heads * one.key_dim * one.chunk / work.tp
    tokens = work.micro_batch * length
    # The scan has let go of both tensors that a piece makes of a received state.
    return (4.0 - 2 * (work.cp > 1)) * STATE_BYTES * tokens * one.state_numel / work.tp


def let_go_bytes(work: Workload, stage: Stage, dense: LayerBytes, sparse: LayerBytes, largest: LayerBytes) -> float:
    """What the layers of a stage behind the last one that carries a state have kept, and that one's MLP.

    When it runs backward they have let go of it. With full recomputation it is the MLP alone, of the `largest` layer.
    """
    recurrent = work.shape.part(Recurrent)
    if recurrent is None or work.shape.stack.blocks is not None or recurrent.beside_attention:
        return 0.0
    if work.recomputes_layers:
        entered = largest.gathered / work.shape.blocks_per_layer * (largest.mlp > 0)
        return (largest.mlp + entered) * work.local_tokens
    last = within(recurrent.layers, stage.layers)[-1]
    behind = range(last + 1, stage.layers.stop)
    routed = work.shape.routed(range(last, stage.layers.stop))
    mlps = routed * sparse.mlp + (len(behind) + 1 - routed) * dense.mlp
    of_whole = len(behind) * (dense.attention + dense.gathered) + mlps
    choice = choice_bytes(work, replace(stage, layers=behind)) if work.framework == "deepspeed" else 0.0
    return of_whole * work.local_tokens + len(behind) * dense.stream * work.split_tokens + choice


def _kept_by_mamba1(work: Workload, one: Mamba1, tokens: int) -> float:
    """Counted the same way.

    Of each token and channel its discrete A and B and its state in fp32, that state once more in a narrower type,
    3 fp32 numbers and 6 in the type of the weights; of each token what all channels share, and its norms.
    """
    width, state = work.element_bytes, one.key_dim
    of_channel = 3 * STATE_BYTES * state + (width * state if width < STATE_BYTES else 0) + 12 + 6 * width
    if work.cp > 1:
        # What is left of a received state behind each token, its product with that state, and step sizes in fp32.
        of_channel += 2 * STATE_BYTES * state + 12
    shared = (12 + 3 * width) * state + (4 + 2 * width) * one.step_rank + 12
    return tokens * (of_channel * one.values / work.tp + shared)


def _kept_by_mamba2(work: Workload, one: Mamba2, tokens: int) -> float:
    """Counted the same way.

    Of each token what is projected, the channels before their activation and the output in the type of the weights; of
    each head 5 fp32 numbers of each state feature, 10 of each value (7 without a norm), 3 rows of the chunk and some of
    its own; and of each chunk two states.
    """
    width, heads = work.element_bytes, one.heads / work.tp
    channels = one.channels_of_rank(work.tp)
    of_token = width * (channels + 2 * one.values / work.tp + heads + channels)
    of_head: float = 4 * (5 * one.key_dim + _kept_values(one) * one.value_dim + 3 * one.chunk + 4) + 2 * width
    of_head += 2 * STATE_BYTES * one.key_dim * one.value_dim / one.chunk
    if work.cp > 1:
        # What each token reads of a received state, for its heads, and what that adds.
        of_head += 4 * (2 * one.key_dim + one.value_dim + 2)
    return tokens * (of_token + heads * of_head)


def _kept_values(one: Mamba2) -> int:
    """Fp32 numbers of each value that a Mamba-2 layer keeps."""
    return 10 if one.gated_norm else 7


def forward_bytes(work: Workload) -> float:
    """What the scan of a Mamba-2 layer holds at its end beyond what the layer keeps; of other layers 0.

    Its function holds two more fp32 numbers of each state feature, 11 of each value, where the layer goes on to keep 10
    or 7, and a state of each chunk; its caller the channels behind their activation, but not yet the output. One piece
    is scanned at a time.
    """
    one = work.shape.part(Recurrent)
    if one is None or not isinstance(one, Mamba2):
        return 0.0
    pieces = 2 if work.cp > 1 and work.cp_layout == "zigzag" else 1
    length = -(-work.sequence_length // work.cp // pieces)
    of_heads: float = 4 * (2 * one.key_dim + (11 - _kept_values(one)) * one.value_dim)
    of_heads += STATE_BYTES * one.key_dim * one.value_dim / one.chunk
    beyond_output = one.channels_of_rank(work.tp) - one.values / work.tp
    of_token = one.heads * of_heads / work.tp + pieces * work.element_bytes * beyond_output
    return work.micro_batch * -(-length // one.chunk) * one.chunk * of_token


def exchanged_bytes(work: Workload) -> float:
    """What recomputation finds again of a layer and micro-batch: the states and halos that its pieces received."""
    if work.cp == 1 or (one := work.shape.part(Recurrent)) is None:
        return 0.0
    return (2 if work.cp_layout == "zigzag" else 1) * sum(handed_bytes(work, one))
