"""What tests of one file share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from unittest import mock

import pytest

from parcompile.searching import advice
from parcompile.searching.ranking import SearchResult
from parcompile.spec.resolve import Resolution


@pytest.fixture(scope="module")
def one_search_for_a_spec() -> Iterator[None]:
    """What is too large is advised by a search of seconds: within a file, the same spec in the same folder by one."""
    search, found = advice._all_layouts, dict[str, tuple[SearchResult, bool]]()

    def remembered(spec: Resolution) -> tuple[SearchResult, bool]:
        key = f"{spec.folder}: {json.dumps(spec.tree, sort_keys=True)}"
        if key not in found:
            found[key] = search(spec)
        return found[key]

    with mock.patch.object(advice, "_all_layouts", remembered):
        yield
