"""Did you mean …? The nearest of a few names."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable

LONGEST = 80
"""Longer words are no misspelt names."""
_LEAST_RATIO = 0.7
"""Of difflib, whose 0.6 takes a DeepSpeed key of one's own, `comms_config`, for `comms_logger`."""

_SEPARATORS = str.maketrans("", "", "-_. ")


def closest(word: str, candidates: Iterable[str], *, least: float = _LEAST_RATIO) -> str | None:
    """The candidate that `word` most probably misspells, None when none is near enough to be worth a guess.

    Case and `-`, `_`, `.` and spaces do not count.

    Args:
        word: what was written.
        candidates: what could have been meant.
        least: how alike both have to be, from 0 to 1 (`difflib.SequenceMatcher.ratio`).
    """
    if not word or len(word) > LONGEST:
        return None
    names: dict[str, str] = {}
    for candidate in candidates:
        if candidate != word:
            names.setdefault(_bare(candidate), candidate)
    near = difflib.get_close_matches(_bare(word), names, n=1, cutoff=least)
    return names[near[0]] if near else None


@functools.lru_cache(maxsize=4096)
def _bare(word: str) -> str:
    return word.lower().translate(_SEPARATORS)
