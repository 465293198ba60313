"""What pictures are drawn of: a plan and what it is estimated to cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from parcompile.cost.estimate import Estimate, estimate
from parcompile.layout.groups import CP_LEVELS, DENSE_AXES, EMBEDDING, EXPERT_DP, KV_REPLICA, Axis
from parcompile.plan import Plan
from parcompile.spec.values import workload_of

AXIS_OF_GROUP: Mapping[str, Axis] = {
    KV_REPLICA: Axis.TP,
    EMBEDDING: Axis.PP,
    EXPERT_DP: Axis.EP,
    "dp-cp": Axis.DP,
    **dict.fromkeys(CP_LEVELS, Axis.CP),
}
"""The axis in whose colour a group's traffic is drawn, where it is not the group's own name."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A plan with its estimate."""

    plan: Plan
    estimate: Estimate

    @classmethod
    def of(cls, plan: Plan) -> Subject:
        """The plan, estimated.

        Raises:
            ValueError: the layout cannot be estimated.
        """
        return cls(plan, estimate(workload_of(plan.spec)))

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes along which ranks differ, innermost first; tp when there is one rank only."""
        parallelism = self.plan.spec.parallelism
        found = tuple(axis for axis in parallelism.order if axis in DENSE_AXES and parallelism.size(axis) > 1)
        return found or (Axis.TP,)
