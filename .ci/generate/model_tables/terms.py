"""Finds the expression that gives a size in every configuration: a key, products and quotients of keys, or a sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

_MISSING = -(10**6) - 1
_FACTORS = (2, 3, 4, 5, 6, 8)
_DIVISORS = (2, 4, 8, 16, 64)


class Terms:
    """Every candidate, evaluated for every configuration at once."""

    def __init__(self, configs: Sequence[dict[str, Any]], keys: Sequence[str]) -> None:
        """`keys` are those that may appear."""
        self.configs = configs
        self.texts: list[str] = []
        self.rows: list[np.ndarray] = []
        self.costs: list[int] = []
        whole = [key for key in keys if all(_is_size(config.get(key)) for config in configs) and _varies(configs, key)]
        fractions = [
            key
            for key in keys
            if all(isinstance(config.get(key), float | int) for config in configs)
            and any(isinstance(config.get(key), float) for config in configs)
        ]
        lists = [key for key in keys if all(isinstance(config.get(key), list) for config in configs)]
        values = {key: np.array([_number(config.get(key)) for config in configs], dtype=np.int64) for key in whole}
        for key in lists:
            lengths = np.array([len(config[key]) for config in configs], dtype=np.int64)
            if len(set(lengths)) > 1:
                values[f"len({key})"] = lengths
        self.keys = values
        self._add(values, fractions)
        self.table = np.array(self.rows, dtype=np.int64).reshape(len(self.rows), len(configs))
        self.cost = np.array(self.costs)
        source = np.random.default_rng(0)
        self._weights = source.integers(1, 2**61, len(configs), dtype=np.int64).astype(np.uint64)
        self._memo: dict[Any, str | None] = {}

    def _note(self, text: str, row: np.ndarray, cost: int) -> None:
        self.texts.append(text)
        self.rows.append(row)
        self.costs.append(cost)

    def _add(self, values: dict[str, np.ndarray], fractions: list[str]) -> None:
        names = list(values)
        for name in names:
            self._note(name, values[name], 1)
        self.simple = len(names)
        quotients: list[tuple[str, np.ndarray]] = []
        for name in names:
            for factor in _FACTORS:
                self._note(f"{factor} * {name}", factor * values[name], 2)
            for divisor in _DIVISORS:
                quotients.append((f"{name} // {divisor}", _quotient(values[name], divisor)))
                self._note(f"ceil({name} / {divisor})", -_quotient(-values[name], divisor), 4)
        for key in fractions:
            fraction = np.array([float(config[key]) for config in self.configs])
            for name in names:
                product = (fraction * values[name]).astype(np.int64)
                if not any(isinstance(config[key], float) for config in self.configs):
                    continue
                self._note(f"int({key} * {name})", product, 3)
                quotients.append((f"int({key} * {name})", product))
                self._note(f"2 * int({key} * {name})", 2 * product, 4)
        gated = [
            (f"2 * {name} // 3", 2 * values[name] // 3) for name in names if "intermediate" in name or "ff" in name
        ]
        for key in fractions:
            fraction = np.array([float(config[key]) for config in self.configs])
            gated += [(f"int({key} * ({text}))", (fraction * row).astype(np.int64)) for text, row in gated[:2]]
        quotients += gated
        for at, one in enumerate(names):
            for other in names[at:]:
                product = values[one] * values[other]
                self._note(f"{one} * {other}", product, 3)
                for factor in (2, 3, 4):
                    self._note(f"{factor} * {one} * {other}", factor * product, 4)
        small = [name for name in names if values[name].max() <= 1024]
        for one in names:
            for other in small:
                if one != other and (values[other] > 0).mean() > 0.5:
                    quotient = _quotient(values[one], values[other])
                    quotients.append((f"{one} // {other}", quotient))
                    quotients.append((f"3 * {one} // (4 * {other})", _quotient(3 * values[one], 4 * values[other])))
                    for third in small if len(small) <= 16 else ():
                        if third not in (one, other):
                            product = _quotient(values[one] * values[third], values[other])
                            self._note(f"{one} * {third} // {other}", product, 6)
                    self._note(f"{one} * {other} + {one}", values[one] * (values[other] + 1), 5)
        for text, quotient in quotients:
            self._note(text, quotient, 4)
            for name in small:
                self._note(f"{name} * ({text})", values[name] * quotient, 5)
                self._note(f"2 * {name} * ({text})", 2 * values[name] * quotient, 6)
        if len(small) <= 14:
            for at, one in enumerate(small):
                for other in small[at:]:
                    for third in names:
                        if third not in (one, other):
                            self._note(f"{one} * {other} * {third}", values[one] * values[other] * values[third], 5)
        # Vocabularies and widths that are padded to a multiple.
        for text, row in [*((name, values[name]) for name in names), *((f"({text})", row) for text, row in gated)]:
            for other in small:
                if other != text and (values[other] > 0).all():
                    padded = -_quotient(-row, values[other]) * values[other]
                    self._note(f"ceil({text} / {other}) * {other}", padded, 7)

    def find(self, at: Sequence[int], sizes: Sequence[int], *, sums: bool = True) -> str | None:
        """An expression for these sizes at these configurations; the simplest of those that fit."""
        if not len(at):
            return "0"
        key = (tuple(at), tuple(sizes), sums)
        if key not in self._memo:
            self._memo[key] = self._find(np.array(at), np.array(sizes, dtype=np.int64), sums)
        return self._memo[key]

    def _find(self, at: np.ndarray, sizes: np.ndarray, sums: bool) -> str | None:
        probes = sorted({0, len(at) // 3, len(at) // 2, len(at) - 1})
        near = np.flatnonzero((self.table[:, at[probes]] == sizes[probes]).all(1))
        hit = near[(self.table[np.ix_(near, at)] == sizes).all(1)]
        if (sizes == sizes[0]).all():
            # A size that never varies is a number, unless a key that varies elsewhere is that number here.
            varying = [one for one in hit if self.cost[one] == 1]
            if varying and len(at) >= 3 and sizes[0] > 16:
                return self.texts[varying[0]]
            # What few configurations agree on is chance where it could be a key.
            return str(int(sizes[0])) if sizes[0] <= 16 or len(set(at.tolist())) > 3 else None
        if len(hit):
            return self.texts[hit[np.argmin(self.cost[hit])]]
        if not sums or len(set(at.tolist())) < 6:
            return None
        return self._sum(at, sizes)

    def _sum(self, at: np.ndarray, sizes: np.ndarray) -> str | None:
        first = np.unique(at, return_index=True)[1][:60]
        at, sizes = at[first], sizes[first]
        table, weights = self.table[:, at], self._weights[: len(at)]
        differences = sizes - table
        constant = np.flatnonzero((differences == differences[:, :1]).all(1))
        if len(constant):
            best = constant[np.argmin(self.cost[constant])]
            return f"{self.texts[best]} + {int(differences[best, 0])}".replace("+ -", "- ")
        sums = (table.astype(np.uint64) * weights).sum(1, dtype=np.uint64)
        order = np.argsort(sums, kind="stable")
        ranked, wanted = sums[order], (sizes.astype(np.uint64) * weights).sum(dtype=np.uint64)

        def partner(target: Any) -> tuple[int, int] | None:
            place = np.searchsorted(ranked, target - sums)
            place[place == len(ranked)] = 0
            found = np.flatnonzero(ranked[place] == target - sums)
            if not len(found):
                return None
            best = min(found, key=lambda one: self.cost[one] + self.cost[order[place[one]]])
            return int(best), int(order[place[best]])

        pair = partner(wanted)
        if pair is not None:
            return f"{self.texts[pair[0]]} + {self.texts[pair[1]]}"
        for third in range(self.simple):
            pair = partner(wanted - sums[third])
            if pair is not None:
                return f"{self.texts[pair[0]]} + {self.texts[pair[1]]} + {self.texts[third]}"
        return None


def _quotient(values: np.ndarray, divisor: Any) -> np.ndarray:
    divisor = np.broadcast_to(np.asarray(divisor), values.shape)
    found: np.ndarray = np.where(divisor > 0, values // np.maximum(divisor, 1), _MISSING)
    return found


def _is_size(value: object) -> bool:
    return value is None or isinstance(value, int | str | float | list)


def _number(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else _MISSING


def _varies(configs: Sequence[dict[str, Any]], key: str) -> bool:
    found = {config[key] for config in configs if type(config.get(key)) is int}
    return len(found) > 1
