"""A model reduced to what the stages of this rank hold, under the names that it has in the whole model."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from parcompile.model.families import FAMILIES
from parcompile.model.family import Family
from parcompile.model.shape import ModelShape
from parcompile.plan import Plan
from parcompile.plan.holding import Holding, layer_numbers, module_numbers
from parcompile.runtime.errors import RunError


class Elsewhere(nn.Module):
    """Stands where the whole model has a module that another stage holds."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, *_: Any, **__: Any) -> NoReturn:
        """Refuses: nothing on this stage may need it.

        Raises:
            RunError: always.
        """
        raise RunError(f"{self.name} is on another stage of the pipeline: call engine.train_batch(iterator)")

    def extra_repr(self) -> str:
        """Which module."""
        return self.name


class NoPositions(nn.Module):
    """Stands for a learned table of positions on stages that another one precedes: nothing is to be added."""

    def forward(self, *_: Any, **__: Any) -> Tensor:
        """Zero."""
        return torch.zeros(())


class Skipped(nn.Identity):
    """Stands for a module behind the layers that another stage holds: base models call it, and nobody looks at it."""


def hold_stage(model: nn.Module, plan: Plan, pp_rank: int) -> None:
    """Takes out of a whole Hugging Face model, in place, what the pp rank does not hold.

    What stays keeps its name, so that slices, files and checkpoints find it. A tied embedding stays on the last stage
    too, as the head's weight.
    """
    held, family = Holding(plan, pp_rank), FAMILIES[plan.spec.model.shape.model_type]
    path = plan.parameters.layer[0].name.partition(".{layer}")[0]
    layers: Any = model.get_submodule(path)
    kept = nn.ModuleList()
    for number in module_numbers(layer_numbers(held.stages), plan.parameters.layers_per_module):
        kept.add_module(str(number), layers[number])
    _put(model, path, kept)
    for name in sorted({one.name.rpartition(".")[0] for one in plan.parameters.before}):
        if all(one.name not in held for one in plan.parameters.before if one.name.startswith(f"{name}.")):
            _put(model, name, _instead(name, family, plan.spec.model.shape))
    if held.has_head:
        return
    causal: Any = model
    causal.set_output_embeddings(Elsewhere("the head"))
    for name in sorted({one.name.rpartition(".")[0] for one in plan.parameters.after}):
        inside = name.startswith(f"{family.base}.")
        _put(model, name, Skipped() if inside else Elsewhere(name))


def _instead(name: str, family: Family, shape: ModelShape) -> nn.Module:
    """What stands for a module before the layers on stages that another one precedes."""
    if name == f"{family.base}.{family.positions}":
        return NoPositions()
    # What makes several residual streams of one: those that were received take their place.
    makes_streams = name.startswith(tuple(f"{family.base}.{one}" for part in shape.parts for one in part.inputs))
    skipped = makes_streams or name == f"{family.base}.{family.embedding_norm}"
    return Skipped() if skipped else Elsewhere(name)


def _put(model: nn.Module, path: str, module: nn.Module) -> None:
    owner, _, name = path.rpartition(".")
    setattr(model.get_submodule(owner), name, module)
