"""The colours of pictures and of the report page, by role, for light and dark.

Hues are those of Okabe and Ito's palette, which people with any colour blindness can tell apart; what is exact is blue
and cool, what is estimated is orange and warm. A role such as `tp-4` is one of `SHADES` shades of an axis.
"""

from __future__ import annotations

from collections.abc import Iterable

from parcompile.layout.grid import Axis

SHADES = 16

LIGHT = {
    "surface": "#ffffff",
    "ink": "#16202b",
    "soft": "#55606d",
    "line": "#d3dae2",
    "track": "#e9edf2",
    "bad": "#b3261e",
    "good": "#0b7a4b",
    "warn": "#8a5300",
    Axis.TP: "#0072b2",
    Axis.CP: "#d55e00",
    Axis.DP: "#009070",
    Axis.PP: "#a5559a",
    Axis.EP: "#8c7000",
    "weights": "#08457e",
    "gradients": "#2a7bbd",
    "master": "#5fa8dc",
    "optimizer": "#9dcbee",
    "bucket": "#c9d7e4",
    "activations": "#d55e00",
    "logits": "#f0a04b",
    "step": "#b98a4e",
    "buffers": "#f6cf8f",
    "framework": "#9aa3ad",
    "computation": "#4a5f75",
    "launches": "#8b9bad",
    "forward": "#93a9bf",
    "backward": "#4a5f75",
    "bubble": "#dfe4ea",
    "hidden": "#c3ccd6",
    "full": "#d55e00",
    "half": "#f2a86f",
}

DARK = {
    "surface": "#12171e",
    "ink": "#e8edf3",
    "soft": "#a3afbc",
    "line": "#33404e",
    "track": "#222b36",
    "bad": "#ff8a80",
    "good": "#5fd3a1",
    "warn": "#f3b95f",
    Axis.TP: "#56b4e9",
    Axis.CP: "#ff9248",
    Axis.DP: "#2fc79f",
    Axis.PP: "#d98fce",
    Axis.EP: "#e0c341",
    "weights": "#2f7fc4",
    "gradients": "#58a5e0",
    "master": "#86c2ee",
    "optimizer": "#b5dbf7",
    "bucket": "#5a6b7d",
    "activations": "#ef7d28",
    "logits": "#f7b267",
    "step": "#cf9a52",
    "buffers": "#a87c3e",
    "framework": "#76818d",
    "computation": "#8fa6bd",
    "launches": "#5f7388",
    "forward": "#a9bdd1",
    "backward": "#6d859e",
    "bubble": "#2a3441",
    "hidden": "#4b5866",
    "full": "#ff9248",
    "half": "#9c5a2c",
}

_RAMPS = {
    Axis.TP: (("#dcecf7", "#0072b2", "#002f4d"), ("#123a55", "#3f9fd8", "#c9e8fb")),
    Axis.CP: (("#fde6d3", "#d55e00", "#5c2800"), ("#4d2a12", "#e97a2c", "#ffd9b8")),
    Axis.DP: (("#d3f0e7", "#009070", "#003d2f"), ("#0d4034", "#1fae8a", "#bff3e1")),
    Axis.PP: (("#f4e1f1", "#a5559a", "#47193f"), ("#45233f", "#bd72b2", "#f5d4ef")),
    Axis.EP: (("#f5edc8", "#a08000", "#4a3b00"), ("#433911", "#b89a22", "#f7e9a3")),
}
"""Of each axis the lightest, the middle and the darkest shade in light, and the other way round in dark."""


def shade(axis: Axis, index: int, size: int) -> str:
    """The role of the `index`-th of `size` coordinates along an axis."""
    # Few coordinates keep away from the ends, which are nearly white and nearly black.
    margin = max(0, 4 - size // 2)
    place = SHADES // 2 if size <= 1 else margin + index * (SHADES - 1 - 2 * margin) // (size - 1)
    return f"{axis}-{place}"


def colour(role: str, *, dark: bool = False) -> str:
    """The colour of a role as #rrggbb; `on:ROLE` is ink that can be read on it."""
    scheme = DARK if dark else LIGHT
    if role.startswith("on:"):
        below = colour(role[3:], dark=dark)
        return max(("#000000", "#ffffff"), key=lambda ink: contrast(ink, below))
    if role in scheme:
        return scheme[role]
    axis, _, place = role.rpartition("-")
    low, middle, high = _RAMPS[Axis(axis)][dark]
    share = int(place) / (SHADES - 1) * 2
    return _mixed(low, middle, share) if share <= 1 else _mixed(middle, high, share - 1)


def contrast(one: str, other: str) -> float:
    """How far two colours can be told apart, from 1 to 21 (WCAG 2.2, 1.4.3)."""
    darker, lighter = sorted((_luminance(one), _luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def rules(fills: Iterable[str], strokes: Iterable[str], *, dark: bool = False) -> str:
    """CSS that gives the classes of shapes their colours."""
    found = [f".f-{name(role)}{{fill:{colour(role, dark=dark)}}}" for role in sorted(set(fills))]
    found += [f".s-{name(role)}{{stroke:{colour(role, dark=dark)}}}" for role in sorted(set(strokes))]
    return "".join(found)


def name(role: str) -> str:
    """A role as a class of CSS."""
    return role.replace(":", "-")


def _mixed(one: str, other: str, share: float) -> str:
    mixed = (round(a + (b - a) * share) for a, b in zip(_channels(one), _channels(other), strict=True))
    return "#" + "".join(f"{value:02x}" for value in mixed)


def _channels(text: str) -> tuple[int, int, int]:
    return int(text[1:3], 16), int(text[3:5], 16), int(text[5:7], 16)


def _luminance(text: str) -> float:
    linear = [
        value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
        for value in (channel / 255 for channel in _channels(text))
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
