"""What the names of parameters have in common: which numbers count, and the order of all that may be there."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from parcompile.model.tables import INDICES

Names = Sequence[str]
_REPEATED = re.compile(r"(^|\.)(layers?|h|blocks?|\w+_list)$")
"""Modules whose entries count, whichever of them have parameters."""


class Structure:
    """The rows of a model type: names with `{layer}` in the place of numbers that vary."""

    def __init__(self, models: Sequence[Names]) -> None:
        self._fixed: set[str] = set()
        """Modules whose entries are always the same (`Sequential`): their numbers stay as they are."""
        self._split: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._find_fixed(models)
        self.rows = self._order(models)

    def split(self, name: str) -> tuple[str, tuple[int, ...]]:
        """The row of a name, and the numbers in it."""
        if name not in self._split:
            parts: list[str] = []
            owner: list[str] = []
            numbers: list[int] = []
            for part in name.split("."):
                if part.isdigit() and ".".join(owner) not in self._fixed:
                    parts.append("{" + INDICES[len(numbers)] + "}")
                    owner.append("{}")
                    numbers.append(int(part))
                else:
                    parts.append(part)
                    owner.append(part)
            self._split[name] = ".".join(parts), tuple(numbers)
        return self._split[name]

    def _find_fixed(self, models: Sequence[Names]) -> None:
        while True:
            found: dict[str, set[tuple[int, ...]]] = defaultdict(set)
            for names in models:
                held: dict[tuple[str, tuple[str, ...]], set[int]] = defaultdict(set)
                for name in names:
                    parts, real = [], name.split(".")
                    for at, part in enumerate(real):
                        if part.isdigit() and ".".join(parts) not in self._fixed:
                            held[".".join(parts), tuple(real[:at])].add(int(part))
                            parts.append("{}")
                        else:
                            parts.append(part)
                for (owner, _), numbers in held.items():
                    found[owner].add(tuple(sorted(numbers)))
            new = {owner for owner, seen in found.items() if len(seen) == 1 or any(_has_gaps(one) for one in seen)}
            new = {owner for owner in new if not _REPEATED.search(owner)}
            if not new:
                return
            self._fixed |= new
            # What stands below was written with braces while these numbers counted.
            self._fixed = {owner for owner in self._fixed if not self._outdated(owner)}

    def _outdated(self, owner: str) -> bool:
        parts = owner.split(".")
        return any(part == "{}" and ".".join(parts[:at]) in self._fixed for at, part in enumerate(parts))

    def _order(self, models: Sequence[Names]) -> list[str]:
        """All rows, children of every module in an order that no model contradicts."""
        children: dict[tuple[str, ...], dict[str, None]] = defaultdict(dict)
        after: dict[tuple[tuple[str, ...], str], set[str]] = defaultdict(set)
        for names in dict.fromkeys(map(tuple, models)):
            sequences: dict[tuple[str, ...], list[str]] = defaultdict(list)
            for name in names:
                parts, real = self.split(name)[0].split("."), tuple(name.split("."))
                for at, part in enumerate(parts):
                    sequence = sequences[real[:at]]
                    if part not in sequence:
                        sequence.append(part)
            for place, sequence in sequences.items():
                node = tuple(self.split(".".join(place))[0].split(".")) if place else ()
                for part in sequence:
                    children[node].setdefault(part)
                for at, part in enumerate(sequence):
                    after[node, part] |= set(sequence[at + 1 :])
        rows: list[str] = []

        def walk(node: tuple[str, ...]) -> None:
            rest = list(children.get(node, ()))
            if not rest:
                rows.append(".".join(node))
            while rest:
                # The next is one that nothing left over comes before.
                ahead = [
                    part for part in rest if not any(part in after[node, other] for other in rest if other != part)
                ]
                if not ahead:
                    raise ValueError(f"the order of {'.'.join(node) or 'the model'} varies: {', '.join(rest[:4])}")
                rest.remove(ahead[0])
                walk((*node, ahead[0]))

        walk(())
        return rows


def _has_gaps(numbers: tuple[int, ...]) -> bool:
    return numbers != tuple(range(len(numbers))) and len(numbers) <= 3
