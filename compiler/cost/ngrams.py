"""What embeddings of n-grams cost: what is looked up, kept, and sent (`parcompile.model.ngrams`).

| quantity | for a layer that adds them |
|---|---|
| over tp | what all heads look up, E features of each token, summed over the ranks, each with other rows of it |
| the same, sequence parallel | the streams, N h features, gathered for the convolution, too |
| over cp | the numbers of all tokens, and a halo of the convolution: N h features of each token that it sees |
| kept of a token | 24 N h bytes of three norms in fp32, 4 w N h, w (E + h) |

N streams of h features, w bytes of an activation. Counted in transformers' modules with autograd's hooks.
"""

from __future__ import annotations

from parcompile.layout.stages import Stage
from parcompile.model.ngrams import TABLE
from parcompile.model.parameters import parameter_table

from .workload import Workload

TOKEN_BYTES = 8
"""Of the number of a token."""
_NORMS = 3
_KEPT_OF_NORM = 8
"""Bytes of a feature: the input of a norm in fp32, and what it makes of it."""
_WHOLE_COPIES, _OWN_COPIES = 2, 2
"""In the type of the weights: what goes into the convolution and comes out of it; the keys and the streams, normed."""


def ngram_layers(work: Workload, layers: range) -> int:
    """How many of these layers add such embeddings."""
    return 0 if work.shape.ngrams is None else len(set(work.shape.ngrams.layers) & set(layers))


def looked_up_bytes(work: Workload) -> float:
    """What all heads look up for the tokens of a micro-batch."""
    return 0.0 if work.shape.ngrams is None else work.split_tokens * work.shape.ngrams.width * work.element_bytes


def streams_bytes(work: Workload) -> float:
    """All streams of the tokens of a micro-batch."""
    return float(work.split_tokens * work.shape.residual_streams * work.shape.hidden_size * work.element_bytes)


def kept_ngram_bytes(work: Workload) -> float:
    """What such a layer keeps of a micro-batch beside what others keep."""
    ngrams, width = work.shape.ngrams, work.element_bytes
    if ngrams is None:
        return 0.0
    share = work.tp if work.sequence_parallel else 1
    streams = work.shape.residual_streams * work.shape.hidden_size
    own = (_NORMS * _KEPT_OF_NORM + _OWN_COPIES * width) * streams + width * (ngrams.width + work.shape.hidden_size)
    hashes = (TOKEN_BYTES + 1) * ngrams.heads
    return work.split_tokens * own / share + work.local_tokens * (_WHOLE_COPIES * width * streams + hashes)


def table_bytes(work: Workload, stage: Stage) -> tuple[float, int]:
    """The gradient of the largest table that a rank of a stage has rows of, and how many layers stand before it."""
    found = (0.0, 0)
    for row in parameter_table(work.shape).layer if work.shape.ngrams is not None else ():
        if row.name.endswith(TABLE) and (here := sorted(set(row.layers or ()) & set(stage.layers))):
            size = float(work.layout(row).local_numel * work.element_bytes)
            found = max(found, (size, here[-1] - stage.layers[0]))
    return found


def halo_bytes(work: Workload) -> int:
    """What the convolution of the next piece sees of a piece, for one layer and micro-batch."""
    if (ngrams := work.shape.ngrams) is None:
        return 0
    streams = work.shape.residual_streams * work.shape.hidden_size
    return work.micro_batch * work.element_bytes * streams * ngrams.seen
