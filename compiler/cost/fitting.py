"""Bounded, robust least squares in plain Python: small problems (a dozen coefficients, some thousand rows).

Levenberg-Marquardt (D. Marquardt, 1963) on coefficients scaled to their bounds. A coefficient that stands at a bound
and is pushed outwards is held there. Residuals are weighted by the soft-L1 loss 2 (√(1 + (r / s)²) − 1), so that runs
that went wrong count linearly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Residuals = Callable[[Sequence[float]], list[float]]

STEP = 1e-4
"""Relative step of the numeric Jacobian, in units of the bounds' distance."""


def fit(
    residuals: Residuals,
    start: Sequence[float],
    low: Sequence[float],
    high: Sequence[float],
    *,
    scale: float = 0.06,
    rounds: int = 60,
) -> list[float]:
    """The coefficients within their bounds that make the robust sum of squares smallest, from one start.

    Args:
        residuals: one number for each row, at the given coefficients.
        start: where to begin, within the bounds.
        low: lower bounds.
        high: upper bounds, above the lower ones.
        scale: residuals beyond this count linearly.
        rounds: at most so many steps.
    """
    width = [top - bottom for bottom, top in zip(low, high, strict=True)]

    def at(point: Sequence[float]) -> list[float]:
        return residuals([bottom + share * span for bottom, share, span in zip(low, point, width, strict=True)])

    here = [(value - bottom) / span for value, bottom, span in zip(start, low, width, strict=True)]
    rows = at(here)
    loss, damping = _loss(rows, scale), 1e-2
    for _ in range(rounds):
        slopes = _jacobian(at, here, rows)
        weights = [1 / math.sqrt(1 + (row / scale) ** 2) for row in rows]
        gradient = [sum(w * s * r for w, s, r in zip(weights, column, rows, strict=True)) for column in slopes]
        free = [
            index
            for index, push in enumerate(gradient)
            if not ((here[index] <= 0 and push > 0) or (here[index] >= 1 and push < 0))
        ]
        improved = False
        for _ in range(12):
            move = _solve(slopes, weights, gradient, free, damping)
            there = list(here)
            for index, step in zip(free, move, strict=True):
                there[index] = min(1.0, max(0.0, here[index] - step))
            trial = at(there)
            found = _loss(trial, scale)
            if found < loss:
                improved = loss - found > 1e-9 * loss
                here, rows, loss, damping = there, trial, found, max(damping / 5, 1e-9)
                break
            damping *= 4
        if not improved:
            break
    return [bottom + share * span for bottom, share, span in zip(low, here, width, strict=True)]


def _loss(rows: Sequence[float], scale: float) -> float:
    return sum(math.sqrt(1 + (row / scale) ** 2) - 1 for row in rows)


def _jacobian(at: Residuals, here: Sequence[float], rows: Sequence[float]) -> list[list[float]]:
    """One column for each coefficient."""
    columns = []
    for index, share in enumerate(here):
        step = STEP if share + STEP <= 1 else -STEP
        moved = list(here)
        moved[index] = share + step
        columns.append([(new - old) / step for new, old in zip(at(moved), rows, strict=True)])
    return columns


def _solve(
    slopes: Sequence[Sequence[float]],
    weights: Sequence[float],
    gradient: Sequence[float],
    free: Sequence[int],
    damping: float,
) -> list[float]:
    """The damped normal equations of the free coefficients, by Gaussian elimination with pivoting."""
    weighted = {index: [w * s for w, s in zip(weights, slopes[index], strict=True)] for index in free}
    matrix = [
        [sum(a * b for a, b in zip(weighted[first], slopes[second], strict=True)) for second in free]
        + [gradient[first]]
        for first in free
    ]
    for index, row in enumerate(matrix):
        row[index] += damping * row[index] + 1e-12
    size = len(matrix)
    for column in range(size):
        pivot = max(range(column, size), key=lambda one: abs(matrix[one][column]))
        matrix[column], matrix[pivot] = matrix[pivot], matrix[column]
        for other in range(column + 1, size):
            factor = matrix[other][column] / matrix[column][column]
            if factor:
                matrix[other] = [x - factor * y for x, y in zip(matrix[other], matrix[column], strict=True)]
    found = [0.0] * size
    for index in range(size - 1, -1, -1):
        known = sum(matrix[index][other] * found[other] for other in range(index + 1, size))
        found[index] = (matrix[index][size] - known) / matrix[index][index]
    return found
