"""Numbers that rules suggest."""

from __future__ import annotations

from collections.abc import Iterable


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
