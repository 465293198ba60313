"""What the rules say of a plan whose spec is not at hand."""

from __future__ import annotations

from parcompile.diagnostics import Diagnostic
from parcompile.plan import Plan
from parcompile.plan.written import written
from parcompile.rules import check
from parcompile.spec.resolve import Resolution


def remarks(plan: Plan) -> tuple[Diagnostic, ...]:
    """Warnings and hints about a plan, without places in a file. A plan has no errors: it was compiled."""
    return tuple(one for one in check(Resolution(written(plan))) if not one.is_error)
