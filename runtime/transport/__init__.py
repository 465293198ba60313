"""Collectives under way: started here, waited for by the caller, who can compute while the bytes travel."""

from .dispatch import (
    Gathering,
    Group,
    Pending,
    group_rank,
    group_size,
    slice_size,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
    start_sum_of_pieces,
    travels_in_pieces,
)

__all__ = [
    "Gathering",
    "Group",
    "Pending",
    "group_rank",
    "group_size",
    "slice_size",
    "start_all_gather",
    "start_all_reduce",
    "start_reduce_scatter",
    "start_sum_of_pieces",
    "travels_in_pieces",
]
