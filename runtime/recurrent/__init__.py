"""Layers that carry a state along the sequence, over a sequence that is spread over context-parallel ranks.

A piece of the sequence maps the state that it receives affinely, S → A S + b. Each rank computes A and b of its pieces
at once; then the state goes through the chain of the pieces, from rank to rank. Backward is the same chain, reversed
and transposed. Convolutions take the last tokens of the piece before (the halo).

`chain` has the ranks and messages, `pieces` the tokens and documents, `scan` what gradients pass through; `kinds` the
local computation of each kind of layer. Usable on any process group, without the compiler.
"""

from parcompile.runtime.recurrent.pieces import Chain

from .kinds import convolve, gated_delta_rule, lightning_attention, selective_scan, state_space
from .pieces import Pieces, Segment, Strand
from .scan import Action, LocalScan, scan
