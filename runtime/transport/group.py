"""The ranks that a tensor is spread over, and how large their slices are."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

Group = dist.ProcessGroup | None
"""The ranks that a tensor is spread over; None stands for this rank alone."""


def group_size(group: Group) -> int:
    """Number of ranks in `group`."""
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: Group) -> int:
    """Index of this rank within `group`."""
    return 0 if group is None else dist.get_rank(group)


def slice_size(shape: Sequence[int], dim: int, ranks: int) -> int:
    """The size of one of `ranks` equal slices along `dim`.

    Raises:
        ValueError: There are no equal slices.
    """
    size, rest = divmod(shape[dim], ranks)
    if rest:
        raise ValueError(
            f"dim {dim} of shape {tuple(shape)} cannot be split over {ranks} ranks: "
            f"{shape[dim]} % {ranks} = {rest}; pad it to {(size + 1) * ranks}"
        )
    return size


def peers(rank: int, ranks: int) -> list[int]:
    """The other ranks, the nearest first, so that no rank is everyone's first choice."""
    return [(rank - step) % ranks for step in range(1, ranks)]
