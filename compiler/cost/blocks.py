"""What the mechanisms of a model cost beside attention and the MLP.

What hyper-connections cost: every block reads all residual streams of a token and writes to all of them.

A mixture takes the streams side by side, in fp32, for as many numbers as it needs: one for each stream to read it, and
one to write it (transformers models/hy_v4/modeling_hy_v4.py: HYV4HyperConnection, HYV4HyperHead). Where it mixes the
streams with one another too, one for each pair of them, which it makes doubly stochastic step by step, and it norms the
streams first (models/deepseek_v4/modeling_deepseek_v4.py: DeepseekV4HyperConnection). Where it gates every feature of
all streams, by way of a few, it norms them in fp32 and works on in their type (models/qwen4_exp/modeling_qwen4_exp.py:
Qwen4ExpTextGatedResidual).

What keys that stand for windows of tokens send over cp, and what they keep there.

| message, of a layer and micro-batch of b rows | bytes of a rank |
|---|---|
| all-to-all of tokens of others' windows, forward; of gradients, back | w b · tokens · 2 · series · D each |
| all-gather of keys of windows, forward; reduce-scatter of gradients | w b · most · D · (c − 1) each |

A rank makes the windows whose last tokens it has; `most` is how many the rank with most of them makes, and each of its
tokens gives values and weights of `series` times D features. Who chooses among these keys sends the same with features
of its own, forward only. Full recomputation repeats forward, without the choice, which is kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import lru_cache

from parcompile.layout.groups import Axis
from parcompile.layout.pipeline import Stage
from parcompile.layout.sequence import CpLayout, chunk_ids
from parcompile.layout.shards import padded_vocab_size
from parcompile.model import Parameter, within
from parcompile.model.blocks import Block, Exchange, Local
from parcompile.model.compressed_keys import CompressedKeys
from parcompile.model.derived_rows import parameter_table
from parcompile.model.family import types_with
from parcompile.model.shape import ModelShape

from .context_exchanges import ContextExchange
from .kept import BEHIND, FRONT, group_bytes, halo_beside, sorts
from .workload import Workload

# What the blocks of a model (`parcompile.model.blocks`) cost together: sums over those that stand in some layers.


def local(work: Workload) -> Local:
    """What a rank has of a micro-batch."""
    return Local(
        batch=work.micro_batch,
        hidden=work.shape.hidden_size,
        streams=work.shape.residual_streams,
        width=work.element_bytes,
        tokens=work.local_tokens,
        split_tokens=work.split_tokens,
        tp=work.tp,
        sequence_parallel=work.sequence_parallel,
    )


def kept_apart(work: Workload, layers: range, group: str) -> list[tuple[int, float]]:
    """How many of these layers keep how much of a micro-batch in a further group of modules (`kept.py: FURTHER`)."""
    share = work.tp if work.sequence_parallel else 1
    pieces = 2 if work.cp > 1 and work.cp_layout == "zigzag" else 1
    bases = {
        "own": work.split_tokens / share,
        "tokens": work.local_tokens,
        "pairs": work.local_tokens * work.sequence_length,
        "seen": work.local_tokens + work.micro_batch * pieces * halo_beside(work.shape.parts),
        "layer": 1,
    }
    cut = (work.tp, work.sequence_parallel, work.element_bytes)
    every = ((count, group_bytes(sort, group, *cut)) for count, sort in sorts(work.shape, layers))
    return [(count, sum((bases[of] * size for of, size in kept.items()), 0.0)) for count, kept in every]


def front_bytes(work: Workload, stage: Stage) -> float:
    """What is kept of a micro-batch in front of the layers, the input of the first one left out."""
    return kept_apart(work, range(1), FRONT)[0][1] if stage.has_embedding else 0.0


def head_bytes(work: Workload, stage: Stage) -> float:
    """What is kept of a micro-batch behind the last layer, the norm and the head there left out."""
    return kept_apart(work, range(1), BEHIND)[0][1] if stage.has_head else 0.0


def exchanges(work: Workload, layers: range, axis: str) -> Iterator[tuple[Exchange, int]]:
    """What these layers send over an axis for their blocks, and how often in a step, forward."""
    for one in work.shape.parts:
        if count := one.count(layers) * work.micro_batches:
            yield from ((found, count) for found in one.exchanges(local(work)) if found.axis == axis)


def gathered_over_cp(work: Workload, layers: range) -> tuple[int, float]:
    """Messages and bytes of a step that a rank sends of what these layers gather over cp, forward only."""
    messages: int = 0
    size: float = 0
    for one, passes in exchanges(work, layers, Axis.CP) if work.cp > 1 else ():
        if one.kind == "all-gather":
            messages, size = messages + passes, size + passes * one.size * (work.cp - 1)
    return messages, size


def handed_bytes(work: Workload, one: Block) -> tuple[int, int]:
    """What each piece of a sequence hands to the next in a layer and micro-batch: in a chain, and as a halo."""
    sent = [(each.kind, int(each.size)) for each in one.exchanges(local(work)) if each.axis == Axis.CP]
    chain, halo = (sum(size for kind, size in sent if kind == each) for each in ("chain", "halo"))
    return chain, halo


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
    messages, size, each = 0, 0, work.micro_batches * hops(work, cp_rank)
    for one in work.shape.parts if each else ():
        times = one.count(layers) * each
        handed = handed_bytes(work, one)
        messages, size = messages + times * sum(part > 0 for part in handed), size + times * sum(handed)
    return messages, size


def late_gradient(work: Workload, stage: Stage) -> tuple[float, int]:
    """The largest gradient of a stage that comes late (`Block.is_late`), and how many layers stand before it."""
    found = (0.0, 0)
    for row, before in _late_rows(work.shape, stage.layers) if work.shape.parts else ():
        found = max(found, (float(work.layout(row).local_numel * work.element_bytes), before))
    return found


@lru_cache(maxsize=1024)
def _late_rows(shape: ModelShape, layers: range) -> tuple[tuple[Parameter, int], ...]:
    """Parameters whose gradients come late, and the layers of these that stand before the last which has one."""
    late = (row for row in parameter_table(shape).layer if _is_late(shape, row))
    here = ((row, within(row.layers, layers)) for row in late)
    return tuple((row, own[-1] - layers[0]) for row, own in here if own)


def _is_late(shape: ModelShape, row: Parameter) -> bool:
    own = row.name.partition(".{layer}.")[2]
    return any(one.is_late(own) for one in shape.parts)


# What a second embedding costs in memory, of which every layer gets a part (Gemma 3n, Gemma 4).


def parts_bytes(work: Workload) -> float:
    """The parts of all layers for the tokens of a rank, in the type of the weights."""
    inputs = work.shape.layer_inputs
    if inputs is None:
        return 0.0
    share = work.tp if work.sequence_parallel else 1
    return work.split_tokens * work.shape.num_hidden_layers * inputs.width * work.element_bytes / share


def table_gradient_bytes(work: Workload, stage: Stage) -> float:
    """The gradient of a rank's rows of the table, and that of the parts, from which it comes."""
    inputs = work.shape.layer_inputs
    if inputs is None or not stage.has_embedding:
        return 0.0
    rows = padded_vocab_size(inputs.vocab_size, work.tp, work.vocab_divisible_by) / work.tp
    return work.element_bytes * rows * work.shape.num_hidden_layers * inputs.width + parts_bytes(work)


