"""Layers that carry a state along the sequence, over a sequence that is spread over context-parallel ranks.

A piece of the sequence maps the state that it receives affinely, S → A S + b. Each rank computes A and b of its pieces
at once; then the state goes through the chain of the pieces, from rank to rank. Backward is the same chain, reversed
and transposed. Convolutions take the last tokens of the piece before (the halo).

`chain` has the ranks and messages, `pieces` the tokens and documents, `scan` what gradients pass through; each kind of
layer is a module with its local computation. Usable on any process group, without the compiler.
"""

from .chain import Chain
from .convolution import convolve
from .gated_delta import gated_delta_rule
from .lightning import lightning_attention
from .pieces import Pieces, Segment, Strand
from .scan import Action, LocalScan, scan
from .selective import selective_scan
from .state_space import state_space

__all__ = [
    "Action",
    "Chain",
    "LocalScan",
    "Pieces",
    "Segment",
    "Strand",
    "convolve",
    "gated_delta_rule",
    "lightning_attention",
    "scan",
    "selective_scan",
    "state_space",
]
