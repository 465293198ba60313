"""Injection: replaces, in place, what tensor and context parallelism change in a Hugging Face causal language model.

The model's own `base_model_tp_plan` says which linear is column- and which is row-parallel; the compiled plan says
which slice each rank holds. Both have to agree. What neither knows is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from parcompile.layout.tensor import TensorLayout
from parcompile.model.parameters import Parameter

from ..errors import RunError
from ..groups import Mesh
from ..loss import ParallelCausalLoss
from ..tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from .attention import RingPlace, use_ring_attention
from .regions import enter_region, sum_gradient

COLUMN, ROW, PARTIAL = "colwise", "rowwise", "replicated_with_grad_allreduce"
"""Entries of Hugging Face's tensor-parallel plans that are executed."""


def inject(model: nn.Module, mesh: Mesh) -> nn.Module:
    """Turns a whole model into this rank's part of it, in place, and returns it.

    Weights are sliced from the model's own: whoever starts from the same whole weights starts the same run, whatever
    the layout.

    Raises:
        RunError: the model is not the plan's, or has something that cannot be injected; the message names the module.
    """
    if getattr(model, "parcompile_mesh", None) is not None:
        raise RunError("the model was injected already: inject a fresh one", everywhere=True)
    _Injection(model, mesh).run()
    model.parcompile_mesh = mesh  # type: ignore[assignment]
    return model


@dataclass(frozen=True, slots=True)
class _Slice:
    """A parameter of the plan, and this rank's ranges of it."""

    parameter: Parameter
    layout: TensorLayout
    ranges: tuple[tuple[int, int], ...]

    @property
    def replicated(self) -> bool:
        return self.layout.replicas > 1


