"""Which keys are chosen, on their way into the attention over ranks.

Shapes: B rows, S tokens of this rank, T tokens of all ranks, N chosen keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class Unmasked:
    """What an attention to chosen keys is given for its mask: the ring knows the mask, and the choice comes beside."""

    def __getitem__(self, _: Any) -> Unmasked:
        return self


class Chosen(Unmasked):
    """The same with the choice [B, S, N], where an attention passes nothing beside its mask."""

    def __init__(self, indices: Tensor) -> None:
        self.indices = indices


class Visible(Unmasked):
    """What an attention is given for its mask that joins it with a choice of keys, as one of bools."""

    dtype = torch.bool

    def __and__(self, chosen: Tensor) -> ChosenKeys:
        return ChosenKeys(chosen)


@dataclass(frozen=True, slots=True)
class ChosenKeys:
    """Whether a query sees a key: bool [B, 1, S, T]."""

    keys: Tensor

    def hiding(self, dtype: torch.dtype) -> Tensor:
        """What is added to the scores: 0 for those it sees, −inf for others."""
        return torch.zeros(self.keys.shape, dtype=dtype, device=self.keys.device).masked_fill(~self.keys, -torch.inf)


def hiding(indices: Tensor, queries: int, keys: int, dtype: torch.dtype) -> Tensor:
    """[B, S, N] → what is added to the scores, 0 for chosen keys and −inf for others: [B, 1, queries, keys].

    Where there are more queries than choices, those in front are of tokens whose results nobody reads.
    """
    added = torch.full((*indices.shape[:2], keys), -torch.inf, dtype=dtype, device=indices.device)
    added.scatter_(2, indices.long(), 0.0)
    return F.pad(added, (0, 0, queries - added.shape[1], 0)).unsqueeze(1)
