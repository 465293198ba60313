"""Finds the expression that gives a size in every configuration: a key, products and quotients of keys, or a sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

_MISSING = -(10**6) - 1
_FACTORS = (2, 3, 4, 5, 6, 8)
_DIVISORS = (2, 4, 8, 16, 64)
_PLAIN = 4
"""What costs more is no term of a sum of three."""
_HASHED, _TRIED = 60, 24
"""Sums are looked for over so many configurations; so many that fit there are tried over all."""


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
        lists = [key for key in keys if any(_is_layers(key, config.get(key)) for config in configs)]
        values = {key: np.array([_number(config.get(key)) for config in configs], dtype=np.int64) for key in whole}
        for key in lists:
            held = [config.get(key) for config in configs]
            lengths = np.array([len(one) if _is_layers(key, one) else _MISSING for one in held], dtype=np.int64)
            if len(set(lengths) - {_MISSING}) > 1:
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
        self._add_patches(values)
        gated = [
            (f"2 * {name} // 3", 2 * values[name] // 3) for name in names if "intermediate" in name or "ff" in name
        ]
        for key in fractions:
            fraction = np.array([float(config[key]) for config in self.configs])
            gated += [(f"int({key} * ({text}))", (fraction * row).astype(np.int64)) for text, row in gated[:6]]
        quotients += gated
        for at, one in enumerate(names):
            for other in names[at:]:
                product = values[one] * values[other]
                self._note(f"{one} * {other}", product, 3)
                for factor in (2, 3, 4):
                    self._note(f"{factor} * {one} * {other}", factor * product, 4)
        small = [name for name in names if np.quantile(values[name], 0.9) <= 1024]  # a few are those of other keys
        for one in names:
            for other in small:
                if one != other and (values[other] > 0).mean() > 0.5:
                    quotient = _quotient(values[one], values[other])
                    quotients.append((f"{one} // {other}", quotient))
                    quotients.append((f"3 * {one} // (4 * {other})", _quotient(3 * values[one], 4 * values[other])))
                    # Features of all heads in groups of them: their count tells what is divided by what.
                    for third in small if len(small) <= 16 or "group" in other else ():
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

    def _add_patches(self, values: dict[str, np.ndarray]) -> None:
        """Images are cut into square patches: how many there are, and how many numbers one holds."""
        for patch in [name for name in values if "patch" in name]:
            side = values[patch]
            for name, row in values.items():
                if name == patch:
                    continue
                along = _quotient(row, side)
                self._note(
                    f"({name} // {patch}) * ({name} // {patch})", np.where(along >= 0, along * along, _MISSING), 5
                )
                self._note(f"{name} * {patch} * {patch}", row * side * side, 5)

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
        everywhere, wanted = at, sizes
        once = np.unique(at, return_index=True)[1]
        some = once[np.linspace(0, len(once) - 1, min(_HASHED, len(once)), dtype=int)]
        at, sizes = at[some], sizes[some]
        table, weights = self.table[:, at], self._weights[: len(at)]
        differences = sizes - table
        constant = np.flatnonzero((differences == differences[:, :1]).all(1))
        for best in constant[np.argsort(self.cost[constant], kind="stable")][:_TRIED]:
            rest = int(differences[best, 0])
            if rest and (self.table[best, everywhere] + rest == wanted).all():
                return f"{self.texts[best]} + {rest}".replace("+ -", "- ")
        hashes = (table.astype(np.uint64) * weights).sum(1, dtype=np.uint64)
        target = (sizes.astype(np.uint64) * weights).sum(dtype=np.uint64)

        def partners(order: np.ndarray, ranked: np.ndarray, rest: Any, third: int, sign: int) -> str | None:
            # What is searched for rises too, but for one step where it wraps around: so it is found in much less time.
            behind, rests = order[::-1], rest - ranked[::-1]
            place = np.searchsorted(ranked, rests)
            place[place == len(ranked)] = 0
            found = np.flatnonzero(ranked[place] == rests)
            costs = self.cost[behind[found]] + self.cost[order[place[found]]]
            for one in found[np.argsort(costs, kind="stable")][:_TRIED]:
                parts = [int(behind[one]), int(order[place[one]])]
                total = self.table[np.ix_(parts, everywhere)].sum(0) + sign * self.table[third, everywhere]
                if (total == wanted).all():
                    last = f" {'+' if sign > 0 else '-'} {self.texts[third]}" if sign else ""
                    return f"{self.texts[parts[0]]} + {self.texts[parts[1]]}{last}"
            return None

        order = np.argsort(hashes, kind="stable")
        if (text := partners(order, hashes[order], target, 0, 0)) is not None:
            return text
        # What is 0 everywhere explains nothing, and is a term of every sum.
        order = order[(self.cost[order] <= _PLAIN) & (table[order] != 0).any(1)]
        ranked = hashes[order]
        for third in range(self.simple):
            whole = self.table[third, everywhere] + wanted
            for one in np.flatnonzero(hashes == target + hashes[third])[:_TRIED]:
                if (self.table[one, everywhere] == whole).all():
                    return f"{self.texts[one]} - {self.texts[third]}"
        for third in range(self.simple):
            for sign, rest in ((1, target - hashes[third]), (-1, target + hashes[third])):
                if (text := partners(order, ranked, rest, third, sign)) is not None:
                    return text
        return self._product_of_sum(everywhere, wanted)

    def _product_of_sum(self, at: np.ndarray, sizes: np.ndarray) -> str | None:
        """A key times a sum of others: `num_attention_heads * (qk_nope_head_dim + qk_rope_head_dim + v_head_dim)`."""
        keys = self.table[: self.simple, at]
        sums: dict[bytes, str] = {}
        for one in range(self.simple):
            for other in range(one, self.simple):
                text = f"{self.texts[one]} + {self.texts[other]}"
                sums.setdefault((keys[one] + keys[other]).tobytes(), text)
        for factor in range(self.simple):
            row = keys[factor]
            if (row <= 0).any() or (row == 1).all() or (sizes % row).any():
                continue
            rest = sizes // row
            if (text := sums.get(rest.tobytes())) is not None:
                return f"{self.texts[factor]} * ({text})"
            for third in range(self.simple):
                if (text := sums.get((rest - keys[third]).tobytes())) is not None:
                    return f"{self.texts[factor]} * ({text} + {self.texts[third]})"
        return None


def _quotient(values: np.ndarray, divisor: Any) -> np.ndarray:
    divisor = np.broadcast_to(np.asarray(divisor), values.shape)
    found: np.ndarray = np.where(divisor > 0, values // np.maximum(divisor, 1), _MISSING)
    return found


def _is_size(value: object) -> bool:
    return value is None or isinstance(value, int | str | float | list)


def _is_layers(key: str, value: object) -> bool:
    """Whether a value has an entry for each layer: a list, or a text with a letter for each."""
    return isinstance(value, list) or ("pattern" in key and isinstance(value, str))


def _number(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else _MISSING


def _varies(configs: Sequence[dict[str, Any]], key: str) -> bool:
    found = {config[key] for config in configs if type(config.get(key)) is int}
    return len(found) > 1
