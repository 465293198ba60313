"""How far an engine's steps are from those of one process, and whether that is rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

LIMITS: Mapping[str, tuple[float, float]] = {"fp32": (1e-5, 1e-4), "bf16": (5e-3, 6e-2), "fp64": (1e-10, 1e-9)}
"""Relative differences that need no explanation: of loss and norm; of parameters, relative to their update."""

TIMES = 10
"""So many times what other last bits do to the reference is rounding still."""

_EXACT = 1e6
"""Models of more parameters, which plans alone have, are summed less exactly: limits grow with their number."""

CEILING = 0.15
"""No rounding is this large."""

EQUAL, ROUNDING, RED, CANNOT = "equal", "rounding", "red", "not runnable"
VERDICTS = (EQUAL, ROUNDING, RED, CANNOT)

Result = Mapping[str, Any]


def judge(dtype: str, found: Result, expected: Result, noises: Callable[[], list[Result]]) -> dict[str, Any]:
    """The verdict of a cell, and its differences.

    Args:
        dtype: of the cell.
        found: `loss` and `norm` of each step, None where the engine does not tell, and `params` by name.
        expected: the same of one process, with `start`.
        noises: the reference again, as rounding alone may change it; called where something is off.
    """
    if why := _dead(found):
        return {"verdict": RED, "why": why}
    missing = [name for name in expected["params"] if name not in found["params"]]
    shapes = [
        name for name, one in found["params"].items() if name in expected["params"] and _shapes(one, name, expected)
    ]
    if missing or shapes:
        what = f"lacks {missing[0]}" if missing else f"has another shape of {shapes[0]}"
        return {"verdict": RED, "why": f"the engine {what}, of {len(missing) + len(shapes)} such parameters"}
    if wild := [name for name in expected["params"] if not bool(found["params"][name].isfinite().all())]:
        return {"verdict": RED, "why": f"{wild[0]} has numbers that are not finite, of {len(wild)} such parameters"}
    differences = dict(_differences(found, expected))
    times = max(1.0, sum(one.numel() for one in expected["params"].values()) / _EXACT)
    limits = {name: times * LIMITS[dtype][name == "update"] for name in ("loss", "norm", "update")}
    answer: dict[str, Any] = {"verdict": EQUAL}
    off = [name for name, (value, _) in differences.items() if not value <= limits[name]]
    if off:
        moved = [dict(_differences(one, expected)) for one in noises()]
        allowed = {name: min(CEILING, TIMES * max(one[name][0] for one in moved)) for name in off}
        wrong = [name for name in off if not differences[name][0] <= allowed[name]]
        answer["verdict"] = RED if wrong else ROUNDING
        answer["noise"] = {name: _short(allowed[name] / TIMES) for name in off}
        if wrong:
            value, where = differences[wrong[0]]
            answer["why"] = f"{wrong[0]} off by {value:.1e}{f' at {where}' if where else ''}"
    answer["differences"] = {name: _short(value) for name, (value, _) in differences.items()}
    if answer["verdict"] == RED:
        answer["found"] = {name: found[name] for name in ("loss", "norm")}
        answer["one_process"] = {name: expected[name] for name in ("loss", "norm")}
    return answer


def _dead(found: Result) -> str | None:
    """Why a run proves nothing: it did not train."""
    losses, norms = found["loss"], [one for one in found["norm"] if one is not None]
    if not all(map(math.isfinite, (*losses, *norms))):
        return "a loss or a norm is not a finite number"
    if len(set(losses)) == 1 and len(losses) > 1:
        return f"the loss is {losses[0]} at every step"
    if norms and not any(norms):
        return "the gradient norm is 0 at every step"
    return None


def _shapes(one: Any, name: str, expected: Result) -> bool:
    return tuple(one.shape) != tuple(expected["params"][name].shape)


def _differences(found: Result, expected: Result) -> Iterator[tuple[str, tuple[float, str]]]:
    """Relative, with the step or parameter that is furthest off."""
    for name in ("loss", "norm"):
        pairs = [(one, other) for one, other in zip(found[name], expected[name], strict=True) if one is not None]
        if pairs:
            values = [abs(one - other) / max(abs(other), 1e-30) for one, other in pairs]
            worst = max(values)
            yield name, (worst, f"step {values.index(worst) + 1}")
    worst, where, off, moved = 0.0, "", 0.0, 0.0
    for name, other in expected["params"].items():
        one, target, start = (each.double() for each in (found["params"][name], other, expected["start"][name]))
        size = float((target - start).norm())
        distance = float((one - target).norm())
        off, moved = off + distance**2, moved + size**2
        value = distance / max(size, 1e-12)
        if not value <= worst:
            worst, where = value, name
    if any(str(one.dtype) == "torch.bfloat16" for one in found["params"].values()):
        # The last bit of a weight is as large as an update of a norm's: only all of them together tell.
        worst, where = math.sqrt(off / max(moved, 1e-24)), "all parameters"
    yield "update", (worst, where)


def _short(value: float) -> float:
    return float(f"{value:.2g}")
