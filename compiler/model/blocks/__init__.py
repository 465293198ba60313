"""The mechanisms of architectures, a file each: all that a compiler has to know of one stands in its file.

What goes through a model asks every block and names none: `hf_config`, `cutting`, `cost`, `rules`, `describing`, the
small models of preflight, and the names of stored tensors.
"""

from .altup import AltUpTraits
from .block import Block, Divided, Exchange, Halo, Local, Small, Traits
from .indexer import IndexerTraits
from .ngrams import NgramTraits

KNOWN: tuple[type[Traits], ...] = (AltUpTraits, NgramTraits, IndexerTraits)
"""Every mechanism."""

__all__ = ["KNOWN", "Block", "Divided", "Exchange", "Halo", "Local", "Small", "Traits"]
