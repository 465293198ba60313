"""What single mechanisms of architectures change in a model, a file each; `parcompile.model.blocks` has their sizes."""

from typing import Any

from .mechanism import Mechanism, Phase, Placed
from .ngrams import LookNgramsUp

MECHANISMS: tuple[Mechanism[Any], ...] = (LookNgramsUp(),)
"""Every one, in the order in which they are injected."""


def inject_mechanisms(placed: Placed, phase: Phase) -> None:
    """Those of a phase that the model has."""
    shape = placed.mesh.plan.spec.model.shape
    for one in MECHANISMS:
        if one.phase is phase and (block := shape.part(one.of)) is not None:
            one.inject(block, placed)


__all__ = ["MECHANISMS", "Mechanism", "Phase", "Placed", "inject_mechanisms"]
