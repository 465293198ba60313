"""The goals of ring attention, and how far from each a run of its benchmark was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from harness import quartiles, ratios

RINGS = ("torch all-gather", "torch all-to-all", "ring-flash-attn")


def goals(found: dict[str, Any]) -> Iterator[str]:
    """A line for each: what, the median with its quartiles or the figure, and what it should be."""
    for part in found["times"]:
        yield from _of_times(part)
    for part in found["wire"]:
        yield _line(_where(part), "bytes on the wire / the least", part["sent"] / part["least"], most=1.0)
    for part in found["peaks"]:
        taken = part["bytes"]
        if "32/8" in part["shape"]:
            if "ring-flash-attn" in taken:
                ratio = taken["zigzag"] / taken["ring-flash-attn"]
                yield _line(_where(part), "peak / ring-flash-attn's", ratio, most=0.36)
            yield _line(_where(part), "peak / one rank's full attention", taken["zigzag"] / taken["one rank"], most=0.5)
    for part in found["errors"]:
        ratio = max(ratios(part["errors"]["zigzag"], part["errors"]["one device"]))
        yield _line(f"bfloat16 {part['length']}", "error of dK, dV / one device's", ratio, most=0.45)


def _of_times(part: dict[str, Any]) -> Iterator[str]:
    seconds, length, backward = part["seconds"], part["length"], part["backward"]
    where = f"{_where(part)} {'forward + backward' if backward else 'forward'}"

    def faster_than(name: str, own: str = "zigzag") -> list[float]:
        return ratios(seconds[name], seconds[own])

    share = faster_than("ceiling")
    yield _line(where, "share of the ceiling", share, least=(0.97 if length >= 8192 else 0.95) if backward else None)
    peers = [name for name in RINGS if name in seconds]
    # The fastest of them in this run.
    best = min(peers, key=lambda name: quartiles(seconds[name])[1])
    leads = not backward and part["dtype"] == "bfloat16" and length <= 8192
    yield _line(where, f"time of the best ring peer ({best}) / own", faster_than(best), least=1.1 if leads else 1.0)
    yield _line(where, "time of Ulysses / own", faster_than("ulysses"), least=0.98)
    yield _line(where, "time of the contiguous ring / zigzag", faster_than("contiguous"), least=1.4)
    own, dense = part["pairs"]["packed"], part["pairs"]["dense of equal work"]
    rates = [ratio * own / dense for ratio in faster_than("dense of equal work", "packed")]
    yield _line(where, "pairs per second of packed documents / of a dense ring", rates, least=0.9)


def _where(part: dict[str, Any]) -> str:
    return f"{part['dtype']} {part['length']}"


def _line(
    where: str, what: str, value: float | list[float], *, least: float | None = None, most: float | None = None
) -> str:
    low, middle, high = quartiles(value) if isinstance(value, list) and len(value) > 1 else (None, value, None)
    middle = middle[0] if isinstance(middle, list) else middle
    spread = "" if low is None else f" ({low:.3f} … {high:.3f})"
    if least is None and most is None:
        return f"{where}: {what} {middle:.3f}{spread}"
    met = middle >= least if least is not None else middle <= most
    wanted = f"at least {least}" if least is not None else f"at most {most}"
    return f"{where}: {what} {middle:.3f}{spread}, {wanted}: {'met' if met else 'NOT met'}"
