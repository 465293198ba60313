"""What is wrong with a configuration of layers that carry a state."""

from __future__ import annotations


class LayerListError(ValueError):
    """A list of layers, or of their sizes, that does not fit; `key` is the key at fault."""

    def __init__(self, message: str, key: str) -> None:
        super().__init__(message)
        self.key = key
