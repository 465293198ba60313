"""The mechanisms of architectures, a file each: all that a compiler has to know of one stands in its file.

What goes through a model asks every block and names none: `hf_config`, `cutting`, `cost`, `rules`, `describing`, the
small models of preflight, and the names of stored tensors.
"""

from .block import Block, Divided, Exchange, Halo, Local, Small, Traits
from .indexer import IndexerTraits
from .ngrams import NgramTraits

KNOWN: tuple[type[Traits], ...] = (NgramTraits, IndexerTraits)
"""Those that pages of rules, names of stored tensors or keys that change numbers know of."""
