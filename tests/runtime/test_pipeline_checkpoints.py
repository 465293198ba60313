"""Contract: a run whose model is in pipeline stages goes on in any other layout and back, and leaves whole files.

The embedding is tied: the first and the last stage both save it, and one of them is read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from closeness import assert_close
from ranks import run_ranks
from test_checkpoint import STEPS, assert_goes_on, assert_same_to_the_bit, invoke, train, written
from training_runs import initial_model, make_plan, samples

from parcompile.plan import Plan
from parcompile.plan.holding import Holding
from parcompile.runtime.checkpoint import SavedRun, export, read_note

pytestmark = pytest.mark.ranks

STAGED = "pp2 × tp2"
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    STAGED: (4, {"pp": 2, "tp": 2}),
    "tp4": (4, {"tp": 4}),
    "cp2 × dp2": (4, {"cp": 2, "dp": 2}),
    "one rank": (1, {}),
    "pp2 × dp2, three virtual stages": (4, {"pp": 2, "dp": 2, "num_virtual_stages_per_pipeline_rank": 3}),
    "pp2 × tp2, pp inside": (4, {"pp": 2, "tp": 2, "order": "pp-tp-cp-dp"}),
    "pp4 uneven": (4, {"pp": 4, "num_layers_in_last_pipeline_stage": 3}),
}


def layout(name: str) -> Plan:
    world_size, parallelism = LAYOUTS[name]
    model = {"num_hidden_layers": 6, "tie_word_embeddings": True}
    micro = 2 if "virtual" in name else 4 // parallelism.get("dp", 1)
    return make_plan(
        world_size, parallelism, model=model, training={"micro_batch_size": micro // parallelism.get("pp", 1)}
    )


def run(name: str, resume: Path | None, until: int = STEPS, saves: dict[int, Path] | None = None) -> list[Any]:
    plan = layout(name)
    texts = {step: str(folder) for step, folder in (saves or {}).items()}
    return run_ranks(plan.world_size, train, plan, str(resume) if resume else None, until, texts)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def uninterrupted(folder: Path) -> list[dict[str, Any]]:
    """pp 2 × tp 2, saved after two of four steps and at the end."""
    return run(STAGED, None, saves={2: folder / "a", STEPS: folder / "end"})


def test_the_same_stages_go_on_to_the_bit(folder: Path, uninterrupted: list[dict[str, Any]]) -> None:
    for found, expected in zip(run(STAGED, folder / "a"), uninterrupted, strict=True):
        assert (found["losses"], found["norms"]) == (expected["losses"][2:], expected["norms"][2:])
        assert found["random"] == expected["random"]
        for name, value in expected["parameters"].items():
            assert torch.equal(found["parameters"][name], value), name


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != STAGED])
def test_other_layouts_go_on_and_back(name: str, folder: Path, uninterrupted: list[dict[str, Any]]) -> None:
    there = run(name, folder / "a", until=3, saves={3: folder / name})
    assert_goes_on(there[0], {key: uninterrupted[0][key][:3] for key in ("losses", "norms")}, 1)
    assert_goes_on(run(STAGED, folder / name)[0], uninterrupted[0], 1)


def test_a_chain_through_three_layouts_ends_as_the_uninterrupted_run(
    folder: Path, uninterrupted: list[dict[str, Any]]
) -> None:
    run("tp4", folder / "a", until=3, saves={3: folder / "chain"})
    (alone,) = run("one rank", folder / "chain")
    assert_goes_on(alone, uninterrupted[0], 1)
    end = SavedRun(read_note(folder / "end"))
    for name, value in alone["parameters"].items():
        expected = end.whole(name)
        assert expected is not None
        assert_close(value[tuple(slice(size) for size in expected.shape)], expected, about=name)


def test_an_exported_model_has_the_weights_of_all_stages(folder: Path, uninterrupted: list[dict[str, Any]]) -> None:
    from transformers import AutoModelForCausalLM

    export(folder / "end", folder / "exported")
    model = AutoModelForCausalLM.from_pretrained(folder / "exported", dtype=torch.float32)
    saved = SavedRun(read_note(folder / "end"))
    plain = initial_model(saved.note.plan)
    plain.load_state_dict({name: saved.whole(name) for name in saved.parameters}, strict=False)
    for name, value in model.named_parameters():
        assert torch.equal(value, saved.whole(name)), name
    ids = samples(saved.note.plan)[0]["input_ids"][None]
    assert torch.equal(plain.eval()(ids).logits, model(ids).logits)
    for result in uninterrupted:
        for name, value in result["parameters"].items():
            if "norm" in name:
                assert torch.equal(value, saved.whole(name)), name


def test_files_are_converted_to_stages_and_back_to_the_bit(folder: Path, uninterrupted: list[dict[str, Any]]) -> None:
    alone, staged = written(layout("one rank"), folder / "to one"), written(layout(STAGED), folder / "to stages")
    for source, target, output in (("a", alone, "converted"), ("converted", staged, "back")):
        done = invoke("convert", folder / source, "--to", target, "-o", folder / output)
        assert done.exit_code == 0, done.output
        assert invoke("verify", folder / output).exit_code == 0
        assert_same_to_the_bit(folder / output, folder / "a")
    (found, *_) = run(STAGED, folder / "back")
    assert_goes_on(found, uninterrupted[0], STEPS - 2)
    assert (found["losses"], found["norms"]) == (uninterrupted[0]["losses"][2:], uninterrupted[0]["norms"][2:])


def test_the_note_counts_the_parameters_of_each_stage(folder: Path, uninterrupted: list[dict[str, Any]]) -> None:
    plan = layout(STAGED)
    held = [len(Holding(plan, pp_rank).names) for pp_rank in range(2)]
    assert [list(sizes) for sizes in read_note(folder / "a").groups or ()] == [[size] for size in held]
    assert sum(held) == len(dict(plan.parameters.expanded())) + 1  # the tied embedding is on both
    shown = json.loads(invoke("inspect", folder / "a", "--format", "json").stdout)
    assert (shown["pp"], shown["tp"]) == (2, 2)