# How often shared transformer blocks are used.


def uses(shape: ModelShape, layers: range) -> int:
    """How many of these layers use a shared block."""
    return (
        0 if shape.stack.shared_blocks is None else sum(layer in layers for layer in shape.stack.shared_blocks.layers)
    )


# What hyper-connections cost: every block reads all residual streams of a token and writes to all of them.

FP32_BYTES = 4
MEANS = types_with("mean_of_streams")
"""Model types whose last hidden state is the mean of the streams: no mixture reads them behind the last layer."""
MIXTURES = 2
"""Of a layer: in front of attention and of the MLP."""


def mixture_parameters(shape: ModelShape) -> int:
    """Parameters of a layer's mixtures that multiply each token."""
    if shape.residual.mixture_rank:
        return MIXTURES * (head_parameters(shape) + shape.residual.streams**2 * shape.hidden_size)
    pairs = shape.residual.streams if shape.residual.square_mixtures else 0
    return MIXTURES * (2 + pairs) * shape.residual.streams**2 * shape.hidden_size


def head_parameters(shape: ModelShape) -> int:
    """Those of the mixture behind the last layer, which reads only."""
    if shape.residual.mixture_rank:
        return 2 * shape.residual.mixture_rank * shape.residual.streams * shape.hidden_size
    return 0 if shape.model_type in MEANS else shape.residual.streams**2 * shape.hidden_size


