"""The plan: the one artefact that the runtime reads, and what is made of it."""

from .plan import (
    Plan,
    PlanError,
    Refusal,
    compile_plan,
)

__all__ = [
    "Plan",
    "PlanError",
    "Refusal",
    "compile_plan",
]
