"""Trains drawn configurations on live ranks and in one process: equal, or refused with the name of a key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from closeness import ROUNDING, SEEDS, Margin, margins
from drawn_configurations import LAYOUTS, Drawn, draw, runs
from family_runs import family_plan, train_on, train_plain
from ranks import RankError, run_ranks
from training_runs import compared

from parcompile.model.catalogue import RUNTIME_FAMILIES
from parcompile.plan import Plan

STEPS = 3
LIMIT_64 = 1e-6
"""In fp64, for what rounding moves further in fp32. transformers computes norms and softmax in fp32 even so."""


class Outcome(NamedTuple):
    """What became of a draw."""

    drawn: Drawn
    kind: str
    """equal: within 1e-5; rounded: within the limit that other last bits of the weights of transformers alone set
    (`closeness.py`), or within what these do, or within `LIMIT_64` in fp64; refused: the text names a key that was
    drawn; no model: transformers builds none; or different."""
    worst: float = 0.0
    """The largest relative difference of a loss, a gradient norm or a parameter."""
    noise: float | None = None
    """What other last bits do to the same number of transformers alone; None where `worst` is far below 1e-5."""
    text: str = ""
    own: float | None = None
    """The largest move of any number of transformers alone under other last bits, where it was asked for."""


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


def accepted(drawn: Drawn) -> Drawn:
    """The draw without the keys for which it is refused."""
    while True:
        try:
            planned(drawn, alone=True)
        except AssertionError as error:
            named = [key for key in drawn.changes if key in str(error)]
            if not named:
                return drawn
            drawn = replace(drawn, changes={key: one for key, one in drawn.changes.items() if key not in named})
        else:
            return drawn


def outcomes(draws: Sequence[Drawn], timeout: float = 240, noise: bool = False) -> list[Outcome]:
    """All of one layout, in one world. What differs in fp32 is judged again in fp64, in a second one.

    Recurrences in fp32 and routers on the edge have no fp64 to be judged in: they are judged by their noise.

    Args:
        draws: of one layout.
        timeout: in seconds, for all.
        noise: measure what other last bits do to transformers alone for every draw, and not where it decides only.
    """
    first = _outcomes(draws, torch.float32, timeout, noise)
    again = [one.drawn for one in first if one.kind == "different" and one.worst < 1.0]
    if not again:
        return first
    judged = {one.drawn.number: one for one in _outcomes(again, torch.float64, timeout)}
    exact = {number for number, one in judged.items() if one.kind == "equal"}
    return [one._replace(kind="rounded") if one.drawn.number in exact else one for one in first]


def _outcomes(draws: Sequence[Drawn], dtype: torch.dtype, timeout: float, noise: bool = False) -> list[Outcome]:
    found: list[Outcome] = []
    plans: list[tuple[Drawn, Plan, Callable[[int | None], dict[str, Any]]]] = []
    for drawn in draws:
        try:
            plan = planned(drawn)
        except AssertionError as error:
            found.append(_refused(drawn, str(error)))
            continue
        try:
            rerun = _alone(planned(drawn, alone=True), dtype)
            rerun(None)
        except Exception as error:
            found.append(Outcome(drawn, "no model", text=f"{type(error).__name__}: {str(error)[:300]}"))
            continue
        plans.append((drawn, plan, rerun))
    if not plans:
        return found
    ranks = run_ranks(plans[0][1].world_size, train_all, [plan for _, plan, _ in plans], dtype, timeout=timeout)
    for place, (drawn, plan, rerun) in enumerate(plans):
        here = [rank[place] for rank in ranks]
        errors = [one["error"] for one in here if "error" in one]
        if len(errors) == len(here):
            found.append(_refused(drawn, errors[0]))
        elif errors:
            found.append(Outcome(drawn, "different", 1.0, f"on {len(errors)} of {len(here)} ranks: {errors[0]}"))
        else:
            judged = _judged(drawn, compared(plan, here, rerun), dtype)
            found.append(judged._replace(own=_own_moves(rerun)) if noise else judged)
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


def _alone(plan: Plan, dtype: torch.dtype) -> Callable[[int | None], dict[str, Any]]:
    """Transformers alone, nudged by a seed; the run that is not is kept."""
    known = train_plain(plan, STEPS, dtype)
    return lambda seed: known if seed is None else train_plain(plan, STEPS, dtype, seed)


def _own_moves(rerun: Callable[[int | None], dict[str, Any]]) -> float:
    """The largest relative move of a loss, a gradient norm or a parameter of transformers alone."""
    expected = rerun(None)
    return max(one.difference for seed in SEEDS for one in margins(rerun(seed), expected, limit=1.0))


def _judged(drawn: Drawn, found: list[Margin], dtype: torch.dtype) -> Outcome:
    furthest = max(found, key=lambda one: one.difference)
    if dtype == torch.float64:
        kind = "equal" if furthest.difference <= LIMIT_64 else "different"
        return Outcome(drawn, kind, furthest.difference)
    kind = "equal" if furthest.difference <= ROUNDING[dtype] else "rounded"
    # Of a model whose own numbers move further than any ceiling, no number can say more than that it moves no further.
    outside = [one for one in found if one.ratio > 1 and one.difference > (one.noise or 0.0)]
    worst = max(outside or found, key=lambda one: one.ratio)
    kind = "different" if outside else kind
    return Outcome(drawn, kind, furthest.difference, furthest.noise, "" if kind == "equal" else worst.text)


__all__ = ["LAYOUTS", "Outcome", "RankError", "accepted", "cases", "outcomes"]
