"""What layers that carry a state cost: operations, kept bytes, and what goes through the chain of a sequence's pieces.

| quantity | formula, for one layer | source |
|---|---|---|
| operations of a token and head, forward | 6 K V + 2 c (2 K + V) + c (K + V) | chunkwise form, arXiv 2412.06464, 3.3 |
| the same of lightning attention | 4 K V + 2 c (K + V) | arXiv 2501.08313, 2.2 |
| the same of a short convolution, all channels | 2 n C | |
| of a Mamba-2 layer's token and head | 4 N P + 2 c (N + P) | arXiv 2405.21060, section 6 |
| of a Mamba-1 layer's token and channel | 8 N | arXiv 2312.00752, section 3: discrete A and B, state, C |
| message of a state | 4 b H K V bytes | the runtime keeps states in fp32 |
| message of a halo | w b C (n − 1) bytes | C channels and n tokens of the convolution |

c is the chunk, of 64 tokens (of `block_size` in lightning attention); three products with the state, scores of keys and
queries within the chunk, and a triangular system. A piece that receives a state computes with V + K columns in the
place of V: beside its output what each token reads of that state, beside its own state what is left of that one. In a
Mamba-2 layer, of N state features and chunks of its own, what each token reads of a received state takes 2 N P more.
"""

from __future__ import annotations

from dataclasses import replace

from parcompile.layout.stages import Stage
from parcompile.model.recurrent import RecurrentKind, RecurrentShape
from parcompile.model.shape import ModelShape

from .activations import LayerBytes
from .blocks import exchanges
from .indexer import choice_bytes
from .workload import Workload

STATE_BYTES = 4
"""Of an element of a state: fp32."""


def mixer_parameters(shape: ModelShape) -> int:
    """Parameters of such a layer, its MLP left out, that multiply each token."""
    one = shape.recurrent
    if one is None:
        return 0
    if one.kind is RecurrentKind.MAMBA1:
        return shape.hidden_size * 3 * one.values + one.values * (one.selected + one.step_rank)
    # Gates by way of a few features have a second projection.
    return shape.hidden_size * (one.projected + one.values) + 2 * one.gate_rank * one.values


def scan_flops_per_token(shape: ModelShape, *, carried: bool = False) -> float:
    """Forward operations of one layer's recurrence for a token of a whole sequence, or of one that goes on."""
    one = shape.recurrent
    if one is None:
        return 0.0
    keys, values = one.key_dim, one.value_dim + (one.key_dim if carried else 0)
    if one.kind is RecurrentKind.SHORT_CONVOLUTION:
        return 2.0 * one.kernel * one.channels
    if one.kind is RecurrentKind.MAMBA1:
        # What a token reads of a received state: its decay, an exponential, products with C and the state, a sum.
        return float(one.heads * one.key_dim * (13 if carried else 8))
    chunk = one.chunk
    if one.kind in (RecurrentKind.MAMBA2, RecurrentKind.LIGHTNING_ATTENTION):
        states = one.key_dim * one.value_dim * (6 if carried else 4)
        return float(one.heads * (states + 2 * chunk * (one.key_dim + one.value_dim)))
    return float(one.heads * (6 * keys * values + 2 * chunk * (2 * keys + values) + chunk * (keys + values)))


def state_bytes(work: Workload) -> int:
    """A state as one rank hands it to the next, for one layer and micro-batch."""
    one = work.shape.recurrent
    return 0 if one is None else work.micro_batch * STATE_BYTES * one.state_numel // work.tp


def halo_bytes(work: Workload) -> int:
    """What the convolution of the next piece sees of a piece, for one layer and micro-batch."""
    one = work.shape.recurrent
    if one is None:
        return 0
    return work.micro_batch * work.element_bytes * one.channels_of_rank(work.tp) * (one.kernel - 1)


def hops(work: Workload, cp_rank: int | None = None) -> int:
    """How often a rank hands them on in a layer and micro-batch, forward and backward; the busiest rank's by default.

    Every piece but the last hands on in forward, every one but the first in backward. With zigzag a rank has two, and
    those in the middle of the chain are neighbours on one rank.
    """
    if work.cp == 1:
        return 0
    pieces = 2 if work.cp_layout == "zigzag" else 1
    if cp_rank is None:
        return pieces * min(2, work.cp - 1)
    return pieces * ((cp_rank < work.cp - 1) + (cp_rank > 0))


def sent_over_cp(work: Workload, layers: range, cp_rank: int | None = None) -> tuple[int, int]:
    """Messages and bytes of a step's states and halos that a rank with these layers sends."""
    one = work.shape.recurrent
    if one is None:
        return 0, 0
    passes = one.count(layers) * work.micro_batches * hops(work, cp_rank)
    messages = passes * ((state_bytes(work) > 0) + (halo_bytes(work) > 0))
    size = passes * (state_bytes(work) + halo_bytes(work))
    for further, times in exchanges(work, layers, "cp"):
        if further.kind == "chain" and further.size:
            messages += times * hops(work, cp_rank)
            size += times * hops(work, cp_rank) * int(further.size)
    return messages, size


