"""What plug-ins are made of. docs/plugins.md says how, and which names stay.

A distribution adds rules, targets, importers or model families by entry points in the groups `parcompile.rules`,
`parcompile.targets`, `parcompile.importers` and `parcompile.families`.
"""

from __future__ import annotations

from collections.abc import Callable

from .backends.artefacts import Loss
from .backends.reading import (
    Account,
    Draft,
    Importer,
    Outcome,
    Question,
    RefusedError,
    Source,
    Undecided,
    UndecidedError,
)
from .backends.registry import Target
from .diagnostics import Edit, Fix, Related, Severity
from .model.family import Experts, Family, Latent, Norm, Refusal
from .model.tables.reading import table_like
from .plan import Plan
from .rules import Check, Example, Finding, Rule
from .spec.resolve import Resolution

__all__ = [
    "Account",
    "Draft",
    "Edit",
    "Experts",
    "Family",
    "Finding",
    "Fix",
    "Importer",
    "Latent",
    "Loss",
    "Norm",
    "Outcome",
    "Plan",
    "Question",
    "Refusal",
    "RefusedError",
    "Related",
    "Resolution",
    "Rule",
    "Severity",
    "Source",
    "Target",
    "Undecided",
    "UndecidedError",
    "rule",
    "table_like",
]


def rule(
    code: str,
    title: str,
    explanation: str,
    *,
    wrong: Example,
    right: Example,
    severity: Severity = Severity.ERROR,
    sources: tuple[str, ...] = (),
    targets: tuple[str, ...] = ("all",),
) -> Callable[[Check], Rule]:
    """Make a rule of a generator of findings; the entry point names a list of such rules.

    Args:
        code: two to eight capital letters and three digits.
        title: what it finds, in a few words.
        explanation: why that matters, for `parcompile explain`.
        wrong: a part of a spec that breaks the rule, laid over a plain spec.
        right: one that does not.
        severity: an error stops the compiler.
        sources: where the rule comes from.
        targets: "all", or the targets for which it is checked.
    """

    def made(check: Check) -> Rule:
        return Rule(code, severity, title, " ".join(explanation.split()), wrong, right, sources, targets, check)

    return made
