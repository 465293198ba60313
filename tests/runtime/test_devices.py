"""What a rank does with its GPU and its communicators. Accelerator and backend are stood in for: no GPU is needed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from training_runs import make_plan

from parcompile.runtime import RunError, groups
from parcompile.runtime.engine.initialization import _place
from parcompile.runtime.groups import create_groups, rendezvous
from parcompile.runtime.groups.rendezvous import Environment, device_of


class _Accelerator:
    """As DeepSpeed's for CUDA, of a process that sees so many GPUs."""

    def __init__(self, visible: int) -> None:
        self.visible, self.taken = visible, -1

    def device_name(self, index: int | None = None) -> str:
        return "cuda" if index is None else f"cuda:{index}"

    def device_count(self) -> int:
        return self.visible

    def set_device(self, index: int) -> None:
        self.taken = index


def _device(visible: int, local_rank: int, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.device, int]:
    accelerator = _Accelerator(visible)
    monkeypatch.setattr("deepspeed.accelerator.get_accelerator", lambda: accelerator)
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    return device_of(Environment(local_rank, 8, local_rank, launched=True)), accelerator.taken


@pytest.mark.parametrize(("visible", "local_rank", "index"), [(8, 5, 5), (1, 5, 0), (1, 0, 0)])
def test_a_process_takes_the_gpu_that_it_sees(
    visible: int, local_rank: int, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm shows each task one GPU, which is number 0 there; DeepSpeed takes the number in LOCAL_RANK."""
    assert _device(visible, local_rank, monkeypatch) == (torch.device("cuda", index), index)
    assert os.environ["LOCAL_RANK"] == str(index)


@pytest.mark.parametrize("visible", [0, 4])
def test_more_ranks_than_gpus_are_refused_before_any_message(visible: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunError, match=rf"sees {visible} GPU\(s\): LOCAL_RANK 5 \+ 1 = 6 > {visible}"):
        _device(visible, 5, monkeypatch)


@pytest.fixture
def large_world() -> Iterator[None]:
    """Rank 9 of 16."""
    dist.init_process_group("meta:fake,cpu:fake", store=FakeStore(), rank=9, world_size=16)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_a_rank_creates_its_own_groups_only_and_connects_them_in_order(
    large_world: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls of `new_group` do not grow with the world; communicators are made by name, in the order of all ranks."""
    plan = make_plan(16, {"tp": 2, "cp": 2, "pp": 2}, model={"num_hidden_layers": 4, "tie_word_embeddings": True})
    created: list[tuple[int, ...]] = []
    right = dist.new_group

    def new_group(ranks: list[int], **options: Any) -> Any:
        created.append(tuple(ranks))
        assert options["use_local_synchronization"]
        return right(ranks, **options)

    connected = []
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(groups, "connect", lambda group, _: connected.append(dist.get_process_group_ranks(group)))
    mesh = create_groups(plan, 9, torch.device("meta"))
    wanted = [plan.groups.of_rank(name, 9) for name in plan.groups.names]
    pairs = [plan.groups.of_rank("pp", 9)] * 2  # for hidden states and for gradients
    assert created == [ranks or (9,) for ranks in wanted] + pairs
    assert connected == [list(ranks) for ranks in (*filter(None, wanted), *pairs)]
    assert {name: plan.groups.of_rank(name, 9) for name in mesh.groups} == {
        name: ranks for name, ranks in zip(plan.groups.names, wanted, strict=True) if ranks
    }


def test_names_of_groups_are_equal_on_all_their_ranks() -> None:
    """torch counts a process's groups in their names: ranks without one of some name would never meet the others."""
    parallelism = {"tp": 2, "pp": 4, "num_virtual_stages_per_pipeline_rank": 2}
    model = {"num_hidden_layers": 8, "tie_word_embeddings": True}
    plan = make_plan(8, parallelism, model=model, training={"micro_batch_size": 1})
    assert any(not plan.groups.of_rank(name, rank) for name in plan.groups.names for rank in range(8))
    names: dict[tuple[str, tuple[int, ...]], set[str]] = {}
    for rank in range(8):
        dist.init_process_group("meta:fake,cpu:fake", store=FakeStore(), rank=rank, world_size=8)
        try:
            mesh = create_groups(plan, rank, torch.device("meta"))
            for name, group in mesh.groups.items():
                names.setdefault((name, plan.groups.of_rank(name, rank)), set()).add(group.group_name)
            for lane, group in mesh.lanes.items():
                ranks = tuple(dist.get_process_group_ranks(group))
                names.setdefault((str(lane), ranks), set()).add(group.group_name)
        finally:
            dist.destroy_process_group()
    assert all(len(found) == 1 for found in names.values())
    assert len({found for each in names.values() for found in each}) == len(names)


def test_a_communicator_is_made_where_several_ranks_have_gpus(
    large_world: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[torch.device] = []
    backend = SimpleNamespace(eager_connect_single_device=made.append)
    for ranks, device in (([8, 9], "cuda:1"), ([9], "cuda:1"), ([8, 9], "cpu")):
        group = SimpleNamespace(_get_backend=lambda _: backend)
        monkeypatch.setattr(dist, "get_world_size", lambda _, ranks=ranks: len(ranks))
        groups.connect(group, torch.device(device))  # type: ignore[arg-type]
    assert made == [torch.device("cuda:1")]


@pytest.mark.parametrize("failed", [True, False])
def test_communicators_are_aborted_at_the_end_of_a_failed_rank_only(
    failed: bool, large_world: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    aborted: list[bool] = []
    monkeypatch.setattr(rendezvous, "has_failed", lambda: failed)
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", lambda: aborted.append(True))
    rendezvous.abandon()
    assert aborted == [True] * failed


def test_weights_are_cast_before_they_move_and_stay_what_they_are() -> None:
    """DeepSpeed would cast them on the device, where both copies then lie. It sees to buffers itself."""
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.rand(3, 2))
    model.tied = model.weight
    model.counts = torch.nn.Parameter(torch.ones(2, dtype=torch.long), requires_grad=False)
    model.register_buffer("frequencies", torch.rand(2))
    weight, before = model.weight, model.weight.detach().clone()
    weight.tensor_model_parallel = True  # type: ignore[attr-defined]
    _place(model, torch.device("cpu"), torch.bfloat16)
    assert model.weight is weight is model.tied
    assert weight.tensor_model_parallel  # type: ignore[attr-defined]
    assert torch.equal(weight, before.bfloat16())
    assert (model.counts.dtype, model.frequencies.dtype) == (torch.long, torch.float32)
