"""Collectives under way: started here, waited for by the caller, who can compute while the bytes travel.

`backend` has what a backend's own collectives do, `lanes` cuts them into pieces, `gloo` has what CPUs need in their
place, and chooses.
"""

from .backend import Group, Pending, PendingGather, group_rank, group_size, slice_size
from .gloo import start_all_gather, start_all_reduce, start_reduce_scatter, start_sum_of_pieces, travels_in_pieces
from .lanes import Arrival, Lanes, Like, Piece, gather_in_pieces, pieces_of, reduce_scatter_in_pieces
