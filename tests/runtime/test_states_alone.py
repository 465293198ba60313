"""Models none of whose layers attends: hidden states in fp32 from stage to stage, and adapters beside their linears.

That they train as the original in every layout is proved in `test_families.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from closeness import assert_close
from family_runs import batch_of, drawn_model, family_plan, of_plan, optimizer_of, train_on, train_plain
from ranks import run_ranks
from torch import nn

from parcompile.plan import Plan

pytestmark = pytest.mark.ranks

FAMILIES = ("mamba", "falcon_mamba", "mamba2")


def train_in_bf16(rank: int, plans: list[Plan]) -> list[dict[str, Any]]:
    from parcompile.runtime import join
    from parcompile.runtime.pipeline.stage import handed

    mesh, found = join(max(plans, key=lambda plan: len(plan.groups.names))), []
    for plan in plans:
        model, trained = train_on(plan, of_plan(mesh, plan), dtype=torch.bfloat16)
        ((_, dtype),) = handed(model, of_plan(mesh, plan), batch_of(plan), torch.bfloat16)
        found.append({"losses": trained["losses"], "dtype": dtype})
    return found


def test_stages_in_bf16_hand_on_what_one_process_computes() -> None:
    """The forward is the same, so that the first loss is. Steps in bf16 round gradients in another order."""
    kinds: list[tuple[str, dict[str, Any]]] = [*((family, {}) for family in FAMILIES)]
    kinds.append(("mamba2", {"residual_in_fp32": False}))
    plans = [family_plan(family, 2, {"pp": 2}, **changes) for family, changes in kinds]
    ranks = run_ranks(2, train_in_bf16, plans, timeout=200)
    for place, (family, changes) in enumerate(kinds):
        plain = train_plain(family_plan(family, 1, {}, **changes), dtype=torch.bfloat16)
        for rank in ranks:
            assert_close(rank[place]["losses"][:1], plain["losses"][:1], about=family)
            assert rank[place]["dtype"] == (torch.bfloat16 if changes else torch.float32)


def adapted(plan: Plan, targets: list[str]) -> Any:
    peft = pytest.importorskip("peft")
    model = drawn_model(plan)
    torch.manual_seed(3)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1)
    return model


def train_adapters(rank: int, plans: list[Plan]) -> list[Any]:
    from parcompile.runtime import RunError, adapter_state, join, reduce_loss, split_batch
    from parcompile.runtime.inject import inject

    mesh, found = join(max(plans, key=lambda plan: len(plan.groups.names))), []
    for plan in plans:
        here = of_plan(mesh, plan)
        model = inject(adapted(plan, ["in_proj"]), here)
        loss = model(**split_batch(batch_of(plan), here)).loss
        loss.backward()
        trained = [one for one in model.parameters() if one.requires_grad]
        optimizer_of_adapters(trained).step()
        found.append((reduce_loss(loss.detach(), here), adapter_state(model, here)))
    for targets in (["x_proj"], ["dt_proj"]):
        try:
            inject(adapted(plans[0], targets), of_plan(mesh, plans[0]))
            found.append("")
        except RunError as error:
            found.append(str(error))
    return found


def optimizer_of_adapters(trained: list[nn.Parameter]) -> torch.optim.Optimizer:
    return optimizer_of(nn.ParameterList(trained))


def test_adapters_of_the_input_projection_train_and_others_are_refused_by_name() -> None:
    """peft itself refuses those of the output projection."""
    peft = pytest.importorskip("peft")
    plans = [family_plan(family, 2, {"tp": 2, "sequence_parallel": True}) for family in FAMILIES]
    ranks = run_ranks(2, train_adapters, plans, timeout=200)
    for place, family in enumerate(FAMILIES):
        plan = family_plan(family, 1, {})
        model = adapted(plan, ["in_proj"])
        loss = model(**batch_of(plan)).loss
        loss.backward()
        optimizer_of_adapters([one for one in model.parameters() if one.requires_grad]).step()
        expected = peft.get_peft_model_state_dict(model)
        for rank in ranks:
            found, adapters = rank[place]
            assert_close(float(found), float(loss.detach()), about=family)
            assert_close(adapters, expected, about=family)
    selecting, stepping = ranks[0][len(FAMILIES) :]
    assert "LoRA on x_proj of a Mamba-1 layer is not injected over tp" in selecting
    assert "dt_proj has adapters that nothing trains" in stepping
