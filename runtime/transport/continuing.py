"""Collectives that travel as several messages: which message continues one that has begun."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_further = False


def continues() -> bool:
    """Whether what is sent now is a further piece of a collective, which counts as one message."""
    return _further


@contextlib.contextmanager
def continuing(further: bool = True) -> Iterator[None]:
    """What is sent within it continues a collective that has begun, where `further` says so."""
    global _further
    before, _further = _further, further or _further
    try:
        yield
    finally:
        _further = before
