"""Contract: where dp · cp does not divide the parameters, so that DeepSpeed pads the last shards, no state is lost.

DeepSpeed writes master weights without that padding, and Adam's moments with it.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from export_runs import of_plan
from ranks import run_ranks
from test_checkpoint_faults import listed
from training_runs import initial_model, make_plan, samples

from parcompile.layout.shards import padded_shard
from parcompile.plan import Plan
from parcompile.runtime.checkpoint import SavedRun, read_note, verify
from parcompile.runtime.checkpoint.adapting import convert

pytestmark = pytest.mark.ranks

DENSE = {"model_type": "qwen3", "head_dim": 4}
MIXTURE = {
    "model_type": "mixtral",
    "head_dim": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}


class Case(NamedTuple):
    """A layout in which DeepSpeed saves padded shards."""

    parallelism: dict[str, int]
    stage: int = 1
    training: dict[str, Any] = {}  # noqa: RUF012 -- never changed
    only_norm: bool = False
    model: dict[str, Any] = DENSE


SAVED = {
    "dp3, ZeRO-1": Case({"dp": 3}),
    "dp3, ZeRO-2": Case({"dp": 3}, 2),
    "cp3, ZeRO-1": Case({"cp": 3}),
    "one norm, ZeRO-2": Case({"dp": 3}, 2, only_norm=True),
    "sums in fp32": Case({"dp": 3}, 1, {"precision": "bf16", "gradient_accumulation_dtype": "fp32"}),
    "experts": Case({"dp": 3}, model=MIXTURE),
}
RESUMED = {
    "cp2 × dp2, ZeRO-2": Case({"cp": 2, "dp": 2}, 2),
    "dp4, ZeRO-1": Case({"dp": 4}),
    "tp2 × dp2, ZeRO-1": Case({"tp": 2, "dp": 2}),
}
DEALT = {"dp4 × ep2, ZeRO-1": Case({"dp": 4, "ep": 2}), "tp2 × dp2 × ep2": Case({"tp": 2, "dp": 2, "ep": 2}, 2)}


def sizes_of(name: str) -> dict[str, Any]:
    """Drawn sizes of a case's model, whose parameters none of 2 (experts: 3) to 6 shards divides.

    Weights of experts in fp32 have to be multiples of 16 bytes wide.
    """
    generator, experts = random.Random(name), SAVED[name].model is MIXTURE
    while True:
        sizes = {"hidden_size": generator.randrange(9, 40, 2), "intermediate_size": 8 * generator.randrange(2, 5)}
        sizes["hidden_size"] *= 4 if experts else 1
        sizes["vocab_size"] = generator.randrange(41, 80)
        if SAVED[name].only_norm:
            sizes["hidden_size"] = 15  # a shard of 4 is empty
        numel = plan_of(name, Case({}), sizes).parameters.numel
        if all(padded_shard(numel, shards, shards - 1).padding for shards in range(3 if experts else 2, 7)):
            return sizes


def plan_of(name: str, case: Case, sizes: dict[str, Any] | None = None) -> Plan:
    """A plan of the model of the case `name` for the layout of a case."""
    axes = case.parallelism
    world_size = axes.get("tp", 1) * axes.get("cp", 1) * axes.get("dp", 1)
    model = {**SAVED[name].model, **(sizes or sizes_of(name))}
    batch = {"global_batch_size": 60, "micro_batch_size": 60 // axes.get("dp", 1), "sequence_length": 24}
    return make_plan(
        world_size, axes, model=model, training={**batch, **case.training}, extra={"zero": {"stage": case.stage}}
    )


def others(name: str) -> dict[str, Case]:
    """The layouts that a case is resumed in: experts dealt, or one of the others in turn."""
    if SAVED[name].model is MIXTURE:
        return DEALT
    other = list(RESUMED)[list(SAVED).index(name) % len(RESUMED)]
    return {other: RESUMED[other]}


def plans() -> dict[str, Plan]:
    return {name: plan_of(name, case) for name, case in SAVED.items()}


def engine_of(rank: int, plan: Plan, only_norm: bool) -> tuple[Any, Any]:
    """One world for all plans."""
    from parcompile.runtime import groups, initialize, join
    from parcompile.runtime.engine import initialization
    from parcompile.runtime.groups import create_groups

    joined = groups._mesh or join(plan)
    mesh = of_plan(create_groups(plan, rank, joined.device), plan)
    initialization.join = lambda _: mesh
    chosen = (lambda model: [model.model.norm.weight]) if only_norm else None
    engine, _, loader, _ = initialize(
        plan=plan,
        model=initial_model(plan),
        training_data=samples(plan),
        model_parameters=chosen,
        self_check=False,
    )
    return engine, iter(loader)


def train_and_save(rank: int, plans: dict[str, Plan], folder: str) -> None:
    from parcompile.runtime.checkpoint import save

    for name, plan in plans.items():
        engine, batches = engine_of(rank, plan, SAVED[name].only_norm)
        engine.train_batch(batches)
        save(engine, Path(folder) / name, 1)


def resume_and_save(rank: int, names: list[str], folder: str) -> list[str]:
    """The errors."""
    from parcompile.runtime.checkpoint import load, save

    said = []
    for name in names:
        for other, case in others(name).items():
            engine, _ = engine_of(rank, plan_of(name, case), SAVED[name].only_norm)
            try:
                load(engine, Path(folder) / name)
                save(engine, Path(folder) / name / "resumed" / other, 1)
            except Exception as error:
                said.append(f"{name} in {other}: {type(error).__name__}: {error}")
    return said


def assert_same(one: Path, other: Path) -> None:
    first, second = SavedRun(read_note(one)), SavedRun(read_note(other))
    assert first.kinds == second.kinds == ["fp32", "exp_avg", "exp_avg_sq"]
    assert verify(one) == verify(other) == []
    assert first.groups == second.groups
    for name in first.parameters:
        for kind in first.kinds:
            found, expected = second.whole(name, kind), first.whole(name, kind)
            if expected is None:
                assert found is None or not found.any(), (name, kind)
            else:
                assert kind == "fp32" or expected.any(), "no state would be missed"
                assert found is not None
                assert torch.equal(found, expected), (name, kind)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("padded")
    run_ranks(3, train_and_save, plans(), str(folder))
    return folder


def test_other_layouts_resume_all_states(folder: Path) -> None:
    assert run_ranks(4, resume_and_save, list(SAVED), str(folder))[0] == []
    for name in SAVED:
        for other in others(name):
            assert_same(folder / name, folder / name / "resumed" / other)


@pytest.mark.parametrize("name", [name for name, case in SAVED.items() if not case.only_norm])
def test_each_number_of_shards_is_converted_to_and_back(name: str, folder: Path, tmp_path: Path) -> None:
    for shards in range(2, 7):
        case = Case({"cp" if shards in (2, 4) else "dp": shards}, 2)
        there = convert(folder / name, plan_of(name, case), tmp_path / f"{shards} shards")
        assert_same(folder / name, there)
        assert_same(folder / name, convert(there, plan_of(name, Case({})), tmp_path / f"{shards} back"))


def shapes_of(place: Path) -> list[Any]:
    """Of each file of states: what DeepSpeed keeps of the partitions."""
    found = []
    for file in sorted(place.glob("*optim_states.pt")):
        states = torch.load(file, weights_only=False)["optimizer_state_dict"]
        masters = [tuple(one.shape) for one in states["single_partition_of_fp32_groups"]]
        moments = [tuple(one["exp_avg"].shape) for one in states["base_optimizer_state"]["state"].values()]
        found.append((masters, moments, states["group_paddings"], states["partition_count"]))
    return found


@pytest.mark.parametrize("name", [name for name in SAVED if name != "sums in fp32"])
def test_a_converted_checkpoint_records_partitions_as_deepspeed_does(name: str, folder: Path, tmp_path: Path) -> None:
    there = convert(folder / name, plans()[name], tmp_path / "same")
    assert shapes_of(there) == shapes_of(folder / name / "step-1")


def test_verify_finds_states_that_cannot_be_read(folder: Path, tmp_path: Path) -> None:
    """Each file is as it was noted, and none fits the plan."""
    for kind in ("exp_avg", "single_partition_of_fp32_groups"):
        copy = Path(shutil.copytree(folder / "dp3, ZeRO-1" / "step-1", tmp_path / kind))
        file = copy / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
        content = torch.load(file, weights_only=False)
        states = content["optimizer_state_dict"]
        holder: Any = states if kind in states else states["base_optimizer_state"]["state"][0]
        holder[kind] = [holder[kind][0][:-5]] if kind in states else holder[kind][:-5]
        torch.save(content, file)
        listed(copy, file.name)
        (sentence,) = verify(copy)
        assert str(file) in sentence
        with pytest.raises(RuntimeError, match=file.name):
            convert(copy, plan_of("dp3, ZeRO-1", Case({})), tmp_path / f"{kind} out")
