"""Numbers that rules suggest."""

from __future__ import annotations


def nearest_multiples(value: int, divisor: int) -> tuple[int, ...]:
    """The multiples of `divisor` next to `value`, the lower one only when it is positive."""
    lower = value // divisor * divisor
    return tuple(multiple for multiple in (lower, lower + divisor) if multiple > 0)


def nearest_divisors(wanted: int, *totals: int, count: int = 2) -> tuple[int, ...]:
    """The common divisors of `totals` that are closest to `wanted`, closest first, smaller before larger."""
    common = [number for number in range(1, min(totals) + 1) if all(total % number == 0 for total in totals)]
    return tuple(sorted(common, key=lambda number: (abs(number - wanted), number))[:count])


def listed(numbers: tuple[int, ...]) -> str:
    """`96, 112` or `96 or 112` reads the same everywhere."""
    return ", ".join(str(number) for number in numbers)
