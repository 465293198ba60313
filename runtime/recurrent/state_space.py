"""The recurrence of Mamba-2 (arXiv 2405.21060, section 2) over pieces of a sequence.

Shapes: B rows, S local tokens, H heads of P features, G groups of heads, N the state size. A state is [B, H, P, N], in
fp32.
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
"""Of one piece: (x, dt, A, B, C, return_final_states=, …) to the output, and the final state where it is asked for."""


def state_space(
    rule: Rule,
    pieces: Pieces,
    chain: Chain | None,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **options: Any,
) -> Tensor:
    """Output [B, S, H, P].

    Args:
        rule: computes one piece.
        pieces: the local tokens.
        chain: of the ranks that share the sequences; None where there is one.
        x: [B, S, H, P].
        dt: [B, S, H], the step size before `dt_bias`, `dt_softplus` and `dt_limit`.
        A: [H], negative: a step decays the state by exp(dt A).
        B: [B, S, G, N], what writes to the state.
        C: [B, S, G, N], what reads from it.
        dt_bias: [H].
        dt_softplus: whether the step size goes through softplus.
        dt_limit: its least and largest value.
        options: further arguments of the rule.
    """
    heads, groups = x.shape[2], B.shape[2]
    steps = {"dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}

    def compute(segment: Segment) -> LocalScan:
        rows, tokens = slice(*segment.rows), slice(segment.start, segment.stop)
        values, step, writes, reads = (one[rows, tokens] for one in (x, dt, B, C))
        if not pieces.strands:
            out = rule(values, step, A, writes, reads, **steps, **options)
            return LocalScan(out, out)
        out, state = rule(values, step, A, writes, reads, return_final_states=True, **steps, **options)
        wide = torch.promote_types(state.dtype, torch.float32)
        if not segment.is_carried:
            return LocalScan(out, state.to(wide))
        # What is left of a received state behind each token.
        kept = (
            (A.to(wide) * _size(step, dt_bias=dt_bias, dt_softplus=dt_softplus, dt_limit=dt_limit).to(wide))
            .cumsum(1)
            .exp()
        )

        def read(received: Tensor) -> Tensor:
            of_heads = reads.to(wide).repeat_interleave(heads // groups, 2)
            return torch.einsum("bshn,bhpn,bsh->bshp", of_heads, received, kept)

        return LocalScan(out, state.to(wide), kept[:, -1, :, None, None], read)

    return scan(pieces, chain, Action.ELEMENTWISE, compute)


def _size(dt: Tensor, *, dt_bias: Tensor | None, dt_softplus: bool, dt_limit: tuple[float, float]) -> Tensor:
    """Step sizes [B, S, H]."""
    biased = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    return torch.clamp(F.softplus(biased) if dt_softplus else biased, dt_limit[0], dt_limit[1])
