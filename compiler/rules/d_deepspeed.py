"""The further DeepSpeed keys of a spec: nothing in them may fight the plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from parcompile.backends.deepspeed import (
    DECIDED_BY,
    FORBIDDEN,
    FORBIDDEN_ZERO,
    first_stage,
    refusal,
)
from parcompile.diagnostics import Path, Safety
from parcompile.spec.resolve import Resolution
from parcompile.spec.values import workload_of

from . import Finding, also, removable, rule


@rule("D003", targets=("deepspeed",))
def deepspeed_keys_do_not_fight(spec: Resolution) -> Iterator[Finding]:
    given = spec.get("deepspeed")
    for key in given:
        path: Path = ("deepspeed", key)
        if not spec.given("deepspeed", key):
            continue
        if key in DECIDED_BY:
            place = tuple(DECIDED_BY[key].split("."))
            message = f"{key} is decided by {DECIDED_BY[key]}"
            yield removable(path, message, f"set {DECIDED_BY[key]} instead", also(spec, place), Safety.CHANGES_COST)
        elif key in FORBIDDEN:
            yield removable(path, f"{key}: {FORBIDDEN[key]}", "remove it", (), Safety.CHANGES_COST)
    zero = spec.get("deepspeed", "zero_optimization")
    for key in zero if isinstance(zero, Mapping) else ():
        if (
            key in FORBIDDEN_ZERO
            and spec.given("deepspeed", "zero_optimization", key)
            and not (first_stage(key) == 3 and spec.zero_stage < 3)  # it only has no effect there: Z003
        ):
            path = ("deepspeed", "zero_optimization", key)
            related = also(spec, ("zero", "stage")) if key == "stage" else ()
            setter, says, _ = FORBIDDEN_ZERO[key].partition(" sets it")
            hint = f"set {setter} instead" if says else "remove it"
            yield removable(path, f"{key}: {FORBIDDEN_ZERO[key]}", hint, related, Safety.CHANGES_COST)


@rule("D004", targets=("deepspeed",))
def no_auto_reaches_deepspeed(spec: Resolution) -> Iterator[Finding]:

    def search(node: object, path: Path) -> Iterator[Finding]:
        if node == "auto":
            message, hint = '"auto" would be passed to DeepSpeed unchanged', "write a value, or remove the key"
            yield removable(path, message, hint, (), Safety.CHANGES_COST)
        elif isinstance(node, Mapping):
            for key, value in node.items():
                if refusal((*path[1:], key)) is None:
                    yield from search(value, (*path, key))
        elif isinstance(node, list):
            for index, value in enumerate(node):
                yield from search(value, (*path, index))

    yield from search(spec.get("deepspeed"), ("deepspeed",))


def plan_overlaps(spec: Resolution) -> bool:
    """Whether the plan itself reduces gradients under backward."""
    if spec.zero_stage == 3:
        return True
    try:
        return replace(workload_of(spec.spec()), overlap_comm=None).overlaps_gradients
    except ValueError:
        return False  # other rules say what is wrong
