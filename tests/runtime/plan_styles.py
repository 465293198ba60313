"""Which dim transformers' own plan of tensor parallelism cuts."""

from __future__ import annotations

COLUMNS = frozenset({"colwise", "colwise_rep", "colwise_gather_output", "packed_colwise"})
ROWS = frozenset({"rowwise", "rowwise_rep", "rowwise_split_input", "packed_rowwise"})
WHOLE = frozenset(
    {
        *("replicate", "replicated_with_grad_allreduce", "sequence_parallel", "all_reduce", "mla_kv_a_proj"),
        *("moe_tp_experts", "moe_identity_expert", "local_params", "ep_dispatch_experts"),
    }
)
"""Styles that say what a module does with what passes through it, and leave its parameters whole."""


def cut_dim(style: str, name: str, dims: int) -> int | None:
    """The dim along which a style cuts a parameter of so many dims; None where every rank holds all of it.

    Raises:
        ValueError: transformers has no such style.
    """
    if style in COLUMNS:
        return max(dims - 2, 0)
    if style in ROWS:
        whole = dims == 1 if style == "packed_rowwise" else name.endswith(".bias")
        return None if whole else dims - 1
    if style in ("embedding_rowwise", "embedding_colwise"):
        return 0 if style == "embedding_rowwise" else 1
    if style == "grouped_gemm":
        return 0
    if style in WHOLE:
        return None
    raise ValueError(f"{style!r} is no style of transformers' plans of tensor parallelism")
