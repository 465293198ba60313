"""Primes: tables of hashed n-grams have as many rows as a prime says, one of its own for each head (Qwen4-Exp)."""

from __future__ import annotations

import functools

_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
"""These bases tell primes from other numbers below 3.3e24 (Sorenson and Webster, arXiv 1509.00864)."""
MOST = 100_000
"""So many primes are counted at most."""


@functools.lru_cache(maxsize=256)
def sum_of_primes(start: int, before: int, count: int) -> int:
    """The sum of `count` primes that follow one another: of those that are `start` or more, behind the first `before`.

    Raises:
        ValueError: they are more than anybody has tables for.
    """
    if before < 0 or count < 0 or before + count > MOST:
        raise ValueError(f"{before} + {count} primes are not counted: at most {MOST} are")
    number, found, total = max(start, 2), 0, 0
    while found < before + count:
        if is_prime(number):
            total += number if found >= before else 0
            found += 1
        number += 1
    return total


def is_prime(number: int) -> bool:
    """Whether a number has no divisor but 1 and itself (Miller and Rabin's test)."""
    if number < 2 or any(number % one == 0 for one in _WITNESSES):
        return number in _WITNESSES
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    return all(_passes(number, pow(one, odd, number), twos) for one in _WITNESSES)


def _passes(number: int, power: int, twos: int) -> bool:
    if power in (1, number - 1):
        return True
    return any((power := power * power % number) == number - 1 for _ in range(twos - 1))
