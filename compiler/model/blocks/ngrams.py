"""Embeddings of n-grams, which layers add to all residual streams (per-layer embeddings of Qwen4-Exp).

Each head hashes a token with the few before it to a row of its table. The tables of a layer's heads are one, of as many
rows as a prime for each head, padded together. What is looked up gives a value and a key of each stream, which a gate
weights, and passes a short convolution along the sequence.

| quantity | for a layer that adds them |
|---|---|
| over tp | what all heads look up, E features of each token, summed over the ranks, each with other rows of it |
| the same, sequence parallel | the streams, N h features, gathered for the convolution, too |
| over cp | the numbers of all tokens, and a halo of the convolution: N h features of each token that it sees |

N streams of h features, w bytes of an activation. Counted in transformers' modules with autograd's hooks.

Source: transformers models/qwen4_exp/modeling_qwen4_exp.py (Qwen4ExpTextNGramEmbedding, Qwen4ExpTextPLELayer).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from parcompile.model import Cut, Part, Split
from parcompile.model.layers import LayersError, checked

from .block import Block, Divided, Exchange, Halo, Local, Size, Small, Traits

TABLE = "ple.ple_embedding.ngram_embedding.weight"
"""What a layer calls the table."""
TOKEN_BYTES = 8
"""Of the number of a token."""
_FEW_ROWS, _FEW_FEATURES = 500, 8
"""Of a small model: rows of each head of a table, about, and its features."""


@dataclass(frozen=True, slots=True)
class Ngrams(Block):
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

    def halo(self) -> Halo:
        """What the convolution sees."""
        return Halo(self.seen, f"({self.kernel} − 1) · {self.longest}")

    def cut(self, own: str, shape: tuple[int, ...]) -> Cut | None:
        """A table by its rows."""
        return Cut(Split(0, (Part(shape[0], shape[0]),))) if own == TABLE else None

    def is_late(self, own: str) -> bool:
        """A table's comes when the layers before it are still to go backward."""
        return own == TABLE

    def divided(self, own: str, shape: tuple[int, ...]) -> Iterator[Divided]:
        """The rows of each table."""
        if own == TABLE:
            yield Divided(shape[0], f"a table of n-grams has {shape[0]} rows", "make_ngram_vocab_size_divisible_by")

    def matmul_parameters(self, hidden: int, streams: int) -> int:
        """The projections to a value and to a key of each stream."""
        return self.width * hidden * (streams + 1)

    def exchanges(self, local: Local) -> Iterator[Exchange]:
        """Sums of what is looked up in rows of tables, the streams in front of a convolution, tokens, and a halo."""
        streams = local.streams * local.hidden * local.width
        looked_up = local.split_tokens * self.width * local.width
        if local.sequence_parallel:
            yield Exchange("tp", "reduce-scatter", looked_up, back="all-gather")
            yield Exchange("tp", "all-gather", float(local.split_tokens * streams), back="reduce-scatter")
        else:
            yield Exchange("tp", "all-reduce", looked_up)
        yield Exchange("cp", "all-gather", TOKEN_BYTES * local.tokens)
        yield Exchange("cp", "halo", local.batch * streams * self.seen)

    def small(self, config: Any, small: Small) -> Mapping[str, Any]:
        """The keys of the tables, for those of these layers that have one; each hashes with numbers of its own."""
        return {
            "ple_layer_ids": [place + 1 for place, layer in enumerate(small.layers) if layer in self.layers],
            "ple_embed_dim": self.heads * min(self.width // self.heads, _FEW_FEATURES),
            "ngram_vocab_size_base": min(config.ngram_vocab_size_base, _FEW_ROWS),
        }


@dataclass(frozen=True, slots=True)
class NgramTraits(Traits):
    """What a family says of them."""

    words: ClassVar[str] = "embeddings of n-grams"
    rules: ClassVar[Mapping[str, str]] = {
        "C011": "A convolution behind embeddings of n-grams sees (ple_conv_kernel_size − 1) · ngram_size tokens.",
        "T004": "Tables of n-grams are split by their rows, a multiple of make_ngram_vocab_size_divisible_by.",
    }
    pieces: ClassVar[Sequence[tuple[str, str]]] = ((r"\.ngram_embedding\.weight$", ".ngram_embedding.shard_{}.weight"),)

    among: Callable[[Mapping[str, Any], int], Collection[int]]
    """The layers that may add them: those of linear_attention."""

    def read(self, config: Mapping[str, Any], layers: int, size: Size) -> tuple[Ngrams, ...]:  # noqa: ARG002
        """From `ple_layer_ids`, which counts layers from 1."""
        listed = config.get("ple_layer_ids")
        if listed is None or listed == []:
            return ()
        whole = isinstance(listed, list | tuple) and all(type(one) is int and 1 <= one <= layers for one in listed)
        if not whole:
            message = f"ple_layer_ids is {listed!r}: its entries count layers from 1 to {layers}"
            raise LayersError(message, "ple_layer_ids")
        found = tuple(sorted({one - 1 for one in listed}))
        if others := [one + 1 for one in found if one not in self.among(config, layers)]:
            message = f"ple_layer_ids has {others[0]}: transformers takes layers of linear_attention only"
            raise LayersError(message, "ple_layer_ids")
        if config.get("eos_token_id") in (None, []):
            message = "eos_token_id is missing: n-grams end at it, and transformers builds no such model without it"
            raise LayersError(message, "eos_token_id")
        longest, heads = _whole(config, "ngram_size", 3, least=2), _whole(config, "heads_per_ngram", 8)
        width, every = _whole(config, "ple_embed_dim", config.get("hidden_size")), (longest - 1) * heads
        if width % every:
            message = f"ple_embed_dim {width} / ((ngram_size {longest} - 1) x heads_per_ngram {heads}) is not whole"
            raise LayersError(f"{message}: each head has as many features", "ple_embed_dim")
        _whole(config, "ngram_vocab_size_base", 20_000_000)
        _whole(config, "make_ngram_vocab_size_divisible_by", 128)
        return (Ngrams(found, width, every, longest, _whole(config, "ple_conv_kernel_size", 4)),)

    @classmethod
    def numeric_keys(cls, declared: frozenset[str]) -> frozenset[str]:
        """N-grams end at the token that ends a text."""
        return frozenset({"eos_token_id"} if "ngram_size" in declared else ())


def _whole(config: Mapping[str, Any], key: str, default: int | None, least: int = 1) -> int:
    value = config.get(key)
    return checked(key, default if value is None else value, least)
