"""32-bit words in place of random numbers: the same wherever they are computed, as far apart as random ones."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

WORD = 0xFFFFFFFF

Words = TypeVar("Words", int, Tensor)


def mixed(words: Words) -> Words:
    """32-bit words, in int64, of which every bit depends on every bit of those given.

    Factors are below 2^31, so that no product leaves int64.
    """
    words = ((words ^ (words >> 16)) * 0x7FEB352D) & WORD
    words = ((words ^ (words >> 15)) * 0x735A2D97) & WORD
    return words ^ (words >> 16)


def of_seed(seed: int) -> int:
    """A word for a seed of up to 64 bits."""
    return mixed((seed & WORD) + 1) ^ (seed >> 32 & WORD)


def combined(words: Tensor | int, numbers: Tensor, offset: int) -> Tensor:
    """Words for pairs: `words` and `numbers`, broadcast. Another offset keeps equal numbers of another kind apart."""
    return mixed(words ^ mixed((numbers + offset) & WORD))
