"""Contract: a run whose experts are dealt over ranks goes on in any other layout and back, and leaves whole files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from expert_runs import Case
from ranks import run_ranks
from test_checkpoint import STEPS, assert_goes_on, train
from training_runs import initial_model, samples, whole_parameters

from parcompile.runtime.checkpoint import SavedRun, export, read_note, verify
from parcompile.runtime.checkpoint.adapting import convert, import_pretrained

pytestmark = pytest.mark.ranks

DEALT = Case("deepseek_v3", {"tp": 2, "dp": 2, "ep": 2})
OTHERS = {
    "one rank": Case("deepseek_v3", {}),
    "tp2 × cp2 × ep4, each expert whole": Case("deepseek_v3", {"tp": 2, "cp": 2, "ep": 4, "expert_tp": 1}),
    "dp4 × ep2, ZeRO stage 0": Case("deepseek_v3", {"dp": 4, "ep": 2}, zero=0),
    "pp2 × dp2 × ep2": Case("deepseek_v3", {"pp": 2, "dp": 2, "ep": 2}),
}


def run(case: Case, resume: Path | None, until: int = STEPS, saves: dict[int, Path] | None = None) -> list[Any]:
    texts = {step: str(folder) for step, folder in (saves or {}).items()}
    found = run_ranks(case.ranks, train, case.plan(), str(resume) if resume else None, until, texts)
    return [{"rank": rank, **one} for rank, one in enumerate(found)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def uninterrupted(folder: Path) -> list[dict[str, Any]]:
    return run(DEALT, None, saves={2: folder / "a", STEPS: folder / "end"})


def test_the_same_layout_goes_on_to_the_bit(folder: Path, uninterrupted: list[dict[str, Any]]) -> None:
    for found, expected in zip(run(DEALT, folder / "a"), uninterrupted, strict=True):
        assert (found["losses"], found["norms"]) == (expected["losses"][2:], expected["norms"][2:])
        for name, value in expected["parameters"].items():
            assert torch.equal(found["parameters"][name], value), name


@pytest.mark.parametrize("name", OTHERS)
def test_other_layouts_go_on_and_back(name: str, folder: Path, uninterrupted: list[dict[str, Any]]) -> None:
    there = run(OTHERS[name], folder / "a", until=3, saves={3: folder / name})
    assert_goes_on(there[0], {key: uninterrupted[0][key][:3] for key in ("losses", "norms")}, 1, DEALT.plan())
    assert_goes_on(run(DEALT, folder / name)[0], uninterrupted[0], 1, DEALT.plan())


def test_files_are_converted_to_dealt_experts_and_back_to_the_bit(
    folder: Path, uninterrupted: list[dict[str, Any]]
) -> None:
    there = convert(folder / "end", OTHERS["tp2 × cp2 × ep4, each expert whole"].plan(), folder / "converted")
    unsharded = convert(there, OTHERS["dp4 × ep2, ZeRO stage 0"].plan(), folder / "not sharded")
    back = convert(unsharded, DEALT.plan(), folder / "converted back")
    first, last = SavedRun(read_note(folder / "end")), SavedRun(read_note(back))
    assert verify(there) == verify(unsharded) == verify(back) == []
    for name in first.parameters:
        for kind in first.kinds:
            one, other = first.whole(name, kind), last.whole(name, kind)
            assert one is not None
            assert other is not None
            assert torch.equal(one, other), (name, kind)
    # What was written is what an engine of that layout goes on with.
    assert_goes_on(
        run(
            OTHERS["tp2 × cp2 × ep4, each expert whole"],
            convert(folder / "a", OTHERS["tp2 × cp2 × ep4, each expert whole"].plan(), folder / "b"),
        )[0],
        uninterrupted[0],
        2,
        DEALT.plan(),
    )


def test_an_exported_model_has_all_experts_and_each_rank_reads_its_own(
    folder: Path, uninterrupted: list[dict[str, Any]]
) -> None:
    export(folder / "end", folder / "exported")
    whole = whole_parameters(DEALT.plan(), uninterrupted)
    found = run_ranks(4, read_pretrained, DEALT.plan(), str(folder / "exported"))
    for one, expected in zip(found, uninterrupted, strict=True):
        for name, value in expected["parameters"].items():
            assert torch.equal(one[name], value), name
    imported = SavedRun(read_note(import_pretrained(folder / "exported", DEALT.plan(), folder / "imported")))
    for name, value in whole.items():
        assert torch.equal(imported.whole(name), value), name


def read_pretrained(_: int, plan: Any, folder: str) -> dict[str, torch.Tensor]:
    from parcompile.runtime import load_pretrained

    model = load_pretrained(folder, plan)
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_frozen_experts_of_every_rank_are_saved(folder: Path) -> None:
    plan = Case("mixtral", {"dp": 2, "ep": 2}).plan()
    run_ranks(2, save_frozen, plan, str(folder / "frozen"))
    saved, built = SavedRun(read_note(folder / "frozen")), dict(initial_model(plan).named_parameters())
    for name in saved.parameters:
        if "experts" in name:
            assert torch.equal(saved.whole(name), built[name]), name


def save_frozen(_: int, plan: Any, folder: str) -> None:
    """One step of a model whose experts are not trained: DeepSpeed knows of none then."""
    from parcompile.runtime import initialize
    from parcompile.runtime.checkpoint import load, save

    model = initial_model(plan)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "experts" not in name
    engine, _, loader, _ = initialize(plan=plan, model=model, training_data=samples(plan))
    engine.train_batch(iter(loader))
    save(engine, folder, 1)
    before = {name: one.detach().clone() for name, one in engine.module.named_parameters()}
    for one in engine.module.parameters():
        one.data.zero_()
    load(engine, folder)
    for name, one in engine.module.named_parameters():
        assert torch.equal(one, before[name]), name
