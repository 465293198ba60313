"""What the rules say of a plan whose spec is not at hand."""

from __future__ import annotations

from parcompile.diagnostics import Diagnostic
from parcompile.plan import Plan, PlanError
from parcompile.plan.tree import written
from parcompile.rules import MEMORY_RULES, check
from parcompile.schema import validate
from parcompile.spec import Origin
from parcompile.spec.resolve import Resolution


def remarks(plan: Plan) -> tuple[Diagnostic, ...]:
    """What there is to say of a plan, without places in a file: that it does not fit is its only possible error.

    Raises:
        PlanError: what the plan says of its spec is none.
    """
    tree = written(plan)
    is_file = any(one.origin is Origin.CONFIG for one in plan.spec.provenance.values())
    wrong = validate({**tree, "model": {"hf_config": "config.json"}} if is_file else tree, "spec").diagnostics
    if wrong:
        raise PlanError(f"the plan is damaged (provenance: {wrong[0].message}): compile it again")
    return tuple(one for one in check(Resolution(tree)) if not one.is_error or one.code in MEMORY_RULES)
