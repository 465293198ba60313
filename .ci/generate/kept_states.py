"""What modules that carry a state keep for backward, as sums of products of their sizes: least squares over draws.

The recurrences of transformers make as many tensors as a piece of a sequence has tokens or chunks. What those of one
module and type hold together is the same sum of products in all draws; `rows_of` finds it. What goes into the layer's
block is left out: it is counted with the inputs of blocks.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from scipy.optimize import nnls

from parcompile.cost.recurrent import PIECES, ROWS, SPREAD, state_answers, state_sizes
from parcompile.model.blocks.block import StateCut
from parcompile.model.blocks.recurrent import Recurrent

DRAWS, FEWEST, UNSEEN = (40, 120, 240, 480), 14, 6
"""Draws of each spread that rows are read off, more where fewer tell nothing; of each end of a tree; of the gate."""
NEAR, EXACT = 0.002, 1e-7
"""By so much rows may miss what an unseen draw keeps, and of all, a draw that they are read off."""
DEEPEST = 3
"""Questions on the way to rows, beside those of the spread."""
LARGEST = 4
"""Ranks over which the tokens of a rank are spread under sequence parallelism: it divides them."""
INPUT = re.compile("proj")
"""The module that takes what goes into the block."""


@dataclass(frozen=True)
class Spread:
    """How long the sequences of a draw are, and over how many ranks they are spread."""

    length: int
    cp: int = 1
    layout: str = "zigzag"
    batches: tuple[int, ...] = (3, 5)
    """Sizes of a micro-batch: a number of each position is none of each token."""

    @property
    def pieces(self) -> int:
        """Of a sequence, on a rank."""
        return 2 if self.cp > 1 and self.layout == "zigzag" else 1

    @property
    def axes(self) -> dict[str, Any]:
        """Of the plan."""
        return {"cp": self.cp, "cp_layout": self.layout} if self.cp > 1 else {}


SPREADS = (Spread(0), Spread(0, 2), Spread(0, 2, "contiguous"))
"""That rows are read off, with several sequences in a micro-batch and with one."""


def changed(spread: Spread, config: dict[str, Any], pick: random.Random) -> Spread:
    """Other sizes of the modules of a configuration that carry a state, and a length that goes with them."""
    chunk = 64
    for key in config.keys() & {"chunk_size", "mamba_chunk_size", "block_size"}:
        chunk = config[key] = pick.choice([4, 8, 12, 16, 20])
    if "block_size" in config:
        config["num_attention_heads"] *= 2
    if "linear_num_heads" in config:
        config["linear_num_heads"] = pick.choice([8, 12, 16])
    if "linear_num_value_heads" in config:
        config["linear_num_key_heads"] = pick.choice([8, 16])
        config["linear_num_value_heads"] = config["linear_num_key_heads"] * pick.choice([1, 1, 2, 3])
    for key in sorted(config.keys() & {"linear_head_dim", "linear_key_head_dim", "linear_value_head_dim"}):
        config[key] = pick.choice([4, 6, 8, 10, 14, 18, 22])
    if config.keys() & {"mamba_dt_rank", "time_step_rank"}:  # a step for each token
        piece = pick.choice([4, 8, 12, 16, 20])
    else:
        piece = chunk * pick.choice([1, 1, 2, 2, 3, 4])
        if "block_size" not in config:  # whose last block may not be filled up
            piece -= pick.choice([0, 0, 0, 2, chunk // 4])
    piece += -piece % (LARGEST // spread.pieces)
    return replace(spread, length=piece * spread.pieces * spread.cp)


def tree_of(layers: Callable[[Spread], Iterator[Any]], others: Sequence[Any], wrong: list[str], word: str) -> Any:
    """The rows of a type by questions, from its layers of each spread; of another type, where they give the same."""
    spreads = [replace(one, batches=batches) for batches in (Spread(0).batches, (1,)) for one in SPREADS]
    draws = [layers(spread) for spread in spreads]
    seen = [list(itertools.islice(some, UNSEEN)) for some in draws]
    if not all(seen):
        wrong.append(f"{word}: no draws of a spread")
        return None
    for tree in others:
        if all(abs(off(tree, one)) < EXACT for some in seen for one in some):
            return tree
    ends: list[Any] = []
    for number, (some, more, spread) in enumerate(zip(seen, draws, spreads, strict=True)):
        known = [ends[number - len(SPREADS)], *others] if number >= len(SPREADS) else others
        if (end := _end(some, more, known, wrong, f"{word}: {spread}")) is None:
            return None
        ends.append(end)
    whole, one = (
        _asked(SPREAD, _asked(PIECES, zigzag, contiguous), alone)
        for alone, zigzag, contiguous in (ends[: len(SPREADS)], ends[len(SPREADS) :])
    )
    return _asked(ROWS, whole, one)


def _asked(question: str, holds: Any, holds_not: Any) -> Any:
    return holds if holds == holds_not else [question, holds, holds_not]


def _end(some: list[Any], more: Iterator[Any], known: Sequence[Any], wrong: list[str], where: str) -> Any:
    """The rows of the layers of one spread."""
    missed = math.inf
    for count in DRAWS:
        some += itertools.islice(more, count - len(some))
        unseen = list(itertools.islice(more, UNSEEN))
        end = split(some, known)
        missed = math.inf if end is None or not unseen else max(abs(off(end, one)) for one in unseen)
        if missed < EXACT:
            return end
        some += unseen
    if missed > NEAR:
        wrong.append(f"{where}: off by {missed:.2%} after {len(some)} draws")
        return None
    return end


def cut_of(layer: Any) -> StateCut:
    """What its rank has."""
    rows = layer.tokens * layer.cp // layer.length
    return StateCut(layer.tp, layer.cp, rows, layer.pieces, layer.length // layer.cp // layer.pieces)


def part_of(layer: Any) -> Recurrent | None:
    """What a layer's state is of."""
    return next((one for one in layer.sort.parts if isinstance(one, Recurrent)), None)


