"""What may decide whether a parameter exists, and how large it is: questions about keys and about the layer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from building import LAYERS

from parcompile.model.tables import INDICES
from parcompile.model.tables.expression import compiled

_WORDS = 12
"""Kinds of layers that a list may name, at most."""


class Questions:
    """The questions that configurations can be asked, plainest first, with their answers."""

    def __init__(self, configs: Sequence[dict[str, Any]], keys: Sequence[str]) -> None:
        self.configs = configs
        self.general: list[str] = []
        self.layered: list[str] = []
        self.rare: set[str] = set()
        """Questions whether two sizes are the same: they may well be by chance."""
        held = {key: [config.get(key) for config in configs] for key in keys}
        self._about_values(held)
        self._about_layers(held)
        self._of_layers = frozenset(self.layered)
        self._answers: dict[Any, tuple[list[str], np.ndarray]] = {}

    def _about_values(self, held: dict[str, list[Any]]) -> None:
        large, late = [], []
        for key, values in held.items():
            if len({json.dumps(value) for value in values}) < 2 or any(isinstance(value, dict) for value in values):
                continue
            if any(isinstance(value, bool) for value in values):
                self.general.append(key)
            if any(value is None for value in values):
                self.general.append(f"{key} is None")
            words = {value for value in values if isinstance(value, str)}
            if any(isinstance(value, bool) for value in values) and words:
                self.general.append(f"{key} is True")
            for word in sorted(words - {"another"})[:_WORDS]:
                self.general.append(f"{key} == {word!r}")
            numbers = {value for value in values if type(value) is int}
            if any(value <= 0 for value in numbers):
                late.append(f"{key} > 0")
            elif numbers and any(isinstance(value, list) for value in values):
                late.append(f"{key} > 0")  # a list is not compared with a number, and so the answer is no
            if any(value < 0 for value in numbers):
                late.append(f"{key} < 0")
            if 1 in numbers and len(numbers) > 1:
                late.append(f"{key} > 1")
            if any(value > 64 for value in numbers):
                large.append(key)
            if any(isinstance(value, list) for value in values) and any(value == [] for value in values):
                late.append(f"len({key}) > 0")
        for at, one in enumerate(large):
            for other in large[at + 1 :]:
                same = [a == b for a, b in zip(held[one], held[other], strict=True)]
                if any(same) and not all(same):
                    late.append(f"{one} == {other}")
                    self.rare.add(late[-1])
        self.general += late

    def _about_layers(self, held: dict[str, list[Any]]) -> None:
        lists, small = [], []
        self.layered += ["layer == 0", "layer == 1", "layer % 2 == 0"]
        for key, values in held.items():
            if any(isinstance(value, list) for value in values):
                lists.append(key)
            elif "pattern" in key and any(isinstance(value, str) for value in values):
                letters = sorted({letter for value in values if isinstance(value, str) for letter in value})
                self.layered += [f"{key}[layer] == {letter!r}" for letter in letters[:_WORDS]]
            if any(type(value) is int and 0 <= value < 12 for value in values):
                small.append(key)
        for key in lists:
            entries = {json.dumps(entry) for value in held[key] if isinstance(value, list) for entry in value}
            words = sorted(json.loads(entry) for entry in entries if entry.startswith('"'))
            numbers = sorted(json.loads(entry) for entry in entries if entry.lstrip("-").isdigit())
            flags = [entry for entry in entries if entry in ("true", "false")]
            self.layered += [f"{key}[layer] == {word!r}" for word in words[:_WORDS]]
            self.layered += [f"{key}[layer]"] * bool(flags)
            if numbers and not re.search("dim|size", key):
                self.layered += [f"layer in {key}", *(f"{key}[layer] == {one}" for one in numbers[:6])]
            self.layered += [f"{key}[layer % len({key})] == {word!r}" for word in words[:_WORDS]]
        counts = [key for key in small if LAYERS.search(key)]
        self._about_rounds(held, lists, small)
        for key in small:
            if re.search("head|token|vocab|expert|rank", key) and not re.search("layer|freq|period|interval|step", key):
                continue
            self.layered += [f"layer < {key}", f"layer <= {key}", f"layer % {key} == 0", f"(layer + 1) % {key} == 0"]
            self.layered += [f"layer % {key} == {other}" for other in small if "offset" in other and other != key]
            self.layered += [f"layer >= {count} - {key}" for count in counts if count != key]
            self.layered += [
                f"(layer - {other} + 1) % {key} == 0" for other in small if "offset" in other and other != key
            ]
        self.layered += [f"layer == {count} - 1" for count in counts]
        for number in (2, 3, 4, 5, 6, 8):
            self.layered += [f"layer < {number}", f"layer % {number} == 0", f"(layer + 1) % {number} == 0"]
            self.layered += [f"layer % {number} == {rest}" for rest in range(1, number - 1)]

    def _about_rounds(self, held: dict[str, list[Any]], lists: list[str], small: list[str]) -> None:
        """Layers of a list that take turns: which of them they are, and whose entries stand in one of them."""
        for key in lists:
            if not all(isinstance(value, list) and value == sorted(set(value)) for value in map(_numbers, held[key])):
                continue
            before = f"len([one for one in {key} if one < layer])"
            for other in small:
                if re.search("block|group", other):
                    self.layered += [f"{before} < {other}", f"item % {other} == {before} % {other}"]

    def asks_of_layer(self, text: str) -> bool:
        """Whether a question may have another answer for another layer."""
        return text in self._of_layers

    def answers(self, samples: Sequence[tuple[int, tuple[int, ...]]], *, layered: bool) -> tuple[list[str], np.ndarray]:
        """The questions whose answers differ, and the answers, [questions, samples]."""
        key = (tuple(samples), layered)
        if key not in self._answers:
            texts = self.general + (self.layered if layered else [])
            ask: list[Callable[[Any], Any]] = [compiled(text) for text in texts]
            rows = np.zeros((len(texts), len(samples)), dtype=bool)
            for column, (at, indices) in enumerate(samples):
                scope = {**self.configs[at], **dict(zip(INDICES, indices, strict=False))}
                for row, question in enumerate(ask):
                    try:
                        rows[row, column] = bool(question(scope))
                    except (TypeError, IndexError, ValueError, ZeroDivisionError):
                        rows[row, column] = False
            keep, seen = [], set()
            for row in range(len(texts)):
                answer = rows[row].tobytes()
                if answer not in seen and 0 < rows[row].sum() < len(samples):
                    seen.add(answer)
                    keep.append(row)
            self._answers[key] = [texts[row] for row in keep], rows[keep]
        return self._answers[key]


def _numbers(value: Any) -> Any:
    """A list of numbers; None where it is no such."""
    return value if isinstance(value, list) and all(type(one) is int for one in value) else None
