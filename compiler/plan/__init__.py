"""The plan: the one artefact that the runtime reads, and what is made of it."""

from .plan import Plan, PlanError, Refusal
from .tree import compile_plan, load_plan, plan_from_tree, plan_tree

__all__ = [
    "Plan",
    "PlanError",
    "Refusal",
    "compile_plan",
    "load_plan",
    "plan_from_tree",
    "plan_tree",
]
