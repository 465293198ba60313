"""A cell: one small training run, by its features. A plain mapping of a feature's name to its value.

The first value of a feature is its simplest: what shrinking goes back to.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Cell = Mapping[str, Any]

AXES = ("dp", "tp", "cp", "pp")
"""Whose sizes multiply to the number of ranks. Experts are spread over ranks of these."""

MASKS = ("none", "uneven", "empty")
"""Labels: all count; a drawn number of the first ones of each sample do not; one sample has none that counts."""

FAMILIES: Mapping[str, Mapping[str, Any]] = json.loads(Path(__file__).with_name("families.json").read_text())
"""Of tiny models: the `class` of the configuration, its `keys` beside the sizes of all, its names in `torchtitan`."""

FEATURES: Mapping[str, tuple[Any, ...]] = {
    "family": tuple(FAMILIES),
    "dp": (1, 2, 4),
    "accumulation": (1, 2, 4),
    "micro_batch": (1, 2),
    "masks": MASKS,
    "clipping": (0.0, 0.5),
    "dtype": ("fp32", "bf16", "fp64"),
    "tied": (False, True),
    "packed": (False, True),
    "isolation": (False, True),
}
"""Of every engine. An engine adds its own, or narrows these. `isolation`: labels of the last document alone count, and
a second run, in which all tokens in front of it are others, has to train the same."""

AUX_LOSS = {"aux_loss": (False, True)}
"""Of engines that train the balancing loss of experts: `AUX_COEFFICIENT` times the mean of all micro-batches' own."""

RESUME = {"resume": (False, True)}
"""Of engines that save and load: the last step is that of new processes, which load what the first ones saved."""

_FILE = "a configuration file"
_CANDIDATES, _ATTEMPTS = 60, 6000
"""How many are drawn for each cell that is taken; where the engine supports none of them, up to so many."""


class OtherEngineError(RuntimeError):
    """The engine built something else than the cell asks for: such a run proves nothing, and is red."""


def planned(cell: Cell) -> Mapping[str, Any]:
    """What somebody's own plan gives a cell (`given.of_plan`); empty where there is none."""
    settings: Mapping[str, Any] = json.loads(cell.get("plan") or "{}")
    return settings


def has_experts(cell: Cell) -> bool:
    """Whether the model has a mixture of experts."""
    own = planned(cell)
    return own["experts"] if own else "num_experts_per_tok" in FAMILIES[cell["family"]]["keys"]


def has_window(cell: Cell) -> bool:
    """Whether attention looks back so many tokens only."""
    return FAMILIES[cell["family"]]["keys"].get("sliding_window") is not None


def refusal(*reasons: tuple[bool, str]) -> str | None:
    """The first of the reasons that holds; None where none does."""
    return next((why for holds, why in reasons if holds), None)


def unsupported(cell: Cell) -> str | None:
    """Why one plain process cannot run a cell; None where it can."""
    experts, dtype, isolated = has_experts(cell), cell["dtype"], cell.get("isolation", False)
    return refusal(
        (experts and dtype == "fp64", "transformers multiplies stacked experts in 16 and 32 bits"),
        (experts and dtype == "bf16", "in bf16 the last bits decide which expert a token goes to"),
        (not experts and cell.get("aux_loss", False), "a balancing loss takes experts"),
        (isolated and not cell["packed"], "documents are told apart where they are packed"),
        (isolated and cell.get("aux_loss", False), "a balancing loss sees all documents"),
        (cell["masks"] == "empty" and batch_size(cell) == 1, "the only sample has no label that counts"),
    )


def without_folders(text: str) -> str:
    """Files of packages by their place in them, others by their names: what a message says on every machine."""
    text = re.sub(r"/\S*/(?:site|dist)-packages/", "", text)
    return re.sub(r"(?<![\w.:/])(?:/[\w.+=@~-]+){2,}/?", lambda match: Path(match[0]).name, text)


def world_size(cell: Cell) -> int:
    """How many ranks a cell takes."""
    return math.prod(int(cell.get(axis, 1)) for axis in AXES)


def batch_size(cell: Cell) -> int:
    """Samples of a step."""
    return int(cell["dp"]) * int(cell["micro_batch"]) * int(cell["accumulation"])


def text_of(cell: Cell, features: Mapping[str, tuple[Any, ...]]) -> str:
    """What differs from the simplest values: `qwen3 dp 2 tp 2 clipping 0.5 seed 7`."""
    first = {"seed": 0, **{name: values[0] for name, values in features.items()}}
    said = [str(planned(cell).get("name", cell.get("family", "a cell")))]
    for name, value in cell.items():
        if name == "config" and value:
            said.append(_FILE)
        elif name not in ("family", "plan") and value != first.get(name):
            said.append(name if value is True else f"{name} {value}")
    return " ".join(said)


