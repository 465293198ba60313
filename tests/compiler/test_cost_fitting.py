"""The bounded, robust least squares."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from parcompile.cost.fitting import fit

POINTS = [index / 10 for index in range(40)]


def test_known_coefficients_are_found_again() -> None:
    def residuals(values: Sequence[float]) -> list[float]:
        return [values[0] * math.exp(-values[1] * x) + values[2] - (2 * math.exp(-0.7 * x) + 0.5) for x in POINTS]

    assert fit(residuals, [1.0, 0.2, 0.0], [0, 0, 0], [10, 5, 2]) == pytest.approx([2, 0.7, 0.5], rel=1e-3)


def test_a_coefficient_stays_within_its_bounds_and_the_others_adapt() -> None:
    def residuals(values: Sequence[float]) -> list[float]:
        return [values[0] + values[1] * x - (3 + 2 * x) for x in POINTS]

    found = fit(residuals, [1.0, 1.0], [0, 0], [5, 1.5], scale=100)
    assert found[1] == pytest.approx(1.5)
    assert found[0] == pytest.approx(3 + 0.5 * sum(POINTS) / len(POINTS), rel=1e-3)


def test_runs_that_went_wrong_do_not_pull_the_fit_away() -> None:
    def residuals(values: Sequence[float]) -> list[float]:
        return [values[0] * x - 2 * x * (10 if index % 8 == 5 else 1) for index, x in enumerate(POINTS)]

    assert fit(residuals, [1.0], [0], [50], scale=0.05)[0] == pytest.approx(2, rel=0.02)
