"""Which part of each parameter this rank holds: the plan's rows, looked up by the names that the model uses."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parcompile.layout.groups import KV_REPLICA
from parcompile.layout.shards import Ranges, TensorLayout, repeated_ranges
from parcompile.model import Parameter
from parcompile.model.derived_rows import CLASSIFIER
from parcompile.plan import Plan
from parcompile.plan.holding import Holding
from parcompile.runtime.errors import everywhere
from parcompile.runtime.groups import Mesh
from parcompile.runtime.tensor_parallel.partial import take_ranges

from .lora import matrix_layout, matrix_of, plain_name


@dataclass(frozen=True, slots=True)
class Slice:
    """A row of the plan and this rank's ranges of it; `ranges` is None when every rank holds the whole."""

    parameter: Parameter
    layout: TensorLayout
    ranges: tuple[tuple[int, int], ...] | None
    replica_group: dist.ProcessGroup | None
    """The ranks that hold the same slice, when there are several."""

    repeated: tuple[tuple[int, int], ...] = ()
    """The rows of this slice that those ranks hold too."""

    experts: Ranges | None = None
    """The experts that this rank holds, where they are dealt over ep."""

    def cut(self, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor; the tensor itself where that is all of it."""
        return cut(whole, self.layout, self.ranges, self.experts)

    @property
    def is_cut(self) -> bool:
        """Whether tensor-parallel ranks hold parts of it."""
        return self.layout.ranges is not None and len(self.layout.ranges) > 1

    @property
    def is_partly_repeated(self) -> bool:
        """Whether some rows of this slice are this rank's alone and others are not."""
        if self.replica_group is None or self.dim is None:
            return False
        return sum(stop - start for start, stop in self.repeated) < self.layout.local_shape[self.dim]

    @property
    def dim(self) -> int | None:
        """The dim that is cut."""
        return self.layout.dim

    @property
    def padded_size(self) -> int | None:
        """The size along the cut dim, with padding."""
        return None if self.layout.dim is None else self.layout.full_shape[self.layout.dim]


class Slices:
    """The plan's rows for one rank."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.model_type = mesh.plan.spec.model.shape.model_type
        self._tensors = mesh.plan.tensors()
        self._rows = dict(mesh.plan.parameters.expanded())
        self._holding = Holding(mesh.plan, mesh.index("pp"))

    @property
    def folds_experts(self) -> bool:
        """Whether tensor-parallel ranks hold other experts, each whole."""
        return self._mesh.plan.spec.parallelism.folds_experts

    def holds(self, name: str) -> bool:
        """Whether this rank's stages have the parameter of that name in the whole model."""
        return name in self._holding

    def has(self, name: str) -> bool:
        """Whether the whole model has a parameter of that name."""
        return name in self._rows

    def of(self, name: str) -> Slice:
        """This rank's part of the parameter of that name in the whole model."""
        parameter, layout = self._tensors[self._rows[name]]
        experts = layout.experts(self._mesh.index("ep")) if layout.ep > 1 else None
        if layout.ranges is None:
            return Slice(parameter, layout, None, None, experts=experts)
        # The ranks that hold the same kv heads; of what all tensor-parallel ranks share, those.
        same = KV_REPLICA if layout.replicas == self._mesh.plan.kv_replicas else "tp"
        replicas = self._mesh.parallel_group(same) if layout.replicas > 1 else None
        ranges = layout.ranges[self._mesh.index("tp")]
        return Slice(parameter, layout, ranges, replicas, repeated_ranges(parameter, layout), experts)

    def compare(self, model: nn.Module) -> None:
        """Checks that the whole model and the plan have the same parameters, with the same shapes.

        Raises:
            RunError: they differ; the message names the first parameter that does.
        """
        planned = _planned(self._mesh.plan)
        check_head(model, self._mesh.plan)
        found = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        for name, shape in found.items():
            if name not in planned:
                raise everywhere(f"the model has {name} {list(shape)}, which the plan does not know")
            if planned[name] != shape:
                raise everywhere(f"{name} is {list(shape)} in the model and {list(planned[name])} in the plan")
        if missing := planned.keys() - found.keys():
            raise everywhere(f"the plan has {min(missing)}, which the model does not have")


def _planned(plan: Plan) -> dict[str, tuple[int, ...]]:
    return {name: parameter.shape for name, parameter in plan.parameters.expanded()}


def check_head(model: nn.Module, plan: Plan) -> None:
    """Checks that a whole model is a classifier of sequences where the plan is for one, and only there.

    Raises:
        RunError: it is not.
    """
    planned = _planned(plan)
    if (CLASSIFIER in planned) is not (classifies := hasattr(model, CLASSIFIER.partition(".")[0])):
        raise everywhere(
            f"{type(model).__name__} is a classifier of sequences, and the plan is for a language model: write "
            "num_labels under model in the spec, or save the classifier (save_pretrained) and name its config.json "
            "as model.hf_config"
            if classifies
            else f"the plan is for a classifier of sequences ({CLASSIFIER} {list(planned[CLASSIFIER])}), which "
            f"{type(model).__name__} is not: give AutoModelForSequenceClassification.from_pretrained(..., "
            f"num_labels={planned[CLASSIFIER][0]}), or leave num_labels out of the spec"
        )


def cut(
    whole: Tensor, layout: TensorLayout, ranges: tuple[tuple[int, int], ...] | None, experts: Ranges | None = None
) -> Tensor:
    """These ranges, and of these experts, of a whole tensor; the tensor itself where that is all of it."""
    if experts is not None:
        whole = of_experts(whole, layout.expert_dim, experts)
    if ranges is None or layout.dim is None:
        return whole if experts is None else whole.clone()
    return take_ranges(whole, layout.dim, ranges, padded_size=layout.full_shape[layout.dim])


def of_experts(whole: Tensor, dim: int, experts: Ranges) -> Tensor:
    """These experts of all, which lie along `dim`; a view where they are one stretch."""
    parts = [whole.narrow(dim, start, stop - start) for start, stop in experts]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def slice_of(slices: Slices, name: str, shape: tuple[int, ...]) -> Slice:
    """This rank's part of a parameter, adapters included, whose whole shape is given."""
    matrix = matrix_of(name)
    if matrix is None:
        return slices.of(plain_name(name))
    weight = slices.of(matrix.weight)
    layout = matrix_layout(matrix, weight.layout, shape)
    return replace(weight, layout=layout, ranges=weight.ranges if layout.ranges else None)
