"""How far an engine's steps are from those of one process, and whether that is rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from .reference import ADAMW

LIMITS: Mapping[str, tuple[float, float]] = {"fp32": (1e-5, 1e-4), "bf16": (5e-3, 6e-2), "fp64": (1e-10, 1e-9)}
"""Relative differences that need no explanation: of loss and norm; of gradients, and parameters to their update."""

TIMES = 10
"""So many times what other last bits do to the reference is rounding still."""

_FAINT = 1e-3
"""A gradient that is a smaller part of all is compared as if it were so large: the last bits of a weight hide it."""

_EXACT = 1e6
"""Models of more parameters, which plans alone have, are summed less exactly: limits grow with their number."""

CEILING = 0.15
"""No rounding is this large."""

EQUAL, ROUNDING, RED, CANNOT = "equal", "rounding", "red", "not runnable"
VERDICTS = (EQUAL, ROUNDING, RED, CANNOT)

Result = Mapping[str, Any]


def judge(dtype: str, engine: Result, expected: Result, noises: Callable[[], list[Result]]) -> dict[str, Any]:
    """The verdict of a cell, and its differences.

    Args:
        dtype: of the cell.
        engine: its `loss` and `norm` of each step, None where it does not tell, `params` by name, those after the
            `first` step, and `state`, what is wrong with that of its optimizer.
        expected: the same of one process, with `start`.
        noises: the reference again, as rounding alone may change it; called where something is off.
    """
    if why := _dead(engine):
        return {"verdict": RED, "why": why}
    found, right = engine["params"], expected["params"]
    for fault, holds in (
        ("lacks", lambda name: name not in found),
        ("has another shape of", lambda name: found[name].shape != right[name].shape),
        ("has numbers that are not finite in", lambda name: not bool(found[name].isfinite().all())),
    ):
        if wrong := [name for name in right if holds(name)]:
            return {"verdict": RED, "why": f"the engine {fault} {wrong[0]}, one of {len(wrong)} such parameters"}
    differences = dict(_differences(engine, expected))
    times = max(1.0, sum(tensor.numel() for tensor in right.values()) / _EXACT)
    limits = {name: times * LIMITS[dtype][name in ("gradient", "update")] for name in differences}
    answer: dict[str, Any] = {"verdict": EQUAL}
    off = [name for name, (value, _) in differences.items() if not value <= limits[name]]
    if off:
        moved = [dict(_differences(nudged, expected)) for nudged in noises()]
        allowed = {name: min(CEILING, TIMES * max(noise[name][0] for noise in moved)) for name in off}
        wrong = [name for name in off if not differences[name][0] <= allowed[name]]
        answer["verdict"] = RED if wrong else ROUNDING
        answer["noise"] = {name: _short(allowed[name] / TIMES) for name in off}
        if wrong:
            value, where = differences[wrong[0]]
            answer["why"] = f"{wrong[0]} off by {value:.1e}{f' at {where}' if where else ''}"
    if engine.get("state"):
        answer |= {"verdict": RED, "why": f"the optimizer's state {engine['state']}"}
    answer["differences"] = {name: _short(value) for name, (value, _) in differences.items()}
    if answer["verdict"] == RED:
        answer["found"] = {name: engine[name] for name in ("loss", "norm")}
        answer["one_process"] = {name: expected[name] for name in ("loss", "norm")}
    return answer


def _dead(engine: Result) -> str | None:
    """Why a run proves nothing: it did not train."""
    losses, norms = engine["loss"], [norm for norm in engine["norm"] if norm is not None]
    if not all(map(math.isfinite, (*losses, *norms))):
        return "a loss or a norm is not a finite number"
    if len(set(losses)) == 1 and len(losses) > 1:
        return f"the loss is {losses[0]} at every step"
    if norms and not any(norms):
        return "the gradient norm is 0 at every step"
    return None


def _differences(engine: Result, expected: Result) -> Iterator[tuple[str, tuple[float, str]]]:
    """Relative, with the step or parameter that is furthest off."""
    for name in ("loss", "norm"):
        pairs = [pair for pair in zip(engine[name], expected[name], strict=True) if pair[0] is not None]
        if pairs:
            values = [abs(actual - right) / max(abs(right), 1e-30) for actual, right in pairs]
            worst = max(values)
            yield name, (worst, f"step {values.index(worst) + 1}")
    low = any(str(tensor.dtype) == "torch.bfloat16" for tensor in engine["params"].values())
    if not low and "first" in engine:  # the last bit of a weight in bf16 is as large as its update
        gradients = {
            name: [_first_gradient(one["first"][name], start) for one in (engine, expected)]
            for name, start in expected["start"].items()
        }
        least = _FAINT * math.hypot(*(float(right.norm()) for _, right in gradients.values()))
        found = {
            name: (float((actual - right).norm()), max(least, float(right.norm())))
            for name, (actual, right) in gradients.items()
        }
        yield "gradient", _furthest(found)
    found = {}
    for name, right in expected["params"].items():
        actual, target, start = (each.double() for each in (engine["params"][name], right, expected["start"][name]))
        found[name] = (float((actual - target).norm()), float((target - start).norm()))
    if low:  # only all of them together tell
        off, moved = (math.hypot(*each) for each in zip(*found.values(), strict=True))
        found = {"all parameters": (off, moved)}
    yield "update", _furthest(found)


def _furthest(found: Mapping[str, tuple[float, float]]) -> tuple[float, str]:
    """The largest distance relative to a size, and whose it is."""
    apart = [(off / max(size, 1e-12), name) for name, (off, size) in found.items()]
    return max(apart, key=lambda one: math.inf if math.isnan(one[0]) else one[0])


def _first_gradient(after: Tensor, start: Tensor) -> Tensor:
    """What AdamW was given in its first step, reduced and clipped: it moved a weight by lr · g / (|g| + eps)."""
    lr, eps = ADAMW["lr"], ADAMW["eps"]
    moved = (start.double() * (1 - lr * ADAMW["weight_decay"]) - after.double()) / lr
    gradient: Tensor = eps * moved / (1 - moved.abs()).clamp(min=1e-6)
    return gradient


def _short(value: float) -> float:
    return float(f"{value:.2g}")