class _Injection:
    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self.model, self.mesh, self.plan = model, mesh, mesh.plan
        self.tensors = mesh.plan.tensors()
        self.tp_group = mesh.parallel_group("tp")
        self.sequence_parallel = mesh.plan.spec.parallelism.sequence_parallel
        self.prefix: str = getattr(model, "base_model_prefix", "")

    def run(self) -> None:
        self._compare_with_plan()
        self._ring()
        self._vocabulary()
        if self.tp_group is not None:
            self._linears()
            self._partial_gradients()
        self.model.loss_function = ParallelCausalLoss(self.mesh, self.plan.spec.model.shape.vocab_size)  # type: ignore[assignment]

    # -- the plan against the model -----------------------------------------------------------------------------------

    def _compare_with_plan(self) -> None:
        """Every parameter of the model is in the plan with its shape, and the other way round."""
        planned = {name: parameter.shape for name, parameter in self.plan.parameters.expanded()}
        found = {name: tuple(parameter.shape) for name, parameter in self.model.named_parameters()}
        for name, shape in found.items():
            if name not in planned:
                raise RunError(f"the model has {name} {list(shape)}, which the plan does not know", everywhere=True)
            if planned[name] != shape:
                raise RunError(
                    f"{name} is {list(shape)} in the model and {list(planned[name])} in the plan", everywhere=True
                )
        missing = planned.keys() - found.keys()
        if missing:
            raise RunError(f"the plan has {min(missing)}, which the model does not have", everywhere=True)

    def _slice(self, name: str) -> _Slice:
        parameter, layout = self.tensors[re.sub(r"\.\d+\.", ".{layer}.", name)]
        assert layout.ranges is not None
        return _Slice(parameter, layout, layout.ranges[self.mesh.index("tp")])

    # -- attention, vocabulary, linears -------------------------------------------------------------------------------

    def _ring(self) -> None:
        parallelism = self.plan.spec.parallelism
        length = self.plan.spec.training.sequence_length
        use_ring_attention(self.model, RingPlace(self.mesh.parallel_group("cp"), parallelism.cp_layout, length))

    def _vocabulary(self) -> None:
        """The embedding and the head, cut along the padded vocabulary; tied ones stay tied."""
        model: Any = self.model
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        shape = self.plan.spec.model.shape
        layout = next(
            layout for parameter, layout in self.tensors.values() if parameter.split and parameter.split.pads_vocabulary
        )
        padded = layout.full_shape[0]
        if self.tp_group is None and padded == shape.vocab_size:
            return
        tied = head.weight is embedding.weight
        model.set_input_embeddings(
            VocabParallelEmbedding.from_embedding(
                embedding,
                group=self.tp_group,
                padded_num_embeddings=padded,
                sequence_parallel=self.sequence_parallel,
                sequence_dim=1,
            )
        )
        new_head = ColumnParallelLinear.from_linear(
            head, padded_out_features=padded, group=self.tp_group, input_is_ready=True
        )
        if tied:
            new_head.weight = model.get_input_embeddings().weight
        model.set_output_embeddings(new_head)
        if self.tp_group is not None:
            enter_region(new_head, self.tp_group, sequence_parallel=self.sequence_parallel)

    def _linears(self) -> None:
        assert self.tp_group is not None
        parents: dict[str, nn.Module] = {}
        for name, module, style in self._entries():
            if style == PARTIAL:
                for parameter in module.parameters():
                    sum_gradient(parameter, self.tp_group)
                continue
            if not isinstance(module, nn.Linear):
                raise RunError(
                    f"{name} is a {type(module).__name__}: only linears are injected as {style}", everywhere=True
                )
            piece = self._slice(f"{name}.weight")
            wanted = 0 if style == COLUMN else 1
            if piece.layout.dim != wanted:
                raise RunError(
                    f"{name} is {style} for transformers, but the plan cuts dim {piece.layout.dim}", everywhere=True
                )
            parent_name, _, child = name.rpartition(".")
            parent = self.model.get_submodule(parent_name)
            setattr(parent, child, self._parallel(module, piece, style))
            if style == COLUMN:
                parents[parent_name] = parent
        for parent in parents.values():
            enter_region(parent, self.tp_group, sequence_parallel=self.sequence_parallel)

    def _parallel(self, linear: nn.Linear, piece: _Slice, style: str) -> nn.Module:
        if style == COLUMN:
            replicas = self.mesh.kv_replica_group if piece.replicated else None
            return ColumnParallelLinear.from_linear(
                linear, group=self.tp_group, ranges=piece.ranges, replica_group=replicas, input_is_ready=True
            )
        return RowParallelLinear.from_linear(
            linear,
            group=self.tp_group,
            ranges=piece.ranges,
            input_is_parallel=True,
            sequence_parallel=self.sequence_parallel,
            sequence_dim=1,
        )

    def _entries(self) -> Iterator[tuple[str, nn.Module, str]]:
        """Modules that the model's own tensor-parallel plan names, with their entry."""
        entries: dict[str, str] = getattr(self.model.config, "base_model_tp_plan", None) or {}
        if not entries:
            raise RunError(f"{type(self.model).__name__} has no base_model_tp_plan to inject from", everywhere=True)
        for name, module in self.model.named_modules():
            local = name.removeprefix(f"{self.prefix}.")
            style = entries.get(re.sub(r"(?<=\.)\d+(?=\.)", "*", local))
            if style is None:
                continue
            if style not in (COLUMN, ROW, PARTIAL):
                raise RunError(
                    f"{name} is {style!r} in the model's tensor-parallel plan, which is not injected", everywhere=True
                )
            yield name, module, style

    def _partial_gradients(self) -> None:
        """With sequence parallelism, what works on a shard of the sequence has only that shard's gradient."""
        if not self.sequence_parallel:
            return
        assert self.tp_group is not None
        rows = {name: parameter for name, (parameter, _) in self.tensors.items() if parameter.sequence_parallel}
        for name, parameter in self.model.named_parameters():
            if re.sub(r"\.\d+\.", ".{layer}.", name) in rows:
                sum_gradient(parameter, self.tp_group)


def count_parameters(model: nn.Module) -> int:
    """Elements of all parameters of this rank, tied ones once."""
    return sum(parameter.numel() for parameter in set(model.parameters()) if isinstance(parameter, torch.Tensor))
