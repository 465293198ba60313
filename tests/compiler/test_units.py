"""Bytes, times and rates as people read them."""

from __future__ import annotations

import pytest

from parcompile.units import GIB, KIB, MIB, format_bandwidth, format_bytes, format_compute, format_seconds


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (KIB, "1.00 KiB"),
        (1.5 * MIB, "1.50 MiB"),
        (GIB - MIB, "1,023.00 MiB"),
        (79.645 * GIB, "79.64 GiB"),
        (-2 * GIB, "-2.00 GiB"),
        (4096 * GIB, "4,096.00 GiB"),
    ],
)
def test_bytes_stand_in_the_largest_binary_unit_that_they_fill(size: float, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.00 s"),
        (12.345, "12.35 s"),
        (0.9996, "1000 ms"),
        (0.0465, "46.5 ms"),
        (3.2e-6, "3.20 us"),
    ],
)
def test_times_keep_three_digits_without_an_exponent(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_rates_stand_in_the_decimal_units_of_data_sheets() -> None:
    assert (format_bandwidth(450e9), format_compute(989.4e12)) == ("450 GB/s", "989 TFLOP/s")
    assert (format_bandwidth(3.35e12), format_compute(2250e12)) == ("3.35 TB/s", "2250 TFLOP/s")
