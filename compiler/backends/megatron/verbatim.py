"""Megatron-LM options for which a spec has no word: `backends.megatron`, written as they stand."""

from __future__ import annotations

from typing import Any

from parcompile.backends.reading import CARRIED_VERBATIM, Draft, Outcome, Source, Undecided
from parcompile.diagnostics.diagnostic import closest

from .effects import CARRIED, effect
from .options import NVIDIA, line
from .training import SCHEDULE_OPTIONS

BALANCING = ("moe_router_load_balancing_type", "moe_aux_loss_coeff")
REPLACEABLE = frozenset((*BALANCING, *SCHEDULE_OPTIONS))
"""Options that the table writes where a spec says nothing of them, or where it has no word for theirs."""
_SECTION = ("backends", "megatron")


def refusal(name: str, value: Any, *, has_schedule: bool) -> str | None:
    """Why an option cannot stand in `backends.megatron`; None where it can.

    Args:
        name: with underscores, without dashes.
        value: as the spec gives it.
        has_schedule: whether the spec has a schedule of its own.
    """
    known = line(NVIDIA)
    option = known.options.get(name)
    if option is None or not known.has(name):
        near = closest(name, [one for one in known.options if known.has(one)])
        return f"Megatron-LM has no option {name}" + (f"; did you mean {near}?" if near else "")
    if has_schedule and name in SCHEDULE_OPTIONS:
        return f"training.lr_scheduler decides {name}"
    if name in CARRIED and name not in REPLACEABLE:
        return f"the spec decides {name}: set the value there"
    facts = option.newest
    if facts.is_flag != isinstance(value, bool) or (value is False and facts.kind != "either"):
        takes = "a flag: write true" if facts.is_flag else f"followed by a value of type {facts.type}"
        return f"{name} is {takes}"
    if isinstance(value, list) != (facts.kind == "list") and facts.kind in ("list", "value"):
        return f"{name} takes {'several values: write a list' if facts.kind == 'list' else 'one value'}"
    return None


def keep(source: Source, draft: Draft) -> None:
    """Carries what the table left over into `backends.megatron`, where it is an option of training."""
    lost = {name for name, one in source.reasons.items() if one.outcome is Outcome.LOST}
    kept = [name for name in source.given if _is_left(name, source, lost)]
    if "moe_aux_loss_coeff" in kept and BALANCING[0] not in kept:
        kept.append(BALANCING[0])  # where the plan names none, it writes that there is none
    for name in kept:
        draft.set((*_SECTION, name), source.given.get(name, source.defaults.get(name)), said=True)
        if source.has(name):
            source.reasons.pop(name, None)
            source.used[name] = {(*_SECTION, name)}


def _is_left(name: str, source: Source, lost: set[str]) -> bool:
    value = source.given[name]
    if (
        name not in line(NVIDIA).options
        or isinstance(value, Undecided)
        or refusal(name, value, has_schedule=False) is not None
    ):
        return False
    if name in REPLACEABLE:
        return name in lost or (name == BALANCING[0] and "moe_aux_loss_coeff" in lost)
    option = line(NVIDIA).options[name]
    is_default = value == option.default and type(value) is type(option.default)
    return name not in source.used and not is_default and effect(name) in CARRIED_VERBATIM