def kept(layer: Any) -> list[tuple[str, str, int]]:
    """Of each tensor that the module of a state keeps its own module, type and bytes; without what goes into it."""
    every = [one for one in layer.tensors if layer.is_of_state(one[0])]
    if every and every[0][2] == layer.sort.shape.hidden_size * layer.tokens and INPUT.search(every[0][0]):
        every = every[1:]
    return [(name, dtype.removeprefix("part of "), count * size) for name, dtype, count, size in every]


_OF_HEADS = ("heads", "heads·key_dim", "heads·value_dim")
_OF_STATES = ("heads·key_dim·value_dim", "heads·key_dim·key_dim")
_OF_CHUNKS = (*_OF_HEADS, *_OF_STATES, *(f"chunk·{one}" for one in _OF_HEADS))
_OF_TOKENS = (*_OF_HEADS, "", "groups", "key_dim", "groups·key_dim", "channels", "step_rank", "gate_rank")
STEPS: Sequence[Mapping[str, Sequence[str]]] = (
    {
        "tokens": _OF_TOKENS,
        "chunks": ("", *_OF_CHUNKS, "chunk·chunk·heads"),
        "pieces": ("", *_OF_HEADS, *_OF_STATES, "halo·channels"),
        "slots": ("", *_OF_HEADS, "halo", "chunk", "chunk·heads", "chunk·chunk", "chunk·chunk·heads"),
    },
    {
        "later": _OF_CHUNKS,
        "several": (*_OF_HEADS, *_OF_STATES),
        "positions": ("", "heads"),
        **dict.fromkeys(("pairs", "squares"), ("", "heads")),
        "layer": ("", "heads", "key_dim", "value_dim", "chunk·chunk"),
    },
    {"whole": _OF_TOKENS},
)
"""By what rows are of, products that recurrences have: sums are of the first that suffice."""


def features(layer: Any) -> dict[tuple[str, str], float]:
    """By basis and product, what may be a part of what a layer keeps."""
    part = part_of(layer)
    assert part is not None
    numbers, bases = state_sizes(cut_of(layer), part)
    return {
        (basis, name): bases[basis] * math.prod(numbers[one] for one in name.split("·") if one)
        for step in STEPS
        for basis, names in step.items()
        for name in names
    }


