"""Many cells of one engine, and the fewest features of those that are wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .certificate import Certificate, Proved
from .engine import Engine, code_hash
from .ranks.cells import simplest, world_size
from .ranks.comparison import RED


def prove(
    engine: Engine,
    cells: Sequence[Mapping[str, Any]],
    *,
    seed: int = 0,
    shrinks: bool = True,
    each: Callable[[int, Proved], None] | None = None,
) -> Certificate:
    """Runs cells, one after the other.

    Args:
        engine: which is asked.
        cells: values of its features; what one leaves out has its simplest value.
        seed: by which they were drawn; it is written into the certificate.
        shrinks: whether to look for the fewest features of a red cell.
        each: is told of each cell as it ends, with its number from 1.

    Raises:
        ValueError: a cell has a feature or a value that the engine has not.
        EngineError: the engine's process ended.
    """
    whole = [completed(engine.features, cell) for cell in cells]
    found = []
    for number, cell in enumerate(whole, 1):
        one = Proved(cell, engine.run(cell))
        if one.verdict == RED and shrinks:
            smallest = shrink(engine, cell)
            one = Proved(cell, one.answer, smallest)
        found.append(one)
        if each is not None:
            each(number, one)
    return Certificate(engine.name, engine.versions, code_hash(), seed, tuple(found), engine.features)


def completed(features: Mapping[str, tuple[Any, ...]], cell: Mapping[str, Any]) -> dict[str, Any]:
    """A cell with all features.

    Raises:
        ValueError: it names a feature, or gives it a value, that the engine has not.
    """
    for name, value in cell.items():
        if name == "seed" or name == "config":
            continue
        if name not in features:
            raise ValueError(f"the engine has no feature {name!r}; it has {', '.join(features)}")
        if value not in features[name]:
            known = ", ".join(map(str, features[name]))
            raise ValueError(f"{name} {value!r}: the engine's adapter has {known}")
    return {**simplest(features), **cell}


def shrink(engine: Engine, cell: Mapping[str, Any]) -> dict[str, Any]:
    """A red cell as few of whose features as possible are not the simplest: each is tried until none can go."""
    smallest, goes_on = dict(cell), True
    while goes_on:
        goes_on = False
        for candidate in _simpler(engine.features, smallest):
            if engine.run(candidate)["verdict"] == RED:
                smallest, goes_on = candidate, True
                break
    return smallest


def _simpler(features: Mapping[str, tuple[Any, ...]], cell: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Cells with one feature at its simplest; those of fewer ranks first, since they are fastest."""
    changed = [{**cell, name: values[0]} for name, values in features.items() if cell[name] != values[0]]
    yield from sorted(changed, key=world_size)


def verify(engine: Engine, certificate: Certificate) -> list[str]:
    """What differs when the cells of a certificate run again: a sentence for each; none where all are as it says.

    Raises:
        ValueError: it has features that the engine has not.
    """
    said = []
    if certificate.code != code_hash():
        said.append(f"the code that judges has {code_hash()}, that of the certificate {certificate.code}")
    for name, version in certificate.versions.items():
        if engine.versions.get(name) != version:
            said.append(f"{name} is {engine.versions.get(name)}, that of the certificate {version}")
    for one in certificate.cells:
        again = engine.run(completed(engine.features, one.cell))
        if again["verdict"] != one.verdict:
            said.append(f"{certificate.text_of(one)}: {again['verdict']}, the certificate says {one.verdict}")
    return said
