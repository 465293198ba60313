"""The check before training passes for every family, and names what was broken on purpose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from families import RELATIVES
from family_runs import drawn_model, family_plan, of_plan
from ranks import run_ranks

from parcompile.model.catalogue import RUNTIME_FAMILIES
from parcompile.model.families import FAMILIES
from parcompile.plan import Plan, identified

pytestmark = pytest.mark.ranks


def check(rank: int, plans: list[Plan]) -> list[str]:
    """What the check says of each plan; empty: nothing. One world serves all."""
    from parcompile.runtime import RunError, join
    from parcompile.runtime.inject import inject
    from parcompile.runtime.inject.selfcheck import SelfCheck

    mesh, found = join(max(plans, key=lambda plan: len(plan.groups.names))), []
    for plan in plans:
        here, model = of_plan(mesh, plan), drawn_model(plan)
        checking = SelfCheck(model, here)
        inject(model, here)
        parameters = dict(model.named_parameters())
        output, gradient = (f"model.layers.{name}.weight" for name in ("1.self_attn.o_proj", "0.mlp.up_proj"))
        if plan.spec.name == "broken output" and output in parameters:
            parameters[output].data.add_(1.0)
        # The last rank of those that hold it.
        if plan.spec.name == "broken gradient" and gradient in parameters and rank == here.size("tp") - 1:
            parameters[gradient].register_hook(lambda found: 2 * found)
        try:
            checking.compare(model)
            found.append("")
        except RunError as error:
            found.append(str(error))
        assert all(parameter.grad is None for parameter in model.parameters())
    return found


@pytest.mark.parametrize(
    "parallelism", [{"tp": 2, "sequence_parallel": True}, {"cp": 2}, {"pp": 2}], ids=["tp2", "cp2", "pp2"]
)
def test_an_injected_model_passes(parallelism: dict[str, Any]) -> None:
    families = [
        family
        for family in RUNTIME_FAMILIES
        if family not in RELATIVES and not FAMILIES[family].refused_axes.keys() & parallelism.keys()
    ]
    plans = [family_plan(family, 2, parallelism) for family in families]
    for rank in run_ranks(2, check, plans):
        assert dict(zip(families, rank, strict=True)) == dict.fromkeys(families, "")


@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_the_first_module_that_differs_is_named_on_every_rank(axis: str) -> None:
    plan = family_plan("llama", 2, {axis: 2})
    broken = [
        identified(replace(plan, spec=replace(plan.spec, name=name))) for name in ("broken output", "broken gradient")
    ]
    first, second = run_ranks(2, check, broken)
    assert first == second
    assert "the output of model.layers.1.self_attn.o_proj differs" in first[0]
    assert "the gradient of model.layers.0.mlp.up_proj.weight differs (relative error 1.0e+00)" in first[1]
    assert torch.is_grad_enabled()
