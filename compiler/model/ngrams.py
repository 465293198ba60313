"""Embeddings of n-grams, which layers add to all residual streams (per-layer embeddings of Qwen4-Exp).

Each head hashes a token with the few before it to a row of its table. The tables of a layer's heads are one, of as many
rows as a prime for each head, padded together. What is looked up gives a value and a key of each stream, which a gate
weights, and passes a short convolution along the sequence.

Source: transformers models/qwen4_exp/modeling_qwen4_exp.py (Qwen4ExpTextNGramEmbedding, Qwen4ExpTextPLELayer).
"""

from __future__ import annotations

from dataclasses import dataclass

TABLE = "ple.ple_embedding.ngram_embedding.weight"
"""What a layer calls the table."""


@dataclass(frozen=True, slots=True)
class Ngrams:
    """Which layers add them, and their sizes."""

    layers: tuple[int, ...]
    width: int
    """Of what all heads look up for a token together."""
    heads: int
    longest: int
    """Tokens of the longest n-gram."""
    kernel: int
    """Taps of the convolution, so many tokens apart as the longest n-gram has."""

    @property
    def seen(self) -> int:
        """Tokens before a token that its convolution sees."""
        return (self.kernel - 1) * self.longest

    def numel(self, hidden: int, streams: int) -> int:
        """Elements of the projections of a layer that multiply each token."""
        return self.width * hidden * (streams + 1)
