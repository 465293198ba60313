"""How the layers of a model are cut into stages where a spec leaves it open: evenly if they divide, else nearly so."""

from __future__ import annotations

from parcompile.layout.stages import PipelineSplit

from .variant import CUT_KEYS

VIRTUAL, FIRST, LAST, EMBEDDING, LOSS = CUT_KEYS
INTERLEAVED = {2: 2, 8: 4}
"""Virtual stages of a rank that are tried, each from so many stages on: a short pipeline has little to win by more."""


def cut(layers: int, pp: int) -> dict[str, object] | None:
    """What a spec has to say so that `layers` go onto `pp` stages; nothing where they divide.

    The head with its loss, or with it the embedding, counts as a layer where the rest then divides. Otherwise all
    stages but the first and the last hold equally many, and these two share what is left, the last the smaller half.
    None where there are fewer layers than stages.
    """
    if layers < pp:
        return None
    if layers % pp == 0:
        return {}
    for accounts in ({LOSS: True}, {EMBEDDING: True, LOSS: True}):
        if (layers + len(accounts)) % pp == 0:
            return dict(accounts)
    middle = -(-layers // pp)
    while layers - middle * (pp - 2) < 2:
        middle -= 1
    ends = layers - middle * (pp - 2)
    return {FIRST: ends - ends // 2, LAST: ends // 2}


def cuts(layers: int, pp: int) -> list[dict[str, object]]:
    """The ways to cut that a search compares: as few chunks as stages, and interleaved ones where layers divide."""
    plain = cut(layers, pp)
    if plain is None:
        return []
    if pp == 1:
        return [{}]
    tried = [virtual for least, virtual in INTERLEAVED.items() if pp >= least]
    return [plain, *({**plain, VIRTUAL: virtual} for virtual in tried if _divides(layers, pp, virtual, plain))]


def _divides(layers: int, pp: int, virtual: int, plain: dict[str, object]) -> bool:
    accounts = {"embedding": bool(plain.get(EMBEDDING)), "loss": bool(plain.get(LOSS))}
    if FIRST in plain:
        return False
    try:
        counts = PipelineSplit(pp, virtual, **accounts).counts(layers)
    except ValueError:
        return False
    return min(counts) >= 1