def cell_of(text: str, features: Mapping[str, tuple[Any, ...]], given: Cell) -> dict[str, Any]:
    """The features that `text_of` writes so; `given` are those of a plan or a configuration, of which it says the name.

    Raises:
        ValueError: a word is no feature, or no value of one.
    """
    phrases: dict[str, tuple[str, Any]] = {family: ("family", family) for family in features["family"]}
    if given.get("config"):
        phrases[_FILE] = ("config", given["config"])
    if given.get("plan"):
        phrases[planned(given)["name"]] = ("plan", given["plan"])
    known = {**features, **{name: (*features.get(name, ()), value) for name, value in given.items()}}
    known = {name: values for name, values in known.items() if name not in ("family", "config", "plan")}
    for name, values in known.items():
        for one in values:
            phrases[name if one is True else f"{name} {one}"] = (name, one)
    found, rest = dict[str, Any](), " ".join(text.split())
    while rest:
        word, _, further = rest.partition(" ")
        value: Any = further.partition(" ")[0]
        if begins := [one for one in phrases if f"{rest} ".startswith(f"{one} ")]:
            said = max(begins, key=len)
            word, value = phrases[said]
        elif word == "seed":
            said, value = f"seed {value}", int(value) if value.isdecimal() else value
        elif word in known:
            said = f"{word} {value!r}" if value else f"{word} has no value"
            raise ValueError(f"{said}: the engine's adapter has {', '.join(map(str, known[word]))}")
        elif rest.startswith(_FILE):
            raise ValueError("the cell has a configuration file: name it by --config")
        else:
            raise ValueError(
                f"{word!r} is no word of a cell: write a family ({', '.join(features['family'])}) "
                f"and features ({', '.join((*known, 'seed'))})"
            )
        if word in found:
            raise ValueError(f"the cell has {word} twice")
        found[word], rest = value, rest[len(said) :].strip()
    return found


def simplest(features: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """The cell of which every feature has its first value."""
    return {**{name: values[0] for name, values in features.items()}, "seed": 0}


def draw(
    features: Mapping[str, tuple[Any, ...]],
    supports: Callable[[Cell], str | None],
    count: int,
    seed: int,
    most_ranks: int,
) -> list[dict[str, Any]]:
    """Up to `count` cells that the engine supports, which together have as many pairs of values as possible.

    A value that none of them has gets a cell of its own, in place of one that no value needs. The same arguments give
    the same cells.
    """
    generator = random.Random(seed)  # noqa: S311 -- nothing secret
    covered, cells = set[Any](), list[dict[str, Any]]()

    def best_of(choices: Mapping[str, tuple[Any, ...]], number: int) -> dict[str, Any] | None:
        best, gain = None, -1
        for attempt in range(_ATTEMPTS):
            if attempt >= _CANDIDATES and best is not None:
                break
            cell = {name: generator.choice(values) for name, values in choices.items()}
            cell["seed"] = seed * 10_000 + number
            if world_size(cell) > most_ranks or supports(cell):
                continue
            new = len(_pairs(cell) - covered)
            if new > gain:
                best, gain = cell, new
        return best

    for number in range(count):
        if best := best_of(features, number):
            covered |= _pairs(best)
            cells.append(best)
    for name, value in undrawn(features, cells):
        if (name, value) not in undrawn(features, cells):
            continue  # the cell of another value has it
        without = [at for at in range(len(cells)) if undrawn(features, cells) == undrawn(features, _but(cells, at))]
        if without and (best := best_of({**features, name: (value,)}, cells[without[-1]]["seed"] - seed * 10_000)):
            cells = [*_but(cells, without[-1]), best]
    return cells


def undrawn(features: Mapping[str, tuple[Any, ...]], cells: Sequence[Cell]) -> list[tuple[str, Any]]:
    """Values of features that no cell has."""
    return [(name, one) for name, of in features.items() for one in of if all(cell[name] != one for cell in cells)]


def _but(cells: Sequence[dict[str, Any]], at: int) -> list[dict[str, Any]]:
    return [*cells[:at], *cells[at + 1 :]]


def _pairs(cell: Cell) -> set[Any]:
    values = sorted((name, str(value)) for name, value in cell.items() if name != "seed")
    return set(itertools.combinations(values, 2))
