"""Where a spec says something, for the second place of a conflict."""

from __future__ import annotations

from parcompile.diagnostics import Related, Safety
from parcompile.layout.grid import Axis
from parcompile.spec.resolve import Resolution


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