def kept_bytes(work: Workload) -> float:
    """What such a layer of transformers keeps of a micro-batch for its backward pass, the block's input left out.

    Counted in transformers' own functions with autograd's hooks for saved tensors: of each token 4 numbers of each key
    in the type of the weights; of each head 8 fp32 numbers of each key, 6 fp32 ones and 5 in the type of the weights of
    each value, and 5 rows of the chunk with 9 numbers; and a state of each chunk. Pieces are padded to whole chunks.
    """
    one = work.shape.recurrent
    if one is None:
        return 0.0
    width, pieces = work.element_bytes, 2 if work.cp > 1 and work.cp_layout == "zigzag" else 1
    length = -(-work.sequence_length // work.cp // pieces)
    if one.kind is RecurrentKind.SHORT_CONVOLUTION:
        # Counted the same way: 7 numbers of each channel, in the type of the weights.
        return work.micro_batch * pieces * length * 7 * width * one.values / work.tp
    if one.kind is RecurrentKind.MAMBA1:
        return _kept_by_mamba1(work, one, work.micro_batch * pieces * length)
    if one.kind is RecurrentKind.MAMBA2:
        return _kept_by_mamba2(work, one, work.micro_batch * pieces * -(-length // one.chunk) * one.chunk)
    chunk = one.chunk
    if one.kind is RecurrentKind.LIGHTNING_ATTENTION:
        # Counted the same way, in the runtime's functions: of each value 7 numbers in the type of the weights and 17
        # bytes in fp32, two scores with each token of its block, and a state of each block, once more and a quarter.
        chunk = min(chunk, length)
        of_head = (7 * width + 17) * one.value_dim + 8 * chunk + 5 * one.key_dim * one.value_dim / chunk
        of_head += 8 * one.key_dim if work.cp > 1 else 0  # what reads a received state
        return work.micro_batch * pieces * length * one.heads * of_head / work.tp
    tokens = work.micro_batch * pieces * -(-length // chunk) * chunk
    values = one.value_dim + (one.key_dim if work.cp > 1 else 0)
    if one.kind is RecurrentKind.KIMI_DELTA_ATTENTION:
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
    written to the states, in fp32, and those of one token among zeros; for one piece at a time. Of Kimi delta attention
    the gradient of what each channel of a key has with each token of its chunk, in fp32: the sum, what is added to it
    and what comes of it. Of other layers nothing is counted.
    """
    one = work.shape.recurrent
    if one is None or one.kind not in (RecurrentKind.MAMBA1, RecurrentKind.KIMI_DELTA_ATTENTION):
        return 0.0
    pieces = 2 if work.cp > 1 and work.cp_layout == "zigzag" else 1
    length = -(-work.sequence_length // work.cp // pieces)
    if one.kind is RecurrentKind.KIMI_DELTA_ATTENTION:
        padded = work.micro_batch * -(-length // one.chunk) * one.chunk
        return 3.0 * STATE_BYTES * padded * one.heads * one.key_dim * one.chunk / work.tp
    tokens = work.micro_batch * length
    return 3.0 * STATE_BYTES * tokens * one.state_numel / work.tp


def let_go_bytes(work: Workload, stage: Stage, dense: LayerBytes, sparse: LayerBytes) -> float:
    """What the layers of a stage behind the last one that carries a state have kept, and that one's MLP.

    When it runs backward they have let go of it. With full recomputation they keep their inputs only: not counted.
    """
    recurrent = work.shape.recurrent
    if recurrent is None or work.recomputes_layers or work.shape.blocks is not None or recurrent.beside_attention:
        return 0.0
    last = max(set(recurrent.layers) & set(stage.layers))
    behind = range(last + 1, stage.layers.stop)
    routed = work.shape.routed(range(last, stage.layers.stop))
    mlps = routed * sparse.mlp + (len(behind) + 1 - routed) * dense.mlp
    of_whole = len(behind) * (dense.attention + dense.gathered) + mlps
    choice = choice_bytes(work, replace(stage, layers=behind)) if work.framework == "deepspeed" else 0.0
    return of_whole * work.local_tokens + len(behind) * dense.stream * work.split_tokens + choice


def _kept_by_mamba1(work: Workload, one: RecurrentShape, tokens: int) -> float:
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


def _kept_by_mamba2(work: Workload, one: RecurrentShape, tokens: int) -> float:
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


def _kept_values(one: RecurrentShape) -> int:
    """Fp32 numbers of each value that a Mamba-2 layer keeps."""
    return 10 if one.gated_norm else 7


def forward_bytes(work: Workload) -> float:
    """What the scan of a Mamba-2 layer holds at its end beyond what the layer keeps; of other layers 0.

    Its function holds two more fp32 numbers of each state feature, 11 of each value, where the layer goes on to keep 10
    or 7, and a state of each chunk; its caller the channels behind their activation, but not yet the output. One piece
    is scanned at a time.
    """
    one = work.shape.recurrent
    if one is None or one.kind is not RecurrentKind.MAMBA2:
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
    return (2 if work.cp_layout == "zigzag" else 1) * (state_bytes(work) + halo_bytes(work)) if work.cp > 1 else 0.0
