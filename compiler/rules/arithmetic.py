"""What rules have in common: numbers that they suggest, second places of a conflict, and findings with one remedy."""

from __future__ import annotations

from collections.abc import Iterable

from parcompile.diagnostics import Fix, Path, Related, Safety
from parcompile.layout.groups import Axis, divisors
from parcompile.spec.resolve import Resolution

from . import Finding

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


def listed(numbers: Iterable[int]) -> str:
    """`96, 112`, ascending."""
    return ", ".join(str(number) for number in sorted(numbers))


def to_switch_off(message: str, place: tuple[str, ...], advice: str = "set it to false") -> Finding:
    """A switch that the plan does not need, or that nothing acts on; the fix sets it to false."""
    return Finding(message, place, help=advice, fixes=(Fix.setting(place, False, Safety.CHANGES_COST),))


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


# Findings with one remedy.


def removable(
    path: Path, message: str, hint: str | None = None, related: tuple[Related, ...] = (), safety: Safety = Safety.SAFE
) -> Finding:
    """A finding that goes away without the key at `path`."""
    return Finding(message, path, hint, (Fix.removing(path, safety),), related)


def settable(
    path: Path,
    values: Iterable[object],
    message: str,
    hint: str | None = None,
    related: tuple[Related, ...] = (),
    safety: Safety = Safety.CHANGES_COST,
) -> Finding:
    """A finding that goes away with any of these values at `path`."""
    return Finding(message, path, hint, tuple(Fix.setting(path, value, safety) for value in values), related)
