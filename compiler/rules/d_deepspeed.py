"""The further DeepSpeed keys of a spec: none may fight the plan, and what changes the numbers of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from parcompile.backends.deepspeed import (
    DECIDED_BY,
    FORBIDDEN,
    FORBIDDEN_ZERO,
    first_stage,
    refusal,
    refused_scaling,
    wrong_scale,
)
from parcompile.diagnostics import Fix, Path, Safety
from parcompile.layout.groups import Axis
from parcompile.spec.resolve import Resolution
from parcompile.spec.values import workload_of

from . import Finding, also, removable, rule

# The further DeepSpeed keys of a spec: nothing in them may fight the plan.


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


# Further DeepSpeed keys that change the numbers of a run, wrongly or merely differently.

_PREDIVIDE = ("deepspeed", "gradient_predivide_factor")
_SCATTER = ("deepspeed", "zero_optimization", "reduce_scatter")
_PRESCALE = ("deepspeed", "prescale_gradients")
_REDUCTION = ("deepspeed", "gradient_allreduce_op")


@rule("D005", targets=("deepspeed",))
def gradients_are_scaled_right(spec: Resolution) -> Iterator[Finding]:
    if spec.given(*_REDUCTION) and str(spec.get(*_REDUCTION)).lower() == "sum":
        message = f"gradient_allreduce_op sum: gradients become dp {spec.axis(Axis.DP)} times too large"
        hint = "remove it: the mean over dp is what the plan's loss needs"
        yield removable(_REDUCTION, message, hint, (), Safety.CHANGES_NUMERICS)
    factor = spec.get(*_PREDIVIDE) if spec.given(*_PREDIVIDE) else 1
    prescale = spec.given(*_PRESCALE) and spec.get(*_PRESCALE) is True
    if factor == 1 and not prescale:
        return
    stage = spec.zero_stage
    scatter = not (spec.given(*_SCATTER) and spec.get(*_SCATTER) is False)
    path = _PREDIVIDE if factor != 1 else _PRESCALE
    refused = refused_scaling(stage, reduce_scatter=scatter, prescale=prescale, predivide=factor)
    if refused is not None:
        yield removable(path, refused, "remove it, or switch reduce_scatter off", (), Safety.CHANGES_NUMERICS)
        return
    cp = spec.axis(Axis.CP)
    ranks = spec.axis(Axis.DP) * cp
    wrong = wrong_scale(stage, reduce_scatter=scatter, prescale=prescale, predivide=factor, ranks=ranks, cp=cp)
    if wrong is not None:
        yield Finding(
            f"gradient_predivide_factor {factor:g} with reduce_scatter false: gradients come out {wrong}",
            _PREDIVIDE,
            help="write another factor, or remove one of the two",
            fixes=tuple(Fix.removing(one, Safety.CHANGES_NUMERICS) for one in (_PREDIVIDE, _SCATTER)),
            related=also(spec, _SCATTER),
        )


def plan_overlaps(spec: Resolution) -> bool:
    """Whether the plan itself reduces gradients under backward."""
    if spec.zero_stage == 3:
        return True
    try:
        return replace(workload_of(spec.spec()), overlap_comm=None).overlaps_gradients
    except ValueError:
        return False  # other rules say what is wrong