def added_bytes(shape: ModelShape, element_bytes: float) -> float:
    """What a block gives for a token as it is added to the streams: in their type where these are mixed, else fp32."""
    width = element_bytes if shape.residual.square_mixtures or shape.residual.mixture_rank else FP32_BYTES
    return float(width * shape.hidden_size) if shape.residual.streams else 0.0


def has_mixture(work: Workload, stage: Stage) -> bool:
    """Whether a mixture reads the streams behind the last layer."""
    return stage.has_head and work.shape.residual.streams > 0 and work.shape.model_type not in MEANS


# What keys that stand for windows of tokens send over cp, and what they keep there.


def compressed_layers(shape: ModelShape, layers: range) -> Iterator[tuple[int, CompressedKeys, int]]:
    """How many of these layers have compressed keys of each kind, and the features of a key."""
    for own, one in shape.by_kind:
        if one.attention.compressed is not None and (count := len(within(own, layers))):
            yield count, one.attention.compressed, one.head_dim


def window_exchanges(work: Workload, layers: range, cp_rank: int | None = None) -> tuple[ContextExchange, ...]:
    """The messages of a step with these layers, by operation; those of the rank that sends most by default."""
    if work.cp == 1 or not any(compressed_layers(work.shape, layers)):
        return ()
    ranks = range(work.cp) if cp_rank is None else (cp_rank,)
    return max((_of_rank(work, layers, rank) for rank in ranks), key=lambda all_: sum(one.wire_bytes for one in all_))


def _of_rank(work: Workload, layers: range, rank: int) -> tuple[ContextExchange, ...]:
    found: dict[str, list[float]] = {}

    def send(operation: str, messages: int, size: float) -> None:
        one = found.setdefault(operation, [0, 0.0])
        one[0] += messages
        one[1] += messages * size

    forward = 2 if work.recomputes_layers else 1
    width = work.micro_batch * work.element_bytes
    for count, keys, head_dim in compressed_layers(work.shape, layers):
        times = count * work.micro_batches
        sent, received, most = window_tokens(keys.rate, keys.series, work.sequence_length, work.cp, work.cp_layout)
        if not most:
            continue
        features = [(head_dim, forward, 1)]
        if keys.choice is not None:
            features.append((keys.choice.head_dim, 1, 0))
        for dim, ahead, back in features:
            if any(sent):
                projected = 2 * keys.series * dim * width
                send("all-to-all", times * ahead, sent[rank] * projected)
                send("all-to-all", times * back, received[rank] * projected)
            send("all-gather", times * ahead, (work.cp - 1) * most * dim * width)
            if back:
                send("reduce-scatter", times, (work.cp - 1) * most * dim * width)
    return tuple(
        ContextExchange(Axis.CP, operation, work.cp, 1, int(messages), size, neighbours=False)
        for operation, (messages, size) in found.items()
    )


@lru_cache(maxsize=256)
def window_tokens(
    rate: int, series: int, length: int, cp: int, layout: str
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Of one row: tokens that each rank sends, and gets; and the windows of the rank that makes most."""
    pieces = CpLayout(layout).chunks_per_rank * cp
    holders = {piece: rank for rank in range(cp) for piece in chunk_ids(CpLayout(layout), cp, rank)}
    borders = [piece * length // pieces for piece in range(pieces + 1)]
    sent, received, made = [0] * cp, [0] * cp, [0] * cp
    wanted: set[tuple[int, int]] = set()
    for piece, (start, stop) in enumerate(itertools.pairwise(borders)):
        first, count = start // rate, stop // rate - start // rate
        made[holders[piece]] += count
        if count:
            wanted |= {(holders[piece], token) for token in range(max(0, first - series + 1) * rate, start)}
    for rank, token in wanted:
        holder = holders[token * pieces // length]
        if holder != rank:
            sent[holder] += 1
            received[rank] += 1
    return tuple(sent), tuple(received), max(made)


def gathered_bytes(work: Workload, layers: range) -> float:
    """Keys of other ranks' windows, which the layers keep for backward of one micro-batch; recomputed, one layer's."""
    width = work.micro_batch * work.element_bytes * (1 - 1 / work.cp)
    sizes = [
        (count, keys.count(work.sequence_length) * head_dim)
        for count, keys, head_dim in compressed_layers(work.shape, layers)
    ]
    if work.recomputes_layers:
        return width * max((size for _, size in sizes), default=0)
    return width * sum(count * size for count, size in sizes)
