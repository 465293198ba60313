"""A model reduced to what the stages of this rank hold, with tied embeddings and parts of second ones.

The parts of a second embedding that the layers of a stage get: computed on the first stage, and handed on.

Shapes: B rows, s tokens of a rank, L layers of the model, P features of a layer's part.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from parcompile.layout.groups import EMBEDDING
from parcompile.model.families import FAMILIES
from parcompile.model.family import Family
from parcompile.model.shape import ModelShape
from parcompile.plan import Plan
from parcompile.plan.holding import Holding, layer_numbers, module_numbers
from parcompile.runtime.deepspeed_patches.norm import count_on_another_stage
from parcompile.runtime.deepspeed_patches.optimizer_state import accumulated_gradient
from parcompile.runtime.errors import RunError
from parcompile.runtime.groups import Mesh
from parcompile.runtime.model.lora import plain_name
from parcompile.runtime.transport import start_all_reduce


class LayerParts:
    """Within it a base model's layers, those of a stage alone, get their own parts.

    Args:
        base: the base model, whose configuration speaks of the stage's layers only.
        layers: the numbers of these layers in the whole model.
        received: the parts of all layers [B, s, L, P]; None on the first stage, which computes them.
    """

    def __init__(self, base: Any, layers: range, received: Tensor | None) -> None:
        self._base, self._layers, self._parts = base, layers, received
        self._whole, self._compute = base.config, base.project_per_layer_inputs

    def __enter__(self) -> None:
        seen = vars(self._base)
        self._looked_up = seen.get("get_per_layer_inputs")
        seen["project_per_layer_inputs"] = self._project
        if self._parts is not None:
            seen["get_per_layer_inputs"] = lambda *_, **__: None

    def __exit__(self, *_: object) -> None:
        seen = vars(self._base)
        del seen["project_per_layer_inputs"]
        seen["get_per_layer_inputs"] = self._looked_up

    def _project(self, *args: Any, **kwargs: Any) -> Tensor:
        if self._parts is None:
            seen = vars(self._base)
            local, seen["config"] = seen["config"], self._whole
            try:
                self._parts = self._compute(*args, **kwargs)
            finally:
                seen["config"] = local
        # A stage without layers passes its hidden states through something that looks at no part.
        start = min(self._layers.start, self._parts.shape[2] - 1)
        return self._parts[:, :, start : max(self._layers.stop, start + 1)]

    def hand_on(self) -> Tensor:
        """The parts of all layers, for the next stage."""
        assert self._parts is not None, "the base model has asked for them"
        return self._parts


# A tied embedding: the first stage looks tokens up in it, the last computes logits with it.


class TiedEmbedding:
    """The weight, where this rank shares it with another stage.

    Its gradient is summed over both once in a step, and counts once in the gradient norm: on the first stage.
    """

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self._group = mesh.parallel_group(EMBEDDING)
        self._weight: nn.Parameter | None = None
        if self._group is None:
            return
        name = mesh.plan.parameters.before[0].name
        self._weight = next(one for found, one in model.named_parameters() if plain_name(found) == name)
        if not Holding(mesh.plan, mesh.index("pp")).has_embedding:
            count_on_another_stage(self._weight)

    def sum_gradient(self, optimizer: Any) -> None:
        """Adds up what both stages have."""
        if self._weight is None or not self._weight.requires_grad:
            return
        assert self._group is not None
        gradient = accumulated_gradient(optimizer, self._weight)
        with torch.no_grad():
            gradient.copy_(start_all_reduce(gradient, self._group).wait())


# A model reduced to what the stages of this rank hold, under the names that it has in the whole model.


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
