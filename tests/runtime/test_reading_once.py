"""Contract: where one rank reads for its copy of the model, ranks train as if each had read for itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from family_runs import family_plan
from ranks import RankError, run_ranks
from torch import Tensor
from training_runs import initial_model, make_plan, samples, whole_weights

from parcompile.plan import Plan
from parcompile.runtime.data.loader import unneeded

pytestmark = pytest.mark.ranks

LAYOUTS = {
    "tp 2": (2, {"tp": 2}),
    "cp 2": (2, {"cp": 2}),
    "pp 2": (2, {"pp": 2}),
    "pp 3": (3, {"pp": 3}),
    "dp 2, tp 2": (4, {"tp": 2}),
    "pp 2, cp 2": (4, {"pp": 2, "cp": 2}),
}
STEPS = 3


def plan_of(layout: str, **training: Any) -> Plan:
    ranks, sizes = LAYOUTS[layout]
    training = {"micro_batch_size": 1, "optimizer": {"lr": 1e-2, "eps": 1e-3}, **training}
    return make_plan(ranks, sizes, model={"num_hidden_layers": max(2, sizes.get("pp", 1))}, training=training)


class Samples:
    """Two documents each, padded on the right, with another number of labels; the numbers of those read are noted."""

    def __init__(self, plan: Plan, *, broken: int = -1, ends: int = 10**9, draws: bool = False) -> None:
        self.rows, self.broken, self.ends, self.draws = samples(plan, masked=True), broken, ends, draws
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        self.read.append(number)
        if number == self.broken:
            raise OSError("row 7 of shard 3 is damaged")
        if number >= self.ends:
            raise StopIteration
        if self.draws:
            torch.rand(())
        length = len(self.rows[number]["input_ids"])
        border = 3 + number % 5
        positions = torch.cat([torch.arange(border), torch.arange(length - border)])
        mask = torch.arange(length) < length - number % 3
        return {**self.rows[number], "position_ids": positions, "attention_mask": mask.long()}


class Streamed:
    """The same samples, which can only be read from the beginning on."""

    def __init__(self, data: Samples) -> None:
        self.data = data

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self.data[number] for number in range(len(self.data)))


def trained(
    plan: Plan,
    once: bool,
    steps: int = STEPS,
    folder: str = "",
    resume: bool = False,
    stream: bool = False,
    **what: Any,
) -> dict[str, Any]:
    from parcompile.runtime import initialize
    from parcompile.runtime.checkpoint import load, save

    data = Samples(plan, **what)
    given = Streamed(data) if stream else data
    engine, _, loader, _ = initialize(plan=plan, model=initial_model(plan), training_data=given, self_check=False)
    loader.reads_once = once
    done = load(engine, folder) if resume else 0
    losses, norms, batches = [], [], iter(loader)
    for _ in range(done, steps):
        losses.append(float(engine.train_batch(batches)))
        norms.append(float(engine.get_global_grad_norm()))
    batches.close()
    if folder and not resume:
        save(engine, folder, steps)
    weights = {name: one.tolist() for name, one in whole_weights(engine.module).items()}
    return {"losses": losses, "norms": norms, "weights": weights, "read": data.read}


def both_ways(rank: int, plan: Plan) -> list[dict[str, Any]]:
    """Where each reads for itself, what dp shares out is a stream."""
    return [trained(plan, False, stream=plan.spec.parallelism.dp > 1), trained(plan, True)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_train_as_if_each_had_read(layout: str) -> None:
    """To the bit, with documents, padding and masked labels."""
    plan = plan_of(layout)
    found = run_ranks(plan.world_size, both_ways, plan)
    dp = plan.spec.parallelism.dp
    readers = {plan.groups.of_rank("dp", 0)[index] for index in range(dp)}
    for rank, (everywhere, once) in enumerate(found):
        read, everywhere["read"] = once.pop("read"), everywhere.pop("read")
        assert everywhere.pop("read") and once == everywhere
        assert len(set(everywhere["losses"])) == STEPS
        # This step and the one ahead, each sample once.
        assert len(read) == (4 * (STEPS + 1) // dp if rank in readers else 0)


def held(rank: int, plan: Plan) -> list[dict[str, Any]]:
    from parcompile.runtime import PackedPlanLoader, PlanLoader, join

    mesh, data, found = join(plan), Samples(plan), []
    documents = [row["input_ids"][: 3 + number] for number, row in enumerate(data.rows[:9])]
    for loader in (PlanLoader(data, mesh), PackedPlanLoader(documents, mesh)):
        both = []
        for once in (False, True):
            loader.reads_once = once
            batches = iter(loader)
            both.append(next(batches))
            batches.close()
        found.append(both)
    return [[{name: one for name, one in batch.items() if name != "packing"} for batch in both] for both in found]  # type: ignore[misc]


def test_a_stage_between_gets_neither_tokens_nor_labels_and_the_ends_what_they_look_at() -> None:
    plan = plan_of("pp 3")
    for rank, loaders in enumerate(run_ranks(3, held, plan)):
        for everywhere, once in loaders:
            assert once.keys() == everywhere.keys()
            for name, whole in everywhere.items():
                here = once[name]
                if name == "input_ids" and rank > 0:
                    assert here.shape == whole.shape and not here.any()
                elif name in ("labels", "shift_labels") and rank == 1:
                    assert here.shape == whole.shape and (here == -100).all()
                elif isinstance(whole, Tensor):
                    assert torch.equal(here, whole), name
                else:
                    assert here == whole, name


def test_documents_are_read_once_under_cp() -> None:
    for loaders in run_ranks(2, held, plan_of("cp 2")):
        for everywhere, once in loaders:
            assert all(torch.equal(one, once[name]) for name, one in everywhere.items() if isinstance(one, Tensor))


def test_tokens_go_to_stages_whose_routers_look_experts_up_by_them() -> None:
    plan = plan_of("pp 3")
    assert [sorted(unneeded(plan, stage)) for stage in range(3)] == [
        ["labels", "shift_labels"],
        ["input_ids", "labels", "shift_labels"],
        ["input_ids"],
    ]
    hashed = family_plan("deepseek_v4", 4, {"pp": 4})  # in the first and the third layer
    assert [sorted(unneeded(hashed, stage)) for stage in range(4)] == [
        ["labels", "shift_labels"],
        ["input_ids", "labels", "shift_labels"],
        ["labels", "shift_labels"],
        ["input_ids"],
    ]


def test_the_error_of_the_rank_that_reads_reaches_all_of_its_copy() -> None:
    plan = plan_of("pp 2, cp 2")
    said = run_ranks(4, caught, plan, {"broken": 6})
    assert said[0] == "OSError: row 7 of shard 3 is damaged"
    assert set(said[1:]) == {
        "RunError: rank 0 reads for this copy of the model and failed at sample 6: OSError: row 7 of shard 3 is damaged"
    }


def caught(rank: int, plan: Plan, what: dict[str, Any]) -> str:
    try:
        trained(plan, True, **what)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_data_that_end_before_their_length_end_on_all_ranks() -> None:
    said = run_ranks(2, caught, plan_of("tp 2"), {"ends": 9})
    text = "ValueError: the data set ends before sample 9, and its length is 20"
    assert said == [text, f"RunError: rank 0 reads for this copy of the model and failed at sample 9: {text}"]


def test_data_that_draw_from_torchs_generator_are_refused() -> None:
    for text in run_ranks(2, caught, plan_of("tp 2"), {"draws": True}):
        assert "the data set draws from torch's generator, and with reads_once it does so on one rank" in text


def test_a_rank_that_does_not_read_once_is_named() -> None:
    said = r"with loader.reads_once one rank reads for others, and rank 1 has not called it within 10 s: set it"
    with pytest.raises(RankError, match=said):
        run_ranks(2, on_the_first_alone, plan_of("tp 2"))


def on_the_first_alone(rank: int, plan: Plan) -> None:
    os.environ["PARCOMPILE_HANDSHAKE_TIMEOUT"] = "10"
    trained(plan, rank == 0)


def saved(rank: int, plan: Plan, folder: str) -> dict[str, Any]:
    return trained(plan, True, 2, folder)


def resumed(rank: int, plan: Plan, folder: str, once: bool) -> dict[str, Any]:
    return trained(plan, once, 4, folder, resume=True, stream=not once)


def test_a_run_goes_on_in_another_layout_with_the_same_samples(tmp_path: Path) -> None:
    """A stream too, which is read from its beginning again."""
    first, other = plan_of("tp 2"), plan_of("cp 2")
    run_ranks(2, saved, first, str(tmp_path))
    everywhere = run_ranks(2, resumed, other, str(tmp_path), False)
    once = run_ranks(2, resumed, other, str(tmp_path), True)
    assert [one.pop("read") for one in once] == [[*range(8, 20)], []]
    assert [one.pop("read") for one in everywhere] == [[*range(20)]] * 2
    assert once == everywhere
