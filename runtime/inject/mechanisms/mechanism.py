"""When and where a mechanism changes a Hugging Face model, for a rank of a mesh."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from parcompile.model.family import Family
from parcompile.model.shape import ModelShape
from parcompile.runtime.errors import everywhere
from parcompile.runtime.groups import Mesh
from parcompile.runtime.inject.regions import Region
from parcompile.runtime.micro_batch import current
from parcompile.runtime.model.slices import Slices
from parcompile.runtime.ring_attention.passes import once


class Phase(enum.IntEnum):
    """When a mechanism is injected. Inside a phase the order of `CHANGES` holds."""

    WHOLE = 0
    """Nothing is changed yet: parts that layers share are told apart."""
    STAGE = 1
    """Layers of other stages are gone, all weights are whole."""
    REGION = 2
    """Behind the agreement of the plan with the model; what is cut here, the generic cut of linears leaves alone."""
    CUT = 3
    """Linears and the vocabulary are cut."""


@dataclass(frozen=True, slots=True)
class Placed:
    """The model that is injected, and where."""

    model: nn.Module
    mesh: Mesh
    family: Family
    slices: Slices
    region: Region | None
    """None: one rank has all heads and features."""

    @property
    def shape(self) -> ModelShape:
        """The model's sizes."""
        return self.mesh.plan.spec.model.shape

    @property
    def stack(self) -> str:
        """The name of the list of layers."""
        return self.mesh.plan.parameters.layer[0].name.partition(".{layer}")[0]

    def layers(self, numbers: Collection[int] | None = None) -> Iterator[tuple[int, Any]]:
        """The layers of this stage with one of these numbers; all where None is given."""
        for number, layer in self.model.get_submodule(self.stack).named_children():
            if numbers is None or int(number) in numbers:
                yield int(number), layer


Change: TypeAlias = Callable[[Placed], None]
"""Changes this rank's layers, in place, where the model has the mechanism. It raises a RunError where the model is not
what the plan describes."""


def refuse_generation(what: str) -> None:
    """Refuses a call of `generate`, for which tokens that come one by one would have to reach what the model has.

    Raises:
        RunError: it is one.
    """
    if current().alone:
        raise everywhere(
            f"generate() of a model {what} is not injected: write it with `parcompile checkpoint export DIR --hf OUT` "
            "and generate with AutoModelForCausalLM.from_pretrained(OUT)"
        )


def chosen_once(choose: Callable[[], Tensor]) -> Tensor:
    """What is chosen to attend to, without gradients, and kept where the layer is computed again.

    The attention is kept there too: the two belong together.
    """
    with torch.no_grad():
        (found,) = once(lambda: (choose(),))
    return found
