"""Attention over ranks by name: every implementation takes the same tokens and gives the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .blockwise import all_gather_attention, attend_over_ranks, ring_attention
from .ulysses import ulysses_attention, usp_attention

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .inputs import AttentionOptions


def double_ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    inner_ranks: int,
    return_lse: bool = False,
    **options: Unpack[AttentionOptions],
) -> Any:
    """`ring_attention` in rings of `inner_ranks` neighbours, which pass their keys on to the next ring all at once."""
    return attend_over_ranks(query, key, value, "ring", inner_ranks=inner_ranks, return_lse=return_lse, **options)


IMPLEMENTATIONS: Mapping[str, Callable[..., Any]] = {
    "ring": ring_attention,
    "double_ring": double_ring_attention,
    "all_gather": all_gather_attention,
    "ulysses": ulysses_attention,
    "usp": usp_attention,
}
"""What a plan can name."""


def attention(query: Tensor, key: Tensor, value: Tensor, *, implementation: str = "ring", **options: Any) -> Any:
    """Attention of this rank's queries over the keys of every rank, by the implementation of that name.

    Args:
        query: [B, H, S, D].
        key: [B, K, S, D].
        value: [B, K, S, E].
        implementation: a name of `IMPLEMENTATIONS`.
        options: what `ring_attention` takes; "double_ring" also wants `inner_ranks`, "usp" `groups` (`UspGroups`) in
            the place of `group`.

    Returns:
        [B, H, S, E], as `ring_attention`; with `return_lse` also the log-sum-exp.

    Raises:
        ValueError: there is no implementation of that name, or what it raises.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"attention: there is no implementation {implementation!r}; there are {', '.join(IMPLEMENTATIONS)}"
        )
    return IMPLEMENTATIONS[implementation](query, key, value, **options)
