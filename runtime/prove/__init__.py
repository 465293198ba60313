"""Does an engine train what one process would? Small drawn runs of any engine, compared with plain torch.

`ranks/` runs in the engine's interpreter; what is here draws, shrinks and reports, and imports no engine.

Many cells of one engine, and the fewest features of those that are wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .certificate import Certificate, Proved, shown
from .engine import Engine, EngineError
from .given import Given, GivenError, given, of_plan
from .ranks.cells import AXES, cell_of, simplest, text_of, undrawn, world_size
from .ranks.comparison import RED

MOST_RANKS = 8


def prove(
    engine: Engine,
    cells: Sequence[Mapping[str, Any]],
    *,
    seed: int = 0,
    most_ranks: int = MOST_RANKS,
    shrinks: bool = True,
    each: Callable[[int, Proved], object] = lambda *_: None,
) -> Certificate:
    """Runs cells, one after the other.

    Args:
        engine: which is asked.
        cells: values of its features; what one leaves out has its simplest value.
        seed: by which they were drawn; it is written into the certificate.
        most_ranks: more are not started.
        shrinks: whether to look for the fewest features of a red cell, and to explain it.
        each: is told of each cell as it ends, with its number from 1.

    Raises:
        ValueError: a cell has a feature or a value that the engine has not, or takes more ranks.
        EngineError: the engine's process ended.
    """
    whole = [completed(engine.features, cell, most_ranks) for cell in cells]
    ended, known = [], list[tuple[dict[str, Any], dict[str, Any]]]()
    for number, cell in enumerate(whole, 1):
        proved = Proved(cell, engine.run(cell))
        if proved.verdict == RED and shrinks:
            smallest, says = _explained(engine, cell, known)
            proved = Proved(cell, {**proved.answer, **says}, smallest)
        ended.append(proved)
        each(number, proved)
    who = (engine.name, engine.versions, engine.wheels, engine.code)
    return Certificate(*who, seed, tuple(ended), engine.features)


def _explained(
    engine: Engine, cell: Mapping[str, Any], known: list[tuple[dict[str, Any], dict[str, Any]]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fewest features of a red cell, and what they say; of cells that are `known` where they are red here too."""
    for smallest, says in known:
        more = {name for name, value in smallest.items() if value != engine.features.get(name, (value,))[0]}
        here = all(cell[name] == smallest[name] for name in more)
        if here and engine.run({**smallest, "seed": cell["seed"]})["verdict"] == RED:
            return smallest, says
    smallest = shrink(engine, cell)
    says = {"explanation": engine.explain(smallest), **shown(engine, smallest)}
    known.append((smallest, says))
    return smallest, says


def completed(
    features: Mapping[str, tuple[Any, ...]], cell: Mapping[str, Any], most_ranks: int = MOST_RANKS
) -> dict[str, Any]:
    """A cell with all features.

    Raises:
        ValueError: it names a feature, or gives it a value, that the engine has not, or takes more ranks.
    """
    whole = simplest(features)
    for name, value in cell.items():
        if name == "seed":
            if type(value) is not int or not 0 <= value < 2**63:
                raise ValueError(f"seed {value!r} is no whole number from 0")
            whole[name] = value
        elif name not in features:
            raise ValueError(f"the engine has no feature {name!r}; it has {', '.join(features)}")
        elif name in ("config", "plan") or (cell.get("plan") and name in (*AXES, "ep")):
            if type(value) is not (str if name in ("config", "plan") else int) or value in (0, -1):
                raise ValueError(f"{name} {value!r}: this is no value of it")
            whole[name] = value
        elif value not in features[name]:
            known = ", ".join(map(str, features[name]))
            raise ValueError(f"{name} {value!r}: the engine's adapter has {known}")
        else:
            whole[name] = features[name][features[name].index(value)]  # 1 for True
    if (ranks := world_size(whole)) > most_ranks:
        sizes = " × ".join(f"{axis} {whole[axis]}" for axis in AXES if whole.get(axis, 1) != 1)
        raise ValueError(f"{sizes} takes {ranks} ranks, and at most {most_ranks} are started")
    return whole


def shrink(engine: Engine, cell: Mapping[str, Any]) -> dict[str, Any]:
    """A red cell as few of whose features as possible are not the simplest: each is tried until none can go."""
    smallest = dict(cell)
    while red := next((one for one in _simpler(engine.features, smallest) if engine.run(one)["verdict"] == RED), None):
        smallest = red
    return smallest


def _simpler(features: Mapping[str, tuple[Any, ...]], cell: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Cells with one feature at its simplest; those of fewer ranks first, since they are fastest."""
    changed = [{**cell, name: values[0]} for name, values in features.items() if cell[name] != values[0]]
    return sorted(changed, key=world_size)


def verify(engine: Engine, certificate: Certificate, most_ranks: int = MOST_RANKS) -> list[str]:
    """What differs when the cells of a certificate run again: a sentence for each; none where all are as it says.

    Raises:
        ValueError: it is of another engine, has features that this one has not, or takes more ranks.
        EngineError: the engine's process ended.
    """
    both_files = certificate.engine.endswith(".py") and engine.name.endswith(".py")  # whose content is in `code`
    if certificate.engine != engine.name and not both_files:
        raise ValueError(f"the certificate is of {certificate.engine}, and this engine is {engine.name}")
    whole = [completed(engine.features, proved.cell, most_ranks) for proved in certificate.cells]
    said = []
    if certificate.code != engine.code:
        said.append(f"the code that judges has {engine.code}, that of the certificate {certificate.code}")
    for what in ("versions", "wheels"):
        both: list[Mapping[str, str]] = [getattr(one, what) for one in (engine, certificate)]
        for name in {**both[1], **both[0]}:
            ours, theirs = (one.get(name, "not there") for one in both)
            if ours != theirs:
                said.append(f"{'the wheel of ' * (what == 'wheels')}{name} is {ours}, that of the certificate {theirs}")
    for proved, cell in zip(certificate.cells, whole, strict=True):
        again = engine.run(cell)
        if again["verdict"] != proved.verdict:
            said.append(f"{text_of(cell, engine.features)}: {again['verdict']}, the certificate says {proved.verdict}")
    return said


__all__ = [
    "Certificate",
    "Engine",
    "EngineError",
    "Given",
    "GivenError",
    "Proved",
    "cell_of",
    "given",
    "of_plan",
    "prove",
    "shrink",
    "undrawn",
    "verify",
]
