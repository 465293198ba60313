"""The gated delta rule (arXiv 2412.06464) over pieces of a sequence.

Shapes: B rows, S local tokens, G key heads, H value heads, K and V their widths. A state is [B, H, K, V], in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .chain import Chain
from .pieces import Pieces, Segment
from .scan import Action, LocalScan, scan

Rule = Callable[..., tuple[Tensor, "Tensor | None"]]
"""Of one piece: (query, key, value, g=, beta=, initial_state=, output_final_state=, …) to output and final state."""


def gated_delta_rule(
    rule: Rule,
    pieces: Pieces,
    chain: Chain | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    in_fp32: bool,
    **options: Any,
) -> Tensor:
    """Output [B, S, H, V].

    Args:
        rule: computes one piece.
        pieces: the local tokens.
        chain: of the ranks that share the sequences; None where there is one.
        query: [B, S, G or H, K].
        key: [B, S, G or H, K].
        value: [B, S, H, V].
        g: [B, S, H], the logarithm of the decay.
        beta: [B, S, H].
        in_fp32: hand the rule its inputs in fp32, so that what a received state adds is not rounded before it is added;
            kernels that take 16 bits only round it as they round every output.
        options: further arguments of the rule.
    """
    heads, keys, values = value.shape[2], key.shape[3], value.shape[3]
    wide = torch.promote_types(value.dtype, torch.float32)

    def compute(segment: Segment) -> LocalScan:
        rows, tokens = slice(*segment.rows), slice(segment.start, segment.stop)
        given = [one[rows, tokens] for one in (query, key, value)]
        decays = {"g": g[rows, tokens], "beta": beta[rows, tokens]}
        if not segment.is_carried:
            out, state = rule(*given, **decays, output_final_state=bool(pieces.strands), **options)
            return LocalScan(out, out if state is None else state.to(wide))
        # With the values [v, 0] from the state [0, I] one call gives the output, what a token reads of each row of the
        # received state, the state behind the segment, and what is left there of each row: [out, read], [b, A].
        count = value[rows].shape[0]
        one = torch.eye(keys, dtype=wide, device=value.device).expand(count, heads, keys, keys)
        start = torch.cat([one.new_zeros(count, heads, keys, values), one], -1)
        queries, own_keys, own_values = (part.to(wide) for part in given) if in_fp32 else given
        extended = torch.cat([own_values, own_values.new_zeros(*own_values.shape[:3], keys)], -1)
        both, end = rule(queries, own_keys, extended, **decays, initial_state=start, output_final_state=True, **options)
        assert end is not None
        out, reads = torch.split(both, [values, keys], -1)
        state, transition = torch.split(end.to(wide), [values, keys], -1)

        def read(received: Tensor) -> Tensor:
            return torch.einsum("bshk,bhkv->bshv", reads.to(wide), received)

        return LocalScan(out, state, transition, read)

    return scan(pieces, chain, Action.MATRIX, compute).to(value.dtype)
