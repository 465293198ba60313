"""Collects models of one type: what is required to build any, which keys can be changed, and drawn configurations."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

from building import ModelType, Sample
from drawing import Draws

_CONFIGS = 150


class LeftOutError(ValueError):
    """A type whose parameters cannot be expressed."""


class TooSlowError(BaseException):
    """A type that takes too long. No `Exception`: what takes those of transformers' classes lets it through."""


class Collection:
    """The models of a type that were built so far, and the draws that they come from."""

    def __init__(self, name: str) -> None:
        self.name = name
        try:
            self.kind = ModelType(name)
        except Exception as error:
            raise LeftOutError(f"its configuration class: {_told(error)}") from error
        self.draws = Draws(self.kind, f"learn {name}")
        self.samples: list[Sample] = []
        self.configs: list[Sample] = []
        """Configurations with their models and without: what a class derives is learnt from these."""
        self.rejected: Counter[str] = Counter()
        self.builds = 0

    def why(self) -> str:
        """What most refused configurations were refused for."""
        return self.rejected.most_common(1)[0][0] if self.rejected else "none"

    def collect(self, count: int, draws: Draws | None = None, tries: int = 4, deepest: int = 6) -> list[Sample]:
        """Models of up to `deepest` layers from draws: so many, or fewer where nearly all are refused."""
        draws = draws or self.draws
        left, found = tries * count, []
        while len(found) < count and left > 0:
            left -= 1
            if (sample := self._build(draws.one(deepest=deepest))) is not None:
                found.append(sample)
        return found

    def prepare(self) -> None:
        """Finds what is required to build anything, and the keys that cannot be changed alone or to any prime."""
        if all(self._build(self.draws.one(only="")) is None for _ in range(6)) and not self._require():
            raise LeftOutError(f"no configuration can be built: {self.why()}")
        for key, default in self.draws.keys.items():
            if key in self.draws.layer_keys:
                continue
            if not self._changes(key, odd=False):
                self.draws.refused.add(key)
            elif isinstance(default, int | None) and not isinstance(default, bool) and not self._changes(key, odd=True):
                self.draws.whole.add(key)

    def configure(self) -> None:
        """Adds configurations without their models."""
        self.configs = list(self.samples)
        for _ in range(_CONFIGS):
            self.configs += self.configuration(self.draws, 15)

    def configuration(self, draws: Draws, deepest: int) -> list[Sample]:
        """A configuration without its model; none where the class refuses what was drawn."""
        with contextlib.suppress(Exception):
            return [self.kind.configuration(draws.one(deepest=deepest))[1]]
        return []

    def _build(self, given: dict[str, Any]) -> Sample | None:
        self.builds += 1
        try:
            return self.kind.model(given)
        except Exception as error:
            self.rejected[_told(error)] += 1
            return None

    def _changes(self, key: str, *, odd: bool) -> bool:
        """Whether anything is built with another value of a key: alone, or with others."""
        for number in range(10):
            given = self.draws.one(only=key, odd=odd) if number < 5 else self.draws.one(0.6, odd=odd, besides=key)
            if key in given and (sample := self._build(given)) is not None:
                self.samples.append(sample)
                return True
        return False

    def _require(self) -> bool:
        """Looks for the fewest values with which a class whose defaults are refused builds anything."""
        for required in self._suggestions():
            if self._build({**self.draws.one(only=""), **required}) is not None:
                self.draws.required |= required
                return True
        for _ in range(60):
            given = self.draws.one(share=0.8, odd=False)
            if self._build(given) is None:
                continue
            needed = {key: value for key, value in given.items() if key not in self.draws.layer_keys}
            for key in list(needed):
                less = {other: value for other, value in given.items() if other != key}
                if self._build(less) is not None:
                    needed.pop(key)
                    given = less
            self.draws.required |= {key: value for key, value in needed.items() if not isinstance(value, list)}
            return True
        return False

    def _suggestions(self) -> Iterator[dict[str, Any]]:
        """Values that classes ask for and do not have as defaults."""
        kinds = sorted({word for words in self.draws.words.values() for word in words})
        ropes = {kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in kinds}
        if kinds:
            yield {"rope_parameters": ropes}
        for key, value in self.draws.keys.items():
            if isinstance(value, bool):
                yield {key: not value}


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
