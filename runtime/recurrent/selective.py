"""The recurrence of Mamba-1 (arXiv 2312.00752, section 3) over pieces of a sequence.

Shapes: B rows, C channels, S local tokens, N the state size. A state is [B, C, N], in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .chain import Chain
from .pieces import Pieces, Segment
from .scan import Action, LocalScan, scan

Rule = Callable[..., Any]
"""Of one piece: (x, dt, A, B, C, return_last_state=, …) to the output, and the final state where it is asked for."""


def selective_scan(
    rule: Rule,
    pieces: Pieces,
    chain: Chain | None,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    **options: Any,
) -> Tensor:
    """Output [B, C, S].

    Args:
        rule: computes one piece.
        pieces: the local tokens.
        chain: of the ranks that share the sequences; None where there is one.
        x: [B, C, S].
        dt: [B, C, S], the step size before `delta_bias` and `delta_softplus`.
        A: [C, N], negative: a step decays the state by exp(dt A).
        B: [B, N, S], what writes to the states of all channels.
        C: [B, N, S], what reads from them.
        delta_bias: [C].
        delta_softplus: whether the step size goes through softplus.
        options: further arguments of the rule.
    """
    steps = {"delta_bias": delta_bias, "delta_softplus": delta_softplus}

    def compute(segment: Segment) -> LocalScan:
        rows, tokens = slice(*segment.rows), slice(segment.start, segment.stop)
        values, step, writes, reads = (one[rows, :, tokens] for one in (x, dt, B, C))
        if not pieces.strands:
            out = rule(values, step, A, writes, reads, **steps, **options).mT
            return LocalScan(out, out)
        out, state = rule(values, step, A, writes, reads, return_last_state=True, **steps, **options)
        wide = torch.promote_types(state.dtype, torch.float32)
        if not segment.is_carried:
            return LocalScan(out.mT, state.to(wide))
        biased = step if delta_bias is None else step + delta_bias.to(step.dtype)[:, None]
        sizes = (F.softplus(biased) if delta_softplus else biased).to(wide)
        # What is left of each element of a received state behind each token: [B, C, S, N].
        kept = (A.to(wide)[:, None, :] * sizes.cumsum(-1)[..., None]).exp()

        def read(received: Tensor) -> Tensor:
            return torch.einsum("bcsn,bns->bsc", kept * received[:, :, None], reads.to(wide))

        return LocalScan(out.mT, state.to(wide), kept[:, :, -1], read)

    return scan(pieces, chain, Action.ELEMENTWISE, compute).mT
