"""Units of bytes, seconds and rates, and how they are written for people. Everything that is printed uses these."""

from __future__ import annotations

from collections.abc import Sequence

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB


def format_bytes(size: float, beside: float | None = None) -> str:
    """Bytes in the largest binary unit that they fill: `79.65 GiB`, `512.00 MiB`, `1.00 KiB`, `12 B`.

    The parts of a sum are written in the unit of the whole, `beside`: `0.93 GiB` of `362.33 GiB`.
    """
    for unit, scale in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(size if beside is None else beside) >= scale:
            return f"{size / scale:,.2f} {unit}"
    return f"{size:.0f} B"


def format_seconds(seconds: float) -> str:
    """A time with at least three digits, in the largest unit that it fills: `12.35 s`, `46.5 ms`, `3.20 us`."""
    if abs(seconds) >= 1 or not seconds:
        return f"{seconds:,.2f} s"
    value, unit = (seconds * 1e3, "ms") if abs(seconds) >= 1e-3 else (seconds * 1e6, "us")
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:.{digits}f} {unit}"


def format_milliseconds(seconds: float) -> str:
    """A time in milliseconds whatever its size, for lists whose entries are compared: `0.0123 ms`, `250 ms`."""
    return f"{seconds * 1e3:.3g} ms"


def format_bandwidth(bytes_per_s: float) -> str:
    """Bytes per second in the decimal units of data sheets: `450 GB/s`, `3.35 TB/s`."""
    if bytes_per_s < 1e12:
        return f"{bytes_per_s / 1e9:.3g} GB/s"
    digits = ".0f" if bytes_per_s >= 1e14 else ".3g"
    return f"{bytes_per_s / 1e12:{digits}} TB/s"


def format_compute(flops_per_s: float) -> str:
    """Floating-point operations per second in the decimal unit of data sheets: `989 TFLOP/s`, `2250 TFLOP/s`."""
    digits = ".0f" if flops_per_s >= 1e14 else ".3g"
    return f"{flops_per_s / 1e12:{digits}} TFLOP/s"


def first_of(values: Sequence[object], most: int) -> str:
    """As many as `most` of them, and the number of the others: `a, b and 3 more`."""
    return ", ".join(map(str, values[:most])) + (f" and {len(values) - most} more" if len(values) > most else "")
