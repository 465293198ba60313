"""What a mechanism changes in a Hugging Face model, for a rank of a mesh."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from torch import nn

from parcompile.model.blocks import Block
from parcompile.runtime.groups import Mesh
from parcompile.runtime.inject.regions import Region

B = TypeVar("B", bound=Block)


class Phase(enum.IntEnum):
    """When a mechanism is injected. Inside a phase the order of `MECHANISMS` holds."""

    WHOLE = 0
    """Nothing is changed yet: parts that layers share are told apart."""
    STAGE = 1
    """Layers of other stages are gone, all weights are whole."""
    REGION = 2
    """Behind the agreement of the plan with the model; what is cut here, the generic cut of linears leaves alone."""
    CUT = 3
    """Linears are cut."""


@dataclass(frozen=True, slots=True)
class Placed:
    """The model that is injected, and where."""

    model: nn.Module
    mesh: Mesh
    base: str
    """The name of the model without its head."""
    region: Region | None
    """None: one rank has all heads and features."""

    @property
    def stack(self) -> str:
        """The name of the list of layers."""
        return self.mesh.plan.parameters.layer[0].name.partition(".{layer}")[0]

    def layers(self, block: Block) -> Iterator[tuple[int, Any]]:
        """The layers of this stage that have it."""
        for number, layer in self.model.get_submodule(self.stack).named_children():
            if int(number) in block.layers:
                yield int(number), layer


class Mechanism(ABC, Generic[B]):
    """What the runtime does for a block. One that changes nothing of the model needs none."""

    of: ClassVar[type[Block]]
    phase: ClassVar[Phase]

    @abstractmethod
    def inject(self, block: B, placed: Placed) -> None:
        """Changes this rank's layers, in place.

        Raises:
            RunError: the model is not what the plan describes.
        """
