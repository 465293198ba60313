"""Lightning attention (arXiv 2501.08313, section 2.2) over pieces of a sequence: S ← λ S + k vᵀ, read as Sᵀ q.

The decay λ = exp(−slope) of a head is fixed: what is left of a state behind a piece follows from the piece's length.

Shapes: B rows, S local tokens, H heads, D their width. A state is [B, H, D, D], in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .chain import Chain
from .pieces import Pieces, Segment
from .scan import Action, LocalScan, scan


def lightning_attention(
    pieces: Pieces, chain: Chain | None, query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, *, block: int
) -> Tensor:
    """Output [B, S, H, D].

    Args:
        pieces: the local tokens.
        chain: of the ranks that share the sequences; None where there is one.
        query: [B, S, H, D].
        key: [B, S, H, D].
        value: [B, S, H, D].
        slopes: [H], each the negative logarithm of a decay.
        block: tokens whose scores are computed at once.
    """

    def compute(segment: Segment) -> LocalScan:
        rows, tokens = slice(*segment.rows), slice(segment.start, segment.stop)
        own, keys, values = (one[rows, tokens].transpose(1, 2) for one in (query, key, value))
        out, state = lightning_blocks(own, keys, values, slopes, block=block)
        if not segment.is_carried:
            return LocalScan(out.transpose(1, 2), state)
        decays = _decays(slopes, segment.length, own)

        def read(received: Tensor) -> Tensor:
            return ((own * decays) @ received).transpose(1, 2)

        return LocalScan(out.transpose(1, 2), state, decays[:, -1:].clone()[None], read)

    return scan(pieces, chain, Action.ELEMENTWISE, compute).to(value.dtype)


def lightning_blocks(
    query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, *, block: int, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Output [B, H, S, D] of consecutive tokens [B, H, S, D], and the state behind them; in fp32 or what is wider.

    Args:
        query: [B, H, S, D].
        key: [B, H, S, D].
        value: [B, H, S, D].
        slopes: [H].
        block: tokens whose scores are computed at once.
        state: that in front of them; zeros where there is none.
    """
    wide = torch.promote_types(value.dtype, torch.float32)
    query, key, value = (one.to(wide) for one in (query, key, value))
    longest = min(block, query.shape[2])
    decays = _decays(slopes, longest, query)
    # From each token to the last of a block; then from token j to token i, λ^(i − j).
    place = torch.arange(longest, device=query.device).to(wide)
    left = torch.exp(-slopes.to(query)[:, None, None] * (longest - 1 - place)[:, None])
    within = torch.exp(-slopes.to(query)[:, None, None] * (place[:, None] - place).clamp(min=0)).tril()
    outs = []
    for start in range(0, query.shape[2], block):
        q, k, v = (one[:, :, start : start + block] for one in (query, key, value))
        length = q.shape[2]
        out = (q @ k.mT * within[:, :length, :length]) @ v
        added = (k * left[:, longest - length :]).mT @ v
        if state is None:
            state = added
        else:
            out = out + (q * decays[:, :length]) @ state
            state = state * decays[:, length - 1 : length] + added
        outs.append(out)
    assert state is not None, "a sequence has tokens"
    return outs[0] if len(outs) == 1 else torch.cat(outs, 2), state


def _decays(slopes: Tensor, length: int, like: Tensor) -> Tensor:
    """[H, length, 1]: what is left, at each token, of the state in front of the first."""
    wide = torch.promote_types(like.dtype, torch.float32)
    steps = torch.arange(1, length + 1, device=like.device).to(wide)
    return torch.exp(-slopes.to(like.device, wide)[:, None, None] * steps[:, None])
