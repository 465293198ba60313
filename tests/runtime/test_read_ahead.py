"""Contract: a thread reads the next step's samples while a step trains, and nothing else about the batches changes."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from training_runs import make_plan

from parcompile.plan import Plan
from parcompile.runtime.data import PlanLoader
from parcompile.runtime.micro_batch import FIRST_SAMPLE

RAMP = {"start": 4, "increment": 4, "samples": 24}
NAME = "parcompile reads ahead"


class Samples:
    """Sequences that count from their number on; who reads them is noted."""

    def __init__(self, length: int = 16, size: int = 30, broken: int | None = None) -> None:
        self.length, self.size, self.broken = length, size, broken
        self.read: list[tuple[int, str]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.gated = range(0)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> torch.Tensor:
        if number in self.gated:
            assert self.gate.wait(20)
        if number == self.broken:
            raise ValueError(f"sample {number}: row 7 of shard 3 is damaged")
        self.read.append((number, threading.current_thread().name.rpartition("_")[0]))
        return torch.arange(number, number + self.length) % 61


def loader_of(plan: Plan, data: Samples) -> PlanLoader:
    mesh = SimpleNamespace(plan=plan, size=lambda _: 1, index=lambda _: 0, device=torch.device("cpu"))
    return PlanLoader(data, cast("Any", mesh))


def plan_of(**training: Any) -> Plan:
    return make_plan(1, {}, training={"global_batch_size": 16, "micro_batch_size": 2, **training})


def readers() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith(NAME)]


@pytest.mark.parametrize("ramp", [{}, {"rampup_batch_size": RAMP}])
def test_batches_are_those_that_are_read_when_they_are_due(ramp: dict[str, Any]) -> None:
    """Over the end of the data, and after the user has set the step, or gone on behind another number of samples."""
    taken: list[list[Any]] = []
    for ahead in (True, False):
        loader = loader_of(plan_of(**ramp), Samples())
        loader.reads_ahead = ahead
        batches, found = iter(loader), []
        for number in range(60):
            if number == 20:
                loader.step = 2  # after the micro-batches of the step that is being taken
            if number == 40:
                loader.resume(4, 29)
            batch = next(batches)
            found.append((batch[FIRST_SAMPLE], batch["input_ids"].tolist(), float(batch["num_items_in_batch"])))
        taken.append(found)
        batches.close()  # type: ignore[attr-defined]
    assert taken[0] == taken[1]
    assert readers() == []


def test_one_thread_reads_one_step_ahead_and_ends_with_the_iterator() -> None:
    data = Samples()
    data.gated = range(16, 30)
    data.gate.clear()
    batches: Any = iter(loader_of(plan_of(), data))
    first = [next(batches)[FIRST_SAMPLE] for _ in range(8)]  # the whole first step, while the second cannot be read
    assert first == list(range(0, 16, 2))
    assert [number for number, _ in data.read] == list(range(16))
    data.gate.set()
    next(batches)
    assert len(readers()) == 1
    batches.close()
    assert readers() == []
    # Two steps and the one ahead, each sample once.
    assert [number for number, _ in data.read] == [number % 30 for number in range(48)]
    assert {name for _, name in data.read} == {NAME}


def test_an_error_of_the_data_is_raised_where_its_step_begins() -> None:
    batches: Any = iter(loader_of(plan_of(), Samples(broken=20)))
    for _ in range(8):
        next(batches)
    with pytest.raises(ValueError, match=r"^sample 20: row 7 of shard 3 is damaged$"):
        next(batches)
    assert readers() == []


def test_an_error_of_a_step_that_is_never_taken_is_not_raised() -> None:
    batches: Any = iter(loader_of(plan_of(), Samples(broken=20)))
    for _ in range(8):
        next(batches)
    batches.close()
    assert readers() == []


def test_a_data_set_that_draws_from_torchs_generator_is_read_when_it_is_due() -> None:
    class Drawing(Samples):
        def __getitem__(self, number: int) -> torch.Tensor:
            return super().__getitem__(number) + torch.randint(0, 9, ())

    data = Drawing()
    loader = loader_of(plan_of(), data)
    batches: Any = iter(loader)
    with torch.random.fork_rng():
        for _ in range(9):
            next(batches)
    assert not loader.reads_ahead
    assert [number for number, _ in data.read] == [number % 30 for number in range(32)]
    batches.close()
