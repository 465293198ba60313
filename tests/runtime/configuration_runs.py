"""Trains drawn configurations on live ranks and in one process: equal, or refused with the name of a key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from drawn_configurations import LAYOUTS, Drawn, draw, runs
from family_runs import family_plan, train_on, train_plain
from ranks import RankError, run_ranks
from training_runs import whole_parameters

from parcompile.model.catalogue import RUNTIME_FAMILIES
from parcompile.plan import Plan

STEPS = 3
TOLERANCE = 1e-5
NUDGES = (1, 2, 3)
TOLERANCE_64 = 1e-6
"""In fp64, for what rounding moves further in fp32. transformers computes norms and softmax in fp32 even so."""


class Outcome(NamedTuple):
    """What became of a draw."""

    drawn: Drawn
    kind: str
    """equal; rounded: equal within `TOLERANCE_64` in fp64, or no further apart than transformers alone is from itself
    with other last bits; refused: the text names a key that was drawn; no model: transformers builds none; or
    different."""
    worst: float = 0.0
    """The largest relative difference of a loss, a gradient norm or a parameter."""
    text: str = ""


def cases(first: int, count: int, layout: str, families: tuple[str, ...] = RUNTIME_FAMILIES) -> list[Drawn]:
    """Draws for one layout, of the families that run in it."""
    able = tuple(name for name in families if runs(name, layout))
    draws = [draw(number, able, layout) for number in range(first, first + count)] if able else []
    return [_without_balance(one) for one in draws if _has_experts(one)] if "ep" in LAYOUTS[layout][1] else draws


def _has_experts(drawn: Drawn) -> bool:
    """False where experts are switched off, or no layer has them: there is nothing to deal over ep."""
    try:
        return planned(drawn, alone=True).spec.model.shape.moe is not None
    except AssertionError:
        return True  # refused: the outcome says why


def _without_balance(drawn: Drawn) -> Drawn:
    """Over dp each micro-batch is balanced alone, as under DeepSpeed and Megatron-LM; one process balances them all."""
    changes = {key: value for key, value in drawn.changes.items() if key != "output_router_logits"}
    return replace(drawn, changes=changes)


def planned(drawn: Drawn, *, alone: bool = False) -> Plan:
    # With larger weights three steps blow rounding up.
    changes = {"max_position_embeddings": 64, "initializer_range": 0.12, **drawn.changes}
    if any("dynamic" in str(value) for value in (drawn.changes.get("rope_parameters") or {}).values()):
        changes["max_position_embeddings"] = 12  # sequences cross it
    return family_plan(drawn.family, 1 if alone else drawn.world_size, {} if alone else drawn.parallelism, **changes)


def outcomes(draws: Sequence[Drawn], timeout: float = 240) -> list[Outcome]:
    """All of one layout, in one world. What differs in fp32 is judged again in fp64, in a second one."""
    first = _outcomes(draws, torch.float32, TOLERANCE, timeout)
    again = [one.drawn for one in first if one.kind == "different" and one.worst < 1.0]
    if not again:
        return first
    judged = {one.drawn.number: one for one in _outcomes(again, torch.float64, TOLERANCE_64, timeout)}
    found = []
    for one in first:
        exact = judged.get(one.drawn.number)
        if exact is None:
            found.append(one)
        elif exact.kind == "equal":
            found.append(exact._replace(kind="rounded"))
        else:
            found.append(one._replace(kind="rounded") if one.worst <= sensitivity(one.drawn) else one)
    return found


def sensitivity(drawn: Drawn) -> float:
    """How far transformers alone comes from itself when the last bits of its weights change: at most, of a few times.

    Recurrences in fp32 and routers on the edge have no fp64 to be judged in.
    """
    plan = planned(drawn, alone=True)
    expected = train_plain(plan, STEPS)
    return max(_apart(train_plain(plan, STEPS, nudged=seed), expected) for seed in NUDGES)


def _outcomes(draws: Sequence[Drawn], dtype: torch.dtype, tolerance: float, timeout: float) -> list[Outcome]:
    found: list[Outcome] = []
    plans: list[tuple[Drawn, Plan, dict[str, Any]]] = []
    for drawn in draws:
        try:
            plan = planned(drawn)
        except AssertionError as error:
            found.append(_refused(drawn, str(error)))
            continue
        try:
            expected = train_plain(planned(drawn, alone=True), STEPS, dtype)
        except Exception as error:
            found.append(Outcome(drawn, "no model", text=f"{type(error).__name__}: {str(error)[:300]}"))
            continue
        plans.append((drawn, plan, expected))
    if not plans:
        return found
    ranks = run_ranks(plans[0][1].world_size, train_all, [plan for _, plan, _ in plans], dtype, timeout=timeout)
    for place, (drawn, plan, expected) in enumerate(plans):
        here = [rank[place] for rank in ranks]
        errors = [one["error"] for one in here if "error" in one]
        if len(errors) == len(here):
            found.append(_refused(drawn, errors[0]))
        elif errors:
            found.append(Outcome(drawn, "different", 1.0, f"on {len(errors)} of {len(here)} ranks: {errors[0]}"))
        else:
            worst = _worst(plan, here, expected)
            found.append(Outcome(drawn, "equal" if worst < tolerance else "different", worst))
    return found


def train_all(rank: int, plans: list[Plan], dtype: torch.dtype) -> list[dict[str, Any]]:
    """Every plan of a layout in one world; groups depend on how kv heads are repeated, and on tied embeddings."""
    from family_runs import of_plan

    from parcompile.runtime import join
    from parcompile.runtime.groups import create_groups

    joined = join(plans[0])
    meshes, found = {}, []
    for plan in plans:
        key = plan.kv_replicas, plan.spec.model.shape.tie_word_embeddings
        if key not in meshes:
            meshes[key] = create_groups(plan, rank, joined.device)
        try:
            found.append({"rank": rank, **train_on(plan, of_plan(meshes[key], plan), STEPS, dtype)[1]})
        except Exception as error:
            found.append({"rank": rank, "error": f"{type(error).__name__}: {error}"})
    return found


def _refused(drawn: Drawn, message: str) -> Outcome:
    named = [key for key in drawn.changes if key in message]
    return Outcome(drawn, "refused" if named else "different", 0.0 if named else 1.0, message[:600])


def _worst(plan: Plan, ranks: list[dict[str, Any]], expected: dict[str, Any]) -> float:
    whole = whole_parameters(plan, ranks)
    return max(_apart({**rank, "parameters": whole}, expected) for rank in ranks)


def _apart(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """The largest relative difference of a loss, a gradient norm or a parameter."""
    apart = [
        abs(one - other) / abs(other)
        for key in ("losses", "norms")
        for one, other in zip(found[key], expected[key], strict=True)
    ]
    pairs = [(found["parameters"][name] - value, value) for name, value in expected["parameters"].items()]
    return max([*apart, *(float(difference.norm() / value.norm()) for difference, value in pairs)])


__all__ = ["LAYOUTS", "Outcome", "RankError", "cases", "outcomes"]
