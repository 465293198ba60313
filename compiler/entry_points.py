"""What other installed distributions add to the compiler, found by their entry points.

A name is known without importing anything. The object behind it is loaded when it is needed, and what is wrong with it
is one message that names the distribution.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

RULES, TARGETS, IMPORTERS, FAMILIES = (
    "parcompile.rules",
    "parcompile.targets",
    "parcompile.importers",
    "parcompile.families",
)
"""The groups of entry points."""
VARIABLE = "PARCOMPILE_PLUGINS"
"""The environment variable that leaves all plug-ins out when it is 0."""
_NOUNS = {RULES: "rules", TARGETS: "target", IMPORTERS: "importer", FAMILIES: "family"}

Loaded = TypeVar("Loaded")


class PluginError(ValueError):
    """A plug-in that cannot be used. The message is meant for users."""


@dataclass(frozen=True, slots=True)
class Offer:
    """An entry point of a distribution; `rivals` are other distributions that offer the same name."""

    group: str
    name: str
    distribution: str
    point: EntryPoint
    rivals: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """How messages name it."""
        return f"{_NOUNS[self.group]} {self.name!r} of {self.distribution} ({self.point.value})"


@functools.cache
def offers(group: str) -> Mapping[str, Offer]:
    """What is installed for a group, by name."""
    if os.environ.get(VARIABLE) == "0":
        return MappingProxyType({})
    from importlib.metadata import entry_points  # what has no plug-ins to look for does without it

    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=group):
        found.setdefault(point.name, []).append(point)
    return MappingProxyType({name: _offer(group, name, points) for name, points in sorted(found.items())})


def _offer(group: str, name: str, points: list[EntryPoint]) -> Offer:
    titles = list(dict.fromkeys(f"{one.dist.name} {one.dist.version}" if one.dist else "?" for one in points))
    return Offer(group, name, titles[0], points[0], tuple(titles[1:]))


def load(group: str, name: str, judge: Callable[[object], Loaded]) -> Loaded:
    """The object behind an entry point.

    Args:
        group: the group.
        name: one of `offers(group)`.
        judge: returns the object as what it has to be, or raises TypeError or ValueError.

    Raises:
        PluginError: it cannot be loaded, or it is not what the group is for.
    """
    offer = offers(group)[name]
    if offer.rivals:
        raise PluginError(f"{offer.title} is offered by {' and '.join(offer.rivals)} too: uninstall one of them")
    try:
        found = offer.point.load()
    except (Exception, SystemExit) as error:  # the code of others may fail in any way
        raise PluginError(f"{offer.title} cannot be loaded: {said(error)}") from error
    try:
        return judge(found)
    except (TypeError, ValueError) as error:
        raise PluginError(f"{offer.title} cannot be used: {error}") from error


def said(error: BaseException) -> str:
    """An exception of a plug-in on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
