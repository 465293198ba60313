"""Labels of tokens, moved so that each position has the label of the token after it."""

from __future__ import annotations

import torch
from torch import Tensor

IGNORED_LABEL = -100
"""The label of a token that is not predicted."""


def shift_labels(labels: Tensor, position_ids: Tensor | None = None) -> Tensor:
    """Labels […, S] moved one token to the left: position i predicts token i + 1, the last one nothing.

    With positions that begin anew for each packed document, the last token of a document predicts nothing either.
    """
    shifted = torch.full_like(labels, IGNORED_LABEL)
    shifted[..., :-1] = labels[..., 1:]
    if position_ids is not None:
        shifted[..., :-1][position_ids[..., 1:] != position_ids[..., :-1] + 1] = IGNORED_LABEL
    return shifted
