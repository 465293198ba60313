"""Layers that carry a state along the sequence, over a sequence that is spread over context-parallel ranks.

A piece of the sequence maps the state that it receives affinely, S → A S + b. Each rank computes A and b of its pieces
at once; then the state goes through the chain of the pieces, from rank to rank. Backward is the same chain, reversed
and transposed. Convolutions take the last tokens of the piece before (the halo).

`pieces` has the ranks and messages, the tokens and documents, and what gradients pass through; here is the local
computation of each kind of layer. Usable on any process group, without the compiler.

There are four recurrences with states in fp32, and a causal convolution.

Shapes: B rows, S local tokens. The gated delta rule (arXiv 2412.06464) has G key heads, H value heads, K and V their
widths, and a state of [B, H, K, V]. Lightning attention (arXiv 2501.08313, section 2.2), S ← λ S + k vᵀ read as Sᵀ q,
has H heads of D features and a state of [B, H, D, D]; its decay λ = exp(−slope) is fixed, so that what is left of a
state behind a piece follows from the length of the piece. Mamba-1 (arXiv 2312.00752, section 3) has C channels and a
state of [B, C, N], where N is the state size. Mamba-2 (arXiv 2405.21060, section 2) has H heads of P features, G groups
of heads, and a state of [B, H, P, N].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .pieces import Action, Chain, LocalScan, Pieces, Segment, Strand, halo, join, scan

DeltaRule = Callable[..., tuple[Tensor, "Tensor | None"]]
"""Of one piece: (query, key, value, g=, beta=, initial_state=, output_final_state=, …) to output and final state."""


def gated_delta_rule(
    rule: DeltaRule,
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


SelectiveRule = Callable[..., Any]
"""Of one piece: (x, dt, A, B, C, return_last_state=, …) to the output, and the final state where it is asked for."""


def selective_scan(
    rule: SelectiveRule,
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
        sizes = _sizes(step, None if delta_bias is None else delta_bias[:, None], delta_softplus).to(wide)
        # What is left of each element of a received state behind each token: [B, C, S, N].
        kept = (A.to(wide)[:, None, :] * sizes.cumsum(-1)[..., None]).exp()

        def read(received: Tensor) -> Tensor:
            return torch.einsum("bcsn,bns->bsc", kept * received[:, :, None], reads.to(wide))

        return LocalScan(out.mT, state.to(wide), kept[:, :, -1], read)

    return scan(pieces, chain, Action.ELEMENTWISE, compute).mT


StateRule = Callable[..., Any]
"""Of one piece: (x, dt, A, B, C, return_final_states=, …) to the output, and the final state where it is asked for."""


def state_space(
    rule: StateRule,
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
        sizes = torch.clamp(_sizes(step, dt_bias, dt_softplus), *dt_limit).to(wide)
        kept = (A.to(wide) * sizes).cumsum(1).exp()

        def read(received: Tensor) -> Tensor:
            of_heads = reads.to(wide).repeat_interleave(heads // groups, 2)
            return torch.einsum("bshn,bhpn,bsh->bshp", of_heads, received, kept)

        return LocalScan(out, state.to(wide), kept[:, -1, :, None, None], read)

    return scan(pieces, chain, Action.ELEMENTWISE, compute)


def _sizes(steps: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    biased = steps if bias is None else steps + bias.to(steps.dtype)
    return F.softplus(biased) if softplus else biased


Convolution = Callable[[Tensor], Tensor]
"""From [B, C, S] to [B, C, S], with zeros in front of the first token."""


def convolve(convolution: Convolution, pieces: Pieces, chain: Chain | None, x: Tensor, width: int) -> Tensor:
    """Convolves channels [B, C, S local tokens]; a document sees no token of another.

    Args:
        convolution: of tokens that follow each other.
        pieces: the local tokens.
        chain: of the ranks that share the sequences; None where there is one.
        x: the channels.
        width: tokens that the convolution sees, the token itself among them.

    Raises:
        ValueError: a piece is shorter than what the next one has to see of it.
    """
    if pieces.is_whole or width == 1:
        return convolution(x)
    seen = width - 1
    found: dict[Segment, Tensor] = {segment: convolution(_of(x, segment)).mT for segment in pieces.alone}
    if pieces.strands:
        assert chain is not None, "strands are what several ranks have parts of"
        slots = range(len(chain.mine))
        tails = [torch.cat([_tail(x, strand.slots[slot], seen) for strand in pieces.strands]) for slot in slots]
        heads = halo(chain, tails)
        for slot in slots:
            place = 0
            for strand in pieces.strands:
                first, *rest = strand.slots[slot]
                rows = first.rows[1] - first.rows[0]
                head = heads[slot][place : place + rows]
                place += rows
                # Of another document nothing is seen. Multiplied, not cut: every rank takes part in the backward.
                own = torch.arange(seen, 0, -1, device=x.device) <= first.before
                joined = torch.cat([head * own.to(head.dtype), _of(x, first)], -1)
                found[first] = convolution(joined)[..., seen:].mT
                found |= {segment: convolution(_of(x, segment)).mT for segment in rest}
    return join(found).mT


def _of(x: Tensor, segment: Segment) -> Tensor:
    return x[slice(*segment.rows), :, segment.start : segment.stop]


def _tail(x: Tensor, segments: tuple[Segment, ...], seen: int) -> Tensor:
    """The end of a piece."""
    first, last = segments[0], segments[-1]
    if last.stop - first.start < seen:
        raise ValueError(
            f"a piece of {last.stop - first.start} tokens is shorter than the {seen} tokens that the convolution of "
            "the next piece has to see of it: make the sequence longer, or cp smaller"
        )
    return x[slice(*first.rows), :, last.stop - seen : last.stop]
