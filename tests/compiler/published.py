"""Formulas of the literature, as published: what estimates are compared with."""

from __future__ import annotations


def stored_activation_bytes(
    *, s: int, b: int, h: int, a: int, t: int = 1, sequence_parallel: bool = False, recompute: str = "none"
) -> float:
    """Bytes of one GPT layer and micro-batch in 16 bits with ffn 4h and stored scores: arXiv 2205.05198, table 2."""
    if recompute == "full":
        return 2.0 * s * b * h
    scores = {"none": 5 * a * s / h, "selective": 0.0}[recompute]
    if sequence_parallel:
        return s * b * h / t * (34 + scores)
    return s * b * h * (10 + 24 / t + scores / t)
