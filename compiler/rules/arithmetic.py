"""What rules have in common: numbers that they suggest, second places of a conflict, fixes that are tried.

Tries fixes before they are offered: one that does not remove its diagnostic, or that adds an error, is none.

That what is mended turns out too large for its accelerator is no fault of the fix: it works, but comes behind those
after which the run fits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from parcompile.diagnostics import Diagnostic, Fix, Path, Related, Replacement, Safety
from parcompile.layout.grid import Axis
from parcompile.spec.resolve import Resolution
from parcompile.text import Document
from parcompile.text.edits import EditError, apply_edit

from .registry import PEAK_RULE

# Numbers that rules suggest.


def nearest_multiples(value: int, divisor: int) -> tuple[int, ...]:
    """The multiples of `divisor` next to `value`, the nearer one first, the lower one only when it is positive."""
    lower = value // divisor * divisor
    near = [multiple for multiple in (lower, lower + divisor) if multiple > 0]
    return tuple(sorted(near, key=lambda multiple: (abs(multiple - value), multiple)))


def nearest_divisors(wanted: int, *totals: int, count: int = 2) -> tuple[int, ...]:
    """The common divisors of `totals` that are closest to `wanted`, closest first, smaller before larger."""
    common = [number for number in divisors(min(totals)) if all(total % number == 0 for total in totals)]
    return tuple(sorted(common, key=lambda number: (abs(number - wanted), number))[:count])


def divisors(total: int) -> tuple[int, ...]:
    """The divisors of `total`, ascending; in the time of its square root."""
    low: list[int] = []
    high: list[int] = []
    number = 1
    while number * number <= total and number < 1_000_000:
        if total % number == 0:
            low.append(number)
            if number * number != total:
                high.append(total // number)
        number += 1
    return (*low, *reversed(high))


def listed(numbers: Iterable[int]) -> str:
    """`96, 112`, ascending."""
    return ", ".join(str(number) for number in sorted(numbers))


# Where a spec says something, for the second place of a conflict.


def model_path(spec: Resolution, *keys: str) -> tuple[str, ...]:
    """Where the model's dimension stands: under one of `keys` when written out, else at the preset or the file."""
    given = spec.get("model")
    for key in (*keys, "preset", "hf_config"):
        if key in given:
            return ("model", key)
    return ("model",)


def axis_path(axis: Axis) -> tuple[str, str]:
    """Where the size of an axis stands."""
    return "parallelism", axis.value


def also(spec: Resolution, *paths: tuple[str, ...]) -> tuple[Related, ...]:
    """The places that are given in the spec, each with the value that stands there."""
    found = []
    for path in paths:
        if spec.given(*path):
            value = spec.get(*path)
            written = str(value).lower() if isinstance(value, bool) else value
            shown = f"{path[-1]} {written}" if isinstance(value, (int, float, str)) else path[-1]
            found.append(Related(f"{shown} is set here", path))
    return tuple(found)


def layout_change(spec: Resolution) -> Safety:
    """What another layout changes: the cost; the numbers too, when the global batch follows from the layout."""
    if spec.given("training", "global_batch_size"):
        return Safety.CHANGES_COST
    return Safety.CHANGES_NUMERICS


# Tries fixes before they are offered: one that does not remove its diagnostic, or that adds an error, is none.

Recheck = Callable[[Document], Sequence[Diagnostic]]
"""Everything that is wrong with a document."""

MOST_OFFERED = 3
"""So many fixes of one diagnostic are worth reading."""
MOST_WORK = 1500
LARGEST = 200_000
"""A trial checks the whole file again, which takes as long as there are findings: of trials times findings there are no
more than so many, and none in a file of more characters than this. What is not tried is not offered."""


def tried(diagnostics: Iterable[Diagnostic], document: Document, recheck: Recheck) -> list[Diagnostic]:
    """The diagnostics, each with the first few of its fixes that work."""
    found = list(diagnostics)
    errors = Counter(_identity(one) for one in found if one.is_error)
    budget = MOST_WORK // max(1, len(found)) if len(document.text) <= LARGEST else 0
    kept: list[Diagnostic] = []
    for one in found:
        fixes = _working(one, errors, document, recheck) if len(one.fixes) <= budget else []
        budget -= len(one.fixes)
        kept.append(replace(one, fixes=tuple(fixes)))
    return kept


def _working(one: Diagnostic, errors: Counter[tuple[str, Path]], document: Document, recheck: Recheck) -> list[Fix]:
    working: list[Fix] = []
    too_large: list[Fix] = []
    for fix in one.fixes:
        if len(working) == MOST_OFFERED:
            break
        try:
            changed = document
            for edit in fix.edits:
                changed = apply_edit(changed, edit)
        except EditError:
            continue
        after = recheck(changed)
        gone = all(_identity(other) != _identity(one) for other in after)
        added = Counter(_identity(other) for other in after if other.is_error) - errors
        if gone and not added:
            working.append(replace(fix, replacement=_replacement(document, changed)))
        elif gone and all(code == PEAK_RULE for code, _ in added):
            # Nobody could tell what memory it takes before: what is too large comes last.
            too_large.append(replace(fix, replacement=_replacement(document, changed)))
    return [*working, *too_large][:MOST_OFFERED]


def _replacement(before: Document, after: Document) -> Replacement:
    """The one stretch of text in which two documents differ."""
    old, new = before.text, after.text
    start = _same(old, new)
    rest = min(len(old), len(new)) - start
    same = _same(old[: -rest - 1 : -1], new[: -rest - 1 : -1])
    end = len(old) - same
    return Replacement(before.source.position(start), before.source.position(end), new[start : len(new) - same])


def _same(left: str, right: str) -> int:
    """Characters that two texts begin with."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(left), len(right)))


def _identity(one: Diagnostic) -> tuple[str, Path]:
    return one.code, one.path
