"""Learns what decides a value, as a tree of questions with expressions as leaves, and writes it as one expression."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from questions import Questions
from terms import Terms

from parcompile.model.tables import INDICES
from parcompile.model.tables.expression import compiled

At = tuple[int, tuple[int, ...]]
"""Which configuration, and which indices of its layers."""
Tree: TypeAlias = "str | tuple[str, Tree, Tree]"
"""An expression, or a question with what holds if its answer is yes and if it is no."""

_CANNOT = (TypeError, IndexError, KeyError, ValueError, ZeroDivisionError)
_JOINING = (" or ", " and ", " if ")
_DEPTH = 8
_TRIES = 40


class UnlearnableError(ValueError):
    """Nothing that is asked explains a value."""


class Learner:
    """Learns from configurations."""

    def __init__(self, configs: Sequence[dict[str, Any]], keys: Sequence[str]) -> None:
        self.configs, self.keys = configs, keys
        self.terms, self.questions = Terms(configs, keys), Questions(configs, keys)
        self._lists = [key for key in keys if any(_is_sizes(config.get(key)) for config in configs)]
        self._sizes: dict[str, None] = {}
        self._conditions: dict[str, None] = {}
        """What was learnt before: a bias is there and as large as its weight is, which more models show."""

    def choice(self, samples: Sequence[At], labels: Sequence[str], *, layered: bool) -> str:
        """An expression for labels that are expressions already (`True`, `'full_attention'`)."""
        texts, answers = self._asked(samples, labels, layered=layered)
        numbers = {label: number for number, label in enumerate(sorted(set(labels)))}
        wanted = np.array([numbers[label] for label in labels])

        def grow(at: np.ndarray, depth: int) -> Tree:
            here = wanted[at]
            if (here == here[0]).all():
                return labels[at[0]]
            best = self._telling(answers, at, here)
            if best is None or depth > _DEPTH:
                best = self._balanced(answers, at) if depth <= _DEPTH else None
            if best is None:
                raise UnlearnableError(f"nothing asked tells {sorted({labels[one] for one in at})[:4]} apart")
            yes = answers[best, at]
            if {labels[one] for one in at[yes]} == {"False"} and {labels[one] for one in at[~yes]} == {"True"}:
                opposite = np.flatnonzero((answers[:, at] == ~yes).all(1))
                if len(opposite):
                    return texts[opposite[0]], "True", "False"
            return texts[best], grow(at[yes], depth + 1), grow(at[~yes], depth + 1)

        found = written(grow(np.arange(len(samples)), 0))
        if set(labels) == {"True", "False"} and any(word in found for word in _JOINING):
            self._conditions.setdefault(found)
        return found

    def _asked(self, samples: Sequence[At], labels: Sequence[str], *, layered: bool) -> tuple[list[str], np.ndarray]:
        """The questions, and what was learnt with them and holds wherever this does; answers: [questions, samples]."""
        texts, answers = self.questions.answers(samples, layered=layered)
        there = np.array([label == "True" for label in labels])
        rows = {text: np.array([bool(one) for one in self._values(text, samples)]) for text in self._conditions}
        rows = {text: row for text, row in rows.items() if row[there].all()}
        if not rows:
            return texts, answers
        return [*texts, *rows], np.vstack([answers, *rows.values()])

    def _values(self, text: str, samples: Sequence[At]) -> Iterator[Any]:
        """What an expression gives for each sample; None where it cannot be computed."""
        value = compiled(text)
        for at, indices in samples:
            try:
                yield value({**self.configs[at], **dict(zip(INDICES, indices, strict=False))})
            except _CANNOT:
                yield None

    @staticmethod
    def _telling(answers: np.ndarray, at: np.ndarray, here: np.ndarray) -> int | None:
        """The first question of those that tell most about the labels; None where none tells anything."""
        best, least = None, _entropy(here) - 1e-9
        for number in range(len(answers)):
            yes = answers[number, at]
            if 0 < yes.sum() < len(at):
                found = _entropy(here[yes]) + _entropy(here[~yes])
                if found < least - 1e-9:
                    best, least = number, found
        return best

    @staticmethod
    def _balanced(answers: np.ndarray, at: np.ndarray) -> int | None:
        """A question that splits evenly, where none tells anything on its own (an exclusive or)."""
        share = answers[:, at].mean(1) if len(answers) else np.array([])
        usable = np.flatnonzero((share > 0.2) & (share < 0.8))
        return int(usable[np.argmin(np.abs(share[usable] - 0.5))]) if len(usable) else None

    def size(self, samples: Sequence[At], sizes: Sequence[int], *, layered: bool) -> str:
        """An expression for numbers."""
        whole = self._fit(samples, sizes, range(len(samples)), sums=True)
        if whole is not None:
            return whole
        for text in self._sizes:
            if all(map(operator.eq, self._values(text, samples), sizes)):
                return text
        texts, answers = self.questions.answers(samples, layered=layered)

        def grow(at: np.ndarray, depth: int) -> Tree:
            leaf = self._fit(samples, sizes, at, sums=len(at) > 5)
            if leaf is not None:
                return leaf
            usable = [number for number in range(len(texts)) if 0 < answers[number, at].sum() < len(at)]
            chance = [number for number in usable if texts[number] in self.questions.rare]
            likely = [number for number in usable if texts[number] not in self.questions.rare]
            first = likely
            if self._differs_by_layer(samples, sizes, at):
                first = sorted(likely, key=lambda number: not self.questions.asks_of_layer(texts[number]))
            stages = ((likely, False), (first[:_TRIES], True), (chance, False), (chance[:_TRIES], True))
            for numbers, sums in stages:
                best, most = None, 0
                for number in numbers:
                    yes = answers[number, at]
                    sides = [at[yes], at[~yes]]
                    fits = [len(side) for side in sides if self._fit(samples, sizes, side, sums=sums) is not None]
                    if len(fits) == 2:
                        best = number
                        break
                    if fits and fits[0] > max(most, 2):
                        best, most = number, fits[0]
                if best is not None:
                    break
            if best is None or depth > _DEPTH:
                examples = [(samples[one][1], sizes[one]) for one in at[:3]]
                raise UnlearnableError(f"no expression gives {examples}")
            yes = answers[best, at]
            return texts[best], grow(at[yes], depth + 1), grow(at[~yes], depth + 1)

        found = written(grow(np.arange(len(samples)), 0))
        self._sizes.setdefault(found)
        return found

    @staticmethod
    def _differs_by_layer(samples: Sequence[At], sizes: Sequence[int], at: Any) -> bool:
        """Whether layers of one configuration have different sizes."""
        held: dict[int, int] = {}
        return any(held.setdefault(samples[one][0], sizes[one]) != sizes[one] for one in at)

    def _fit(self, samples: Sequence[At], sizes: Sequence[int], at: Any, *, sums: bool) -> str | None:
        if self._differs_by_layer(samples, sizes, at):
            return self._fit_entries(samples, sizes, at)
        held = {samples[one][0]: sizes[one] for one in at}
        found = self.terms.find(list(held), list(held.values()), sums=sums)
        return found if found is not None or not self._lists else self._fit_entries(samples, sizes, at)

    def _fit_entries(self, samples: Sequence[At], sizes: Sequence[int], at: Any) -> str | None:
        """An entry of a list of sizes, one for each layer."""
        for key in self._lists:
            entries: list[int] = []
            for one in at:
                if (entry := _entry(self.configs[samples[one][0]].get(key), samples[one][1])) is None:
                    break
                entries.append(entry)
            if len(entries) < len(at):
                continue
            for factor in (1, 2, 3):
                if all(factor * entry == sizes[one] for entry, one in zip(entries, at, strict=True)):
                    return (f"{factor} * " if factor > 1 else "") + f"{key}[layer]"
            for other, values in self.terms.keys.items():
                if all(e * values[samples[one][0]] == sizes[one] for e, one in zip(entries, at, strict=True)):
                    return f"{key}[layer] * {other}"
        return None


def _entry(value: Any, indices: tuple[int, ...]) -> int | None:
    if isinstance(value, list) and indices and indices[0] < len(value) and type(value[indices[0]]) is int:
        return int(value[indices[0]])
    return None


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and any(type(entry) is int for entry in value)


def _entropy(labels: np.ndarray) -> float:
    counts = np.bincount(labels).astype(float)
    counts = counts[counts > 0]
    return float(-(counts * np.log(counts / counts.sum())).sum()) if len(counts) else 0.0


def written(tree: Tree) -> str:
    """A tree as an expression."""
    if isinstance(tree, str):
        return tree
    question, yes, no = tree[0], written(tree[1]), written(tree[2])
    if yes == no:
        return yes
    rules: tuple[tuple[bool, Callable[[], str]], ...] = (
        (yes == "True" and no == "False", lambda: question),
        (yes == "False" and no == "True", lambda: negated(question)),
        (yes == "True", lambda: f"{_inner(question)} or {_inner(no)}"),
        (no == "True", lambda: f"{_inner(negated(question))} or {_inner(yes)}"),
        (no == "False", lambda: f"{_inner(question)} and {_inner(yes)}"),
        (yes == "False", lambda: f"{_inner(negated(question))} and {_inner(no)}"),
    )
    for applies, text in rules:
        if applies:
            return text()
    yes, question = (_inner(one) if " if " in one else one for one in (yes, question))
    return f"{yes} if {question} else {no}"


def negated(question: str) -> str:
    """The opposite question."""
    if any(word in question for word in _JOINING):
        return f"not ({question})"
    if " is None" in question:
        return question.replace(" is None", " is not None")
    if " == '" in question and "[" not in question:
        return question.replace(" == ", " != ")
    # What cannot be compared is false, and so its negation is true: only equality of values may be turned around.
    return f"not {question}" if question.isidentifier() else f"not ({question})"


def _inner(text: str) -> str:
    return f"({text})" if any(word in text for word in _JOINING) else text
