"""What the rules say of a plan whose spec is not at hand."""

from __future__ import annotations

from parcompile.diagnostics import Diagnostic
from parcompile.plan import Plan
from parcompile.plan.written import written
from parcompile.rules import MEMORY_RULES, check
from parcompile.spec.resolve import Resolution


def remarks(plan: Plan) -> tuple[Diagnostic, ...]:
    """What there is to say of a plan, without places in a file: that it does not fit is its only possible error."""
    return tuple(one for one in check(Resolution(written(plan))) if not one.is_error or one.code in MEMORY_RULES)
