"""Versions of DeepSpeed: those whose configuration is known, and the one that a version given by a user means."""

from __future__ import annotations

import functools
import importlib.resources
import json
import re
from typing import Any

_NUMBER = re.compile(r"v?(\d+)(?:\.(\d+))?(?:\.(\d+))?")


class UnknownVersionError(ValueError):
    """A text that is no version of DeepSpeed, or one before the first that is known."""


@functools.cache
def facts() -> dict[str, Any]:
    """keys.json: what each version reads from its configuration. To be read only."""
    file = importlib.resources.files("parcompile.backends.deepspeed") / "keys.json"
    tree = json.loads(file.read_text(encoding="utf-8"))
    assert isinstance(tree, dict)
    return tree


@functools.cache
def known() -> tuple[str, ...]:
    """The versions whose configuration is known, oldest first."""
    return tuple(facts()["versions"])


def newest() -> str:
    """The newest of them."""
    return known()[-1]


@functools.cache
def order(version: str) -> tuple[int, int, int]:
    """A version as numbers, to compare: "0.16" is 0.16.0.

    Raises:
        UnknownVersionError: it is no version.
    """
    match = _NUMBER.match(version.strip())
    if match is None:
        raise UnknownVersionError(f"{version!r} is no version of DeepSpeed: write it like {newest()}")
    major, minor, patch = (int(part or 0) for part in match.groups())
    return major, minor, patch


def nearest(version: str) -> str:
    """The known version that a given one behaves like: the last one that is not newer.

    "0.16" is the last of 0.16, and what is newer than the newest is taken for the newest.

    Raises:
        UnknownVersionError: it is no version, or older than the first known one.
    """
    given = order(version)
    whole = version.strip().lstrip("v").count(".") >= 2
    found = [one for one in known() if (order(one) <= given if whole else order(one)[:2] <= given[:2])]
    if not found:
        raise UnknownVersionError(f"DeepSpeed {version} is older than {known()[0]}, the first version that is known")
    return found[-1]


def at(entry: Any, version: str) -> Any:
    """The value of an entry of keys.json in a known version; None where there is none."""
    if not _changes(entry):
        return entry
    value = None
    for first, one in entry:
        if order(first) > order(version):
            break
        value = one
    return value


def _changes(entry: Any) -> bool:
    """Whether an entry is a list of [first version, value]."""
    return isinstance(entry, list) and bool(entry) and isinstance(entry[0], list)


def since(entry: Any) -> str | None:
    """The first version that has an entry, None when the first known one has it already."""
    return str(entry[0][0]) if _changes(entry) and entry[0][0] != known()[0] else None


def ended(entry: Any) -> str | None:
    """The first version that has an entry no more, or refuses its key; None when the newest has it."""
    if not _changes(entry):
        return None
    gone = [first for first, value in entry if value is None or value.get("refused")]
    last = entry[-1][1]
    return str(gone[-1]) if gone and (last is None or last.get("refused")) else None
