"""Values without their places in the script: those that stand in another file."""

from __future__ import annotations

from .state import State
from .values import Hole, Piece, Value


def placeless(value: Value) -> Value:
    """A value whose pieces and holes stand nowhere in the script."""
    return tuple(
        Hole(one.text, one.names, None, None, one.can_be_words)
        if isinstance(one, Hole)
        else Piece(one.text, None, one.splits, one.is_quoted)
        for one in value
    )


def without_places(state: State) -> None:
    """Takes away the places of what stands in another file. What the script itself has said is kept by its text."""
    for name, value in state.variables.items():
        if name in state.arrays:
            state.variables[name] = tuple(placeless(one) for one in value)  # type: ignore[arg-type]
        else:
            state.variables[name] = placeless(value)  # type: ignore[arg-type]
