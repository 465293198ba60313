"""The plan: everything that a run needs, decided. `tree` writes it as JSON, and `load` reads that."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from parcompile.layout.groups import Groups
from parcompile.layout.sequence import CpImplementation
from parcompile.layout.shards import TensorLayout, tensor_layout
from parcompile.model import Parameter, ParameterTable
from parcompile.model.derived_rows import parameter_table
from parcompile.spec import Spec
from parcompile.text import SourceError
from parcompile.version import __version__

if TYPE_CHECKING:
    from parcompile.cost.estimate import Estimate


class PlanError(SourceError, ValueError):
    """A plan that cannot be read or used; the message is meant for the user."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the runtime will not execute a plan."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Plan:
    """A resolved spec with its identity.

    `spec_hash` is that of the spec the plan was compiled from, `plan_hash` that of the plan itself: ranks compare it
    before they start.
    """

    spec: Spec
    spec_hash: str
    plan_hash: str
    refusals: tuple[Refusal, ...] = ()
    compiler_version: str = __version__

    def __repr__(self) -> str:
        return f"Plan({self.spec.name!r}, world_size={self.world_size}, plan_hash={self.plan_hash[:19]!r})"

    @property
    def world_size(self) -> int:
        """Ranks of the run."""
        return self.spec.cluster.world_size

    @property
    def with_whole_batch(self) -> Plan:
        """The plan whose first step has `global_batch_size` already, as its last ones."""
        training = dataclasses.replace(self.spec.training, rampup_batch_size=None)
        return dataclasses.replace(self, spec=dataclasses.replace(self.spec, training=training))

    @property
    def kv_replicas(self) -> int:
        """Consecutive tp ranks that hold the same kv heads."""
        return self.spec.model.shape.kv_replicas(self.spec.parallelism.tp)

    @property
    def groups(self) -> Groups:
        """The process groups. `plan.groups(rank)` gives those of a rank, by name."""
        parallelism = self.spec.parallelism
        is_usp = parallelism.cp_implementation is CpImplementation.USP
        levels = parallelism.hierarchical_cp_sizes if is_usp else None
        tied = self.spec.model.shape.tie_word_embeddings
        return Groups(parallelism.grid, self.kv_replicas, parallelism.ep, levels, tied, parallelism.expert_tp)

    def estimate(self, *, tokens: float | None = None, gpu_hour_price: float | None = None) -> Estimate:
        """Predicted memory, traffic and time, with 90 % intervals.

        `tokens` to train on add days, and with the price of a GPU hour the cost.
        """
        # Here, because the runtime reads plans and needs no estimate.
        from parcompile.cost.estimate import estimate
        from parcompile.spec.values import workload_of

        return estimate(workload_of(self.spec), tokens=tokens, gpu_hour_price=gpu_hour_price)

    @property
    def parameters(self) -> ParameterTable:
        """Every parameter of the model."""
        return parameter_table(self.spec.model.shape)

    def tensors(self) -> dict[Parameter, tuple[Parameter, TensorLayout]]:
        """Every parameter row and how tp cuts it. Layers of different kinds may have rows of the same name."""
        parallelism = self.spec.parallelism
        tp, ep, divisor = parallelism.tp, parallelism.ep, parallelism.make_vocab_size_divisible_by
        return {
            parameter: (
                parameter,
                tensor_layout(parameter, tp, ep=ep, expert_tp=parallelism.expert_tp, vocab_divisible_by=divisor),
            )
            for parameter in self.parameters
        }
