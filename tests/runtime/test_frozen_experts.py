"""Contract: what is frozen beside experts of one tp rank each is saved, resumed, converted and exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_runs import adapted
from expert_runs import Case
from export_runs import of_plan
from ranks import run_ranks
from test_expert_adapters import OF_ALL
from training_runs import initial_model, samples, whole_parameters

from parcompile.plan import Plan
from parcompile.runtime.checkpoint import SavedRun, export, read_note, verify
from parcompile.runtime.checkpoint.adapting import convert

pytestmark = pytest.mark.ranks

LAYOUTS = {
    "all": {"tp": 2, "dp": 2, "ep": 4, "expert_tp": 1},
    "half": {"tp": 2, "dp": 2, "ep": 2, "expert_tp": 1},
}
FROZEN = {
    "mixtral, embedding": ("embed_tokens",),
    "mixtral, norms and experts": ("norm.weight", "mlp.experts"),
    "mixtral, LoRA": (),
    "ernie4_5_moe": (),  # its biases of routers are frozen parameters
}


def plan_of(name: str, layout: str) -> Plan:
    return Case(name.partition(",")[0], LAYOUTS.get(layout, {})).plan()


def model_of(name: str, plan: Plan) -> Any:
    if name.endswith("LoRA"):
        return adapted(plan, OF_ALL)
    model = initial_model(plan)
    for parameter_name, parameter in model.named_parameters():
        if any(part in parameter_name for part in FROZEN[name]):
            parameter.requires_grad_(False)
    return model


def save_all(rank: int, folder: str) -> dict[str, Any]:
    """Each model after a step in one layout, and from there resumed in the other; its parameters, and errors."""
    from parcompile.runtime import initialize, join
    from parcompile.runtime.checkpoint import load, save
    from parcompile.runtime.engine import initialization
    from parcompile.runtime.groups import create_groups

    joined, found = join(plan_of("mixtral", "all")), {}
    for name in FROZEN:
        for layout, resumes in (("all", False), ("half", True)):
            plan = plan_of(name, layout)
            mesh = of_plan(create_groups(plan, rank, joined.device), plan)
            initialization.join = lambda _, mesh=mesh: mesh
            try:
                engine, _, loader, _ = initialize(
                    plan=plan, model=model_of(name, plan), training_data=samples(plan), self_check=False
                )
                if resumes:
                    load(engine, f"{folder}/{name}/all")
                else:
                    engine.train_batch(iter(loader))
                save(engine, f"{folder}/{name}/{layout}", 1)
                parameters = {key: value.detach().clone() for key, value in engine.module.named_parameters()}
                found[name, layout] = {"rank": rank, "parameters": parameters}
            except Exception as error:
                found[name, layout] = f"{type(error).__name__}: {error}"
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("frozen")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(4, save_all, str(folder), timeout=280)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FROZEN)
def test_all_weights_and_states_are_read(
    name: str, layout: str, folder: Path, ranks: list[dict[str, Any]], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    assert not [one[name, layout] for one in ranks if isinstance(one[name, layout], str)]
    place, saved = folder / name / layout, SavedRun(read_note(folder / name / layout))
    assert verify(place) == []
    one_rank = plan_of(name, "one rank")
    if not name.endswith("LoRA"):
        for key, value in whole_parameters(plan_of(name, layout), [one[name, layout] for one in ranks]).items():
            found = saved.whole(key)
            assert found is not None
            assert torch.equal(found, value), key
        converted = SavedRun(read_note(convert(place, one_rank, tmp_path / "converted")))
        for key in saved.parameters:
            for kind in saved.kinds:
                one, other = saved.whole(key, kind), converted.whole(key, kind)
                assert (one is None) == (other is None), (key, kind)
                assert one is None or torch.equal(one, other), (key, kind)
    other = SavedRun(read_note(folder / name / "all"))
    for key in (*saved.parameters, *saved.adapters):
        for kind in saved.kinds:
            one, first = saved.whole(key, kind), other.whole(key, kind)
            assert (one is None) == (first is None), (key, kind)
            assert one is None or torch.equal(one, first), (key, kind)
    export(place, tmp_path / "exported")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    weights = dict(again.named_parameters())
    for key in saved.parameters:
        if not (saved.note.adapters and f"{key.removesuffix('.weight')}" in saved.note.adapters["linears"]):
            assert torch.equal(weights[key], saved.whole(key)) or saved.note.adapters, key