def split(layers: Sequence[Any], known: Sequence[Any] = ()) -> Any:
    """Rows, or a question and the same of the layers that answer it by yes and by no; None: there are none.

    Those that are known go before others, where they give what the layers keep.
    """
    every = [answers(one) for one in layers]
    asked = sorted({one for own in every for one in own}, key=lambda one: ("." in one, one))

    @cache
    def rows(those: tuple[int, ...]) -> Any:
        own = [layers[number] for number in those]
        alike = (tree for tree in known if all(abs(off(tree, one)) < EXACT for one in own))
        return next(alike, None) or rows_of(own)

    def tree(those: tuple[int, ...], questions: int) -> Any:
        if (found := rows(those)) is not None or not questions:
            return found
        for question in asked:
            holds, holds_not = (
                tuple(number for number in those if every[number].get(question, False) == answer)
                for answer in (True, False)
            )
            if min(len(holds), len(holds_not)) < FEWEST or (first := tree(holds, questions - 1)) is None:
                continue
            if (second := tree(holds_not, questions - 1)) is not None:
                return [question, first, second]
        return None

    trees = (tree(tuple(range(len(layers))), questions) for questions in range(DEEPEST + 1))
    return next((one for one in trees if one is not None), None)


def answers(layer: Any) -> dict[str, bool]:
    """To the questions that may tell apart what modules keep."""
    part = part_of(layer)
    assert part is not None
    own = {name: answer for name, answer in layer.flags.items() if name.startswith(f"{type(part).__name__}.")}
    return {name: answer for name, answer in own.items() if ">" not in name} | state_answers(cut_of(layer), part)


def rows_of(layers: Sequence[Any]) -> dict[str, dict[str, float]] | None:
    """The sums of products of each module and type, together; None where there is none."""
    every, held = [features(one) for one in layers], [kept(one) for one in layers]
    courses: dict[tuple[float, ...], tuple[str, str]] = {}
    for name in every[0]:
        values = np.array([one[name] for one in every])
        if values.max():
            courses.setdefault(tuple(np.round(values / values.max(), 9)), name)
    names = list(courses.values())
    matrix = np.array([[one[name] for name in names] for one in every])
    known = itertools.accumulate(STEPS, lambda before, more: {**before, **more})
    steps = [[index for index, (basis, _) in enumerate(names) if basis in step] for step in known]
    whole = np.array([sum(size for *_, size in own) for own in held], dtype=float)
    sums: Counter[tuple[str, str]] = Counter()
    goals: dict[tuple[str, str], Any] = defaultdict(lambda: np.zeros(len(layers)))
    for number, own in enumerate(held):
        for module, dtype, size in own:
            goals[module, dtype][number] += size
    for goal in sorted(goals.values(), key=lambda one: -one.sum()):  # the one that may fail first
        found = next(filter(None, (_sum_of(matrix, step, goal, whole) for step in steps)), None)
        if found is None:
            return None
        for index, size in found:
            sums[names[index]] += size
    rows: dict[str, dict[str, float]] = {}
    for (basis, name), size in sorted(sums.items()):
        if (rounded := round(size, 3)) != 0:
            rows.setdefault(basis, {})[name] = rounded
    return rows


def _sum_of(matrix: Any, columns: Sequence[int], goal: Any, whole: Any) -> list[tuple[int, float]] | None:
    """Which of these columns make up the goal, and how often each; None where they miss it."""
    scale = goal + goal.max() * 1e-3
    scaled = matrix[:, columns] / scale[:, None]
    most = scaled.max(axis=0)
    sizes, _ = nnls(scaled / most, goal / scale, maxiter=300 * len(columns))
    chosen = [index for index, size in enumerate(sizes) if size > 1e-6]
    sizes, *_ = np.linalg.lstsq(scaled[:, chosen] / most[chosen], goal / scale, rcond=None)
    sizes = sizes / most[chosen]
    own = [columns[index] for index in chosen]
    if (np.abs(matrix[:, own] @ sizes - goal) / whole).max() > EXACT:
        return None
    return [(index, float(size)) for index, size in zip(own, sizes, strict=True)]


def off(tree: Any, layer: Any) -> float:
    """By how much rows miss what the module of a layer's state keeps."""
    own, of_sizes = {**layer.flags, **answers(layer)}, features(layer)
    while isinstance(tree, list):
        tree = tree[1] if own.get(tree[0], False) else tree[2]
    counted = sum(of_sizes[basis, name] * size for basis, rows in tree.items() for name, size in rows.items())
    return counted / max(1, sum(size for *_, size in kept(layer))) - 1
