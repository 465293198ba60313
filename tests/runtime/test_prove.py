"""Contract: `prove` finds engines that train something else than one process does, and accuses none that does not."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from click.testing import CliRunner, Result
from launched import Ranks

import parcompile
import parcompile.runtime.prove
from parcompile.cli import cli, main
from parcompile.cli.prove import _cell
from parcompile.lint.advisories import advisories
from parcompile.plan import Plan
from parcompile.runtime.prove import Certificate, Engine, EngineError, GivenError, given, of_plan, prove, shrink, verify
from parcompile.runtime.prove.ranks import server
from parcompile.runtime.prove.ranks.cells import (
    FEATURES,
    Cell,
    batch_size,
    cell_of,
    draw,
    simplest,
    text_of,
    undrawn,
    without_folders,
    world_size,
)
from parcompile.runtime.prove.ranks.comparison import CANNOT, EQUAL, RED, ROUNDING, judge
from parcompile.runtime.prove.ranks.reference import reference
from parcompile.schema import validate
from parcompile.version import how_to_install

ADAPTER = str(Path(__file__).with_name("mistakes.py"))
EXAMPLE = Path(__file__).parents[2] / "examples" / "prove_adapter.py"
NO_CELL = json.dumps(
    {"version": 1, "engine": ADAPTER, "versions": {}, "wheels": {}, "code": f"sha256:{0:064}", "seed": 0}
    | {
        "counts": {"equal": 0, "rounding": 0, "red": 0, "not runnable": 0},
        "features": {"family": ["llama"]},
        "cells": [],
    }
)
SEEN = {"masks": "uneven", "clipping": 0.5, "dp": 2}
"""With which the mistakes of the adapter show: means differ where masks do."""


@pytest.fixture(scope="module")
def engines() -> Iterator[Callable[[str], Engine]]:
    """Each starts once: importing takes longer than cells do."""
    with ExitStack() as stack:
        yield functools.cache(lambda name: stack.enter_context(Engine(name, timeout=200)))


@pytest.fixture
def plain(engines: Callable[[str], Engine]) -> Engine:
    return engines(ADAPTER)


@pytest.fixture
def command(engines: Callable[[str], Engine], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """The command, which is lent engines that are there."""

    def lent(name: str, *_: object) -> nullcontext[Engine]:
        return nullcontext(engines(str(EXAMPLE) if name.endswith(EXAMPLE.name) else name))

    monkeypatch.setattr(parcompile.runtime.prove, "Engine", lent)
    return lambda *arguments: CliRunner().invoke(cli, ["prove", *arguments])


def test_drawn_cells_cover_pairs_and_are_the_same_each_time() -> None:
    cells = draw(FEATURES, lambda _: None, 40, 3, 4)
    assert cells == draw(FEATURES, lambda _: None, 40, 3, 4) != draw(FEATURES, lambda _: None, 40, 4, 4)
    for (one, values), (other, others) in itertools.combinations(FEATURES.items(), 2):
        missing = set(itertools.product(values, others)) - {(cell[one], cell[other]) for cell in cells}
        assert not missing, (one, other)
    assert all(world_size(cell) <= 4 for cell in cells)
    assert batch_size({"dp": 2, "micro_batch": 3, "accumulation": 4}) == 24


def test_a_value_that_few_cells_may_have_is_drawn_too() -> None:
    features: dict[str, tuple[Any, ...]] = {**FEATURES, "tp": (1, 2), "cp": (1, 2), "pp": (1, 2), "never": (0, 1)}

    def supports(cell: Cell) -> str | None:
        split = [axis for axis in ("tp", "cp", "pp") if cell[axis] > 1]
        plain = {"family": "llama", "packed": False, "dtype": "fp32", "tied": False, "dp": 1, "micro_batch": 2}
        right = len(split) <= 1 and (not split or plain.items() <= cell.items()) and not cell["never"]
        return None if right else "not built"

    for seed in range(3):
        cells = draw(features, supports, 14, seed, 4)
        assert undrawn(features, cells) == [("never", 1)]
        assert (len(cells), [supports(cell) for cell in cells]) == (14, [None] * 14)


def test_a_cell_is_asked_for_as_it_is_printed() -> None:
    own = {
        "checkpointing": ("none", "full"),
        "mistake": ("none", "ranks", "ranks weigh alike"),
        "resume": (False, True),
    }
    features: dict[str, tuple[Any, ...]] = {**FEATURES, **own, "config": ("",), "plan": ("",)}
    given = (
        {},
        {"config": "{}", "stage": 2, "tp": 2},
        {"plan": json.dumps({"name": "my plan", "experts": True}), "tp": 8},
    )
    for decided in given:
        for cell in draw(features, lambda _: None, 40, 3, 4):
            whole = {**cell, **decided}
            printed = text_of(whole, features)
            assert {**simplest(features), **cell_of(printed, features, decided), **decided} == {
                **whole,
                "family": cell["family"] if "plan" not in decided else "llama",
            }, printed
    for printed, sentence in (
        ("qwen4 dp 2", "'qwen4' is no word of a cell: write a family (llama, qwen3, mistral, mixtral, qwen3_moe) and"),
        ("llama width 2", "features (dp, accumulation, micro_batch, masks, clipping, dtype, tied, packed, isolation, "),
        ("llama dp 3 tied", "dp '3': the engine's adapter has 1, 2, 4"),
        ("llama masks", "masks has no value: the engine's adapter has none, uneven, empty"),
        ("llama dp 2 dp 4", "the cell has dp twice"),
        ("llama dp 2 a configuration file", "the cell has a configuration file: name it by --config"),
    ):
        with pytest.raises(ValueError, match=re.escape(sentence)):
            cell_of(printed, features, {})
    with pytest.raises(ValueError, match="stage 1: the file decides that it is 2"):
        _cell("stage=1,tp=2", features, {"stage": 2})


def result(*, loss: float = 2.0, norm: float | None = 1.0, weight: float = 1.0, **others: Any) -> dict[str, Any]:
    params = {"w": torch.full((4,), weight, dtype=torch.float64)}
    start, first = ({"w": torch.full((4,), one, dtype=torch.float64)} for one in (0.0, -0.005))
    return {"loss": [3.0, loss], "norm": [norm, norm], "params": params, "start": start, "first": first, **others}


@pytest.mark.parametrize(
    ("found", "moved", "verdict", "why"),
    [
        (result(), 0.0, EQUAL, None),
        (result(weight=1 + 9e-5), 0.0, EQUAL, None),
        (result(loss=2 + 1e-4), 2e-5, ROUNDING, None),
        (result(loss=2 + 1e-4), 1e-6, RED, "loss off by 5.0e-05 at step 2"),
        (result(weight=1.5), 1.0, RED, "update off by 5.0e-01 at w"),  # no rounding is so large
        (result(first={"w": torch.full((4,), -0.0025)}), 0.0, RED, "gradient off by 6.7e-01 at w"),  # lr 0.01: g / 3
        (result(first={"w": torch.full((4,), float("nan"))}), 0.0, RED, "gradient off by nan at w"),
        (result(state="counts 2 step(s)"), 0.0, RED, "the optimizer's state counts 2 step(s)"),
        (result(norm=None), 0.0, EQUAL, None),
        (result(norm=0.0), 0.0, RED, "the gradient norm is 0 at every step"),
        (result(loss=3.0), 0.0, RED, "the loss is 3.0 at every step"),
        (result(loss=float("nan")), 0.0, RED, "a loss or a norm is not a finite number"),
        (result(params={}), 0.0, RED, "the engine lacks w, one of 1 such parameters"),
        (result(params={"w": torch.ones(3)}), 0.0, RED, "the engine has another shape of w, one of 1 such parameters"),
        (
            result(params={"w": torch.tensor([1.0, float("inf"), 1, 1])}),
            0.0,
            RED,
            "the engine has numbers that are not finite in w, one of 1 such parameters",
        ),
    ],
)
def test_a_difference_is_rounding_where_other_last_bits_do_as_much(
    found: dict[str, Any], moved: float, verdict: str, why: str | None
) -> None:
    answer = judge("fp32", found, result(), lambda: [result(loss=2 * (1 + moved), weight=1 + moved)])
    assert (answer["verdict"], answer.get("why")) == (verdict, why)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no name 'x' (/srv/v/lib/python3.11/site-packages/a/b.py)", "no name 'x' (a/b.py)"),
        ("No such file: '/tmp/prove-1/saved/0.pt'", "No such file: '0.pt'"),
        ("see https://pytorch.org/docs/x.html, 3/4 of a/b", "see https://pytorch.org/docs/x.html, 3/4 of a/b"),
    ],
)
def test_messages_name_files_of_packages_not_of_a_machine(text: str, said: str) -> None:
    assert without_folders(text) == said


def test_rounding_in_bf16_is_that_of_the_copy_that_computes() -> None:
    """The weights that are stepped start as they are: a nudge of theirs is lost in the copy of the first step."""
    cell = {**simplest(FEATURES), "family": "llama", "dtype": "bf16", "seed": 0}
    plain, moved = reference(cell), reference(cell, 1)
    assert all(torch.equal(one, moved["start"][name]) for name, one in plain["start"].items())
    for name in ("loss", "norm"):
        assert 1e-6 < abs(moved[name][0] / plain[name][0] - 1) < 1e-2


def test_weights_that_are_stored_in_bf16_are_judged_together() -> None:
    """The last bit of a weight of a norm is as large as its update."""
    stored = {"w": torch.ones(4).bfloat16(), "norm": torch.tensor([1.0]).bfloat16()}
    expected = {"w": torch.ones(4), "norm": torch.tensor([1.002])}
    start = {"w": torch.zeros(4), "norm": torch.tensor([1.0])}
    answer = judge("bf16", result(params=stored), result(params=expected, start=start), list)
    assert (answer["verdict"], answer["differences"]["update"]) == (EQUAL, pytest.approx(1e-3))


@pytest.mark.ranks
def test_every_planted_mistake_is_red_and_none_is_without(plain: Engine) -> None:
    right = [{**SEEN, "dtype": dtype, "family": family} for dtype, family in (("fp32", "mixtral"), ("fp64", "qwen3"))]
    resumes = ("moments are not saved",)
    wrong = [{**SEEN, "mistake": one, "resume": one in resumes} for one in plain.features["mistake"][1:]]
    found = prove(plain, [*right, *wrong], shrinks=False)
    assert {found.text_of(one): one.verdict for one in found.cells[:2] if one.verdict not in (EQUAL, ROUNDING)} == {}
    assert {found.text_of(one): one.verdict for one in found.cells[2:] if one.verdict != RED} == {}
    assert not found.proves
    assert found.cells[0].answer["differences"].keys() == {"loss", "norm", "gradient", "update"}
    begins = [one.answer["why"] for one in found.cells if "begins" in one.cell["mistake"]]
    said = ("counts 1 step(s)", "has moments")
    assert begins == [f"the optimizer's state {one} in front of step 1" for one in said]


PLANTED = (
    "gradient x 1 / ranks",
    "reduced: between nodes",
    "the last shard is lost",
    "the border of cp counts twice",
    "an empty step comes first",
    "by the norm of a shard",
)


@pytest.mark.ranks
def test_mutants_are_red_and_their_page_lists_all_of_them(engines: Callable[[str], Engine]) -> None:
    """A mutant of each kind, in one cell; `.ci/prover_matrix.py` runs all."""
    engine = engines(str(Path(__file__).with_name("mutants.py")))
    cell = {"dp": 2, "cp": 2, "accumulation": 2, "masks": "uneven", "clipping": 0.5}
    found = prove(engine, [cell, *({**cell, "mutant": name} for name in PLANTED)], shrinks=False)
    assert [one.verdict for one in found.cells] == [EQUAL, *[RED] * len(PLANTED)], found.to_json()["cells"]
    text = (Path(__file__).parents[2] / "docs" / "prover.md").read_text(encoding="utf-8")
    page, _, in_engines = text.partition("## Mistakes in engines")
    rows = re.compile(r"^\| ([^|]+) \| (?:in|\d)", re.MULTILINE)
    assert rows.findall(page) == list(engine.features["mutant"][1:])
    planted = Path(__file__).with_name("engine_mutants.py").read_text(encoding="utf-8")
    assert set(rows.findall(in_engines)) == set(re.findall(r'^ +"([\w.]+: [^"]+)": ', planted, re.MULTILINE))


@pytest.mark.ranks
def test_a_mistake_in_deepspeed_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of those of `.ci/prover_matrix.py`, each beside the same cell without it."""
    monkeypatch.setenv("PROVE_ENGINE", "deepspeed")
    offload = {"dp": 2, "offload": True, "stage": 1}
    cells = [
        (offload, "offload: the norm of a rank's own shard"),
        ({"tp": 2}, "AutoTP: outputs of split layers are not summed"),
        ({"family": "mixtral", "dp": 2, "stage": 1, "experts": "moe"}, "deepspeed.moe: gates have no gradient"),
    ]
    both = [{**cell, "mutant": name} for cell, one in cells for name in ("none", one)]
    with Engine(str(Path(__file__).with_name("engine_mutants.py"))) as engine:
        found = prove(engine, both, shrinks=False)
    assert [one.verdict for one in found.cells] == [EQUAL, RED] * 3, found.to_json()["cells"]


@pytest.mark.ranks
def test_a_red_cell_shrinks_to_what_it_needs(plain: Engine) -> None:
    cell = {**simplest(plain.features), **SEEN, "family": "qwen3", "packed": True, "mistake": "ranks weigh alike"}
    smallest = shrink(plain, cell)
    assert smallest == {**simplest(plain.features), "dp": 2, "mistake": "ranks weigh alike"}


def test_features_that_an_earlier_cell_needed_are_tried_first() -> None:
    tried = list[Any]()

    class Counted:
        name, versions, wheels, code = "counted", dict[str, str](), dict[str, str](), ""
        features: Mapping[str, Any] = {**FEATURES, "mistake": (False, True)}

        def run(self, cell: dict[str, Any]) -> dict[str, Any]:
            tried.append(cell)
            return {"verdict": RED if cell["mistake"] and cell["dp"] == 2 else EQUAL, "why": "", "differences": {}}

        def explain(self, cell: dict[str, Any]) -> dict[str, Any]:
            return {"place": "", "said": f"seed {cell['seed']}", "collectives": []}

    engine: Any = Counted()
    red = {"dp": 2, "mistake": True, "tied": True}
    first, other, right = prove(engine, [{**red, "seed": 3}, {**red, "seed": 4, "masks": "uneven"}, {}]).cells
    few = {**simplest(engine.features), "dp": 2, "mistake": True, "seed": 3}
    assert (first.smallest, other.smallest, right.smallest) == (few, few, None)
    assert other.answer["explanation"]["said"] == "seed 3"
    assert tried[-2] == {**few, "seed": 4}
    assert len(tried) < 12


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("cell", "place", "said"),
    [
        ({}, "", "nothing that is watched differs"),
        (
            {"mistake": "mean of means", "masks": "uneven"},
            "the gradient of the output of lm_head, micro-batch 1 of step 1 on rank 1",
            "times that of one process, counted from the first",
        ),
        (
            {"mistake": "ranks weigh alike"},
            "the gradient of every parameter, step 1 on rank 0",
            "it is 0.5 times that of one process, after reduction and clipping; the norm that is told is",
        ),
        ({"mistake": "no all-reduce"}, "the gradient of model.embed_tokens.weight, step 1 on rank 0", "21 of 21"),
        (
            {"mistake": "moments are not saved", "resume": True},
            "the optimizer's state",
            "it counts 0 step(s) in front of step 3",
        ),
    ],
)
def test_a_red_cell_is_explained_by_the_first_wrong_place(
    cell: dict[str, Any], place: str, said: str, plain: Engine
) -> None:
    found = plain.explain({**simplest(plain.features), "dp": 2, **cell})
    assert (found["place"], said in found["said"]) == (place, True), found
    if cell.get("mistake") == "ranks weigh alike":
        assert re.match(r"all_reduce over ranks 0, 1 of \[[\d, ]*\] \w{8} -> \w{8}", found["collectives"][-1])


@pytest.mark.ranks
def test_packed_documents_are_told_apart(engines: Callable[[str], Engine]) -> None:
    engine = engines(str(Path(__file__).with_name("mutants.py")))
    cell = {"cp": 2, "packed": True, "isolation": True}
    found = prove(
        engine, [cell, {**cell, "mutant": "documents are not told apart"}, {"isolation": True}], shrinks=False
    )
    assert [one.verdict for one in found.cells] == [EQUAL, RED, CANNOT], found.to_json()["cells"]


def test_a_leak_that_one_process_has_too_is_red(tmp_path: Path) -> None:
    """Both have the model's own masks: only other tokens in front of a document tell."""
    cell = {**simplest(FEATURES), "packed": True, "isolation": True}
    right = server.reference(cell)
    for factor, verdict, why in (
        (1.0, EQUAL, None),
        (1.01, RED, "other tokens in front of a document change it: loss"),
    ):
        for folder, times in ((tmp_path, 1.0), (tmp_path / "perturbed", factor)):
            folder.mkdir(exist_ok=True)
            steps = [(loss * times, norm) for loss, norm in zip(right["loss"], right["norm"], strict=True)]
            torch.save({"steps": steps, "params": right["params"], "first": right["first"]}, folder / "result-3.pt")
        server._judge(cell, tmp_path)
        answer = json.loads((tmp_path / "verdict.json").read_text())
        assert (answer["verdict"], answer.get("why") and answer["why"].partition(" off")[0]) == (verdict, why)
    given = [next(server.batches({**cell, "perturbed": other})) for other in (False, True)]
    assert torch.equal(*(one["labels"] for one in given))
    assert not torch.equal(*(one["input_ids"] for one in given))
    counts = given[0]["labels"] != -100
    assert torch.equal(*(one["input_ids"][counts] for one in given))


@pytest.mark.ranks
def test_a_certificate_is_read_back_and_runs_again(plain: Engine) -> None:
    found = prove(plain, [{"dp": 2}, {"dp": 2, "mistake": "no all-reduce"}, {"family": "mixtral", "dtype": "fp64"}])
    assert [one.verdict for one in found.cells] == [EQUAL, RED, CANNOT]
    again = Certificate.from_json(json.loads(json.dumps(found.to_json())))
    assert again.to_json() == found.to_json()
    assert verify(plain, again) == []
    assert validate(json.loads(json.dumps(found.to_json())), "certificate").diagnostics == ()
    tree = found.to_json()
    tree["cells"][0]["verdict"], tree["versions"]["torch"], tree["wheels"]["torch"] = RED, "1.0", "sha256:0"
    del tree["versions"]["transformers"]
    said = verify(plain, Certificate.from_json(tree))
    assert len(said) == 4
    assert said[0].endswith("that of the certificate 1.0")
    assert said[1].endswith("that of the certificate not there")
    assert re.fullmatch(r"the wheel of torch is sha256:\w{64}, that of the certificate sha256:0", said[2])
    assert said[3] == "llama dp 2: equal, the certificate says red"
    suite = ElementTree.fromstring(found.to_junit())
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("3", "1", "1")
    foreign = {**tree, "cells": [{"cell": {"family": "llama", "colour": "blue"}, "verdict": EQUAL}]}
    with pytest.raises(ValueError, match="the engine has no feature 'colour'"):
        verify(plain, Certificate.from_json(foreign))
    read = Certificate.from_json(foreign)
    assert read.text_of(read.cells[0]) == "llama colour blue"
    with pytest.raises(ValueError, match="the certificate is of deepspeed, and this engine is"):
        verify(plain, Certificate.from_json({**tree, "engine": "deepspeed"}))
    with pytest.raises(ValueError, match="dp 4 takes 4 ranks, and at most 2 are started"):
        verify(plain, Certificate.from_json({**tree, "cells": [{"cell": {"dp": 4}, "verdict": EQUAL}]}), 2)


@pytest.mark.ranks
def test_deepspeed_is_right_where_it_is_and_red_where_it_is_known_to_be_wrong(
    engines: Callable[[str], Engine],
) -> None:
    """What an advisory says of the installed version shows in its cell."""
    right = [
        {"stage": 2, "dp": 2, "accumulation": 2, "masks": "uneven", "clipping": 0.5},
        {"stage": 1, "dp": 2, "dtype": "bf16", "clipping": 0.5, "offload": True},
        {"stage": 1, "dp": 2, "cp": 2, "masks": "uneven"},
        *({"family": "mixtral", "stage": 1, "dp": 2, "clipping": 0.5, "experts": way} for way in ("autoep", "moe")),
    ]
    engine = engines("deepspeed")
    known = [advisory for advisory in advisories() if advisory.tool == "deepspeed" and advisory.cell]
    shown = {advisory.id: advisory.cell for advisory in known if advisory.affects(engine.versions["deepspeed"])}
    shown = {name: cell for name, cell in shown.items() if cell and "script" not in cell}
    assert list(shown) == ["A020", "A022", "A023", "A026", "A048", "A049"]
    found = prove(engine, [*right, *shown.values()], shrinks=False)
    assert [one.verdict for one in found.cells] == [*[EQUAL] * 5, *[RED] * 6], found.to_json()["cells"]


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["accelerate", "transformers"])
def test_fsdp_is_fsdp_and_says_what_is_replaced_on_cpus(name: str, engines: Callable[[str], Engine]) -> None:
    """accelerate gives CPUs DDP where FSDP is asked for; the adapters refuse that, and replace what decides it."""
    cell = {"dp": 2, "wrapper": "fsdp2", "accumulation": 2, "masks": "uneven", "clipping": 0.5}
    (found,) = prove(engines(name), [cell]).cells
    assert (found.verdict, len(found.answer.get("shims", ()))) == (EQUAL, 1), found.answer


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["accelerate", "transformers"])
def test_transformers_spreads_models_over_ranks(name: str, engines: Callable[[str], Engine]) -> None:
    """Its hook of q and k norms reduces again what earlier backward passes left."""
    experts = {"family": "mixtral", "tp": 2, **({"ep": 2} if name == "transformers" else {})}
    cells = [experts, {"family": "qwen3", "tp": 2, "accumulation": 2}]
    found = prove(engines(name), cells, shrinks=False)
    assert [one.verdict for one in found.cells] == [EQUAL, RED], found.to_json()["cells"]


@pytest.mark.ranks
def test_this_runtime_is_one_process(engines: Callable[[str], Engine]) -> None:
    cells = [
        {"tp": 2, "cp": 2, "sequence_parallel": True, "masks": "uneven", "clipping": 0.5, "resume": True},
        {"family": "mixtral", "dp": 2, "ep": 2, "packed": True, "masks": "empty", "checkpointing": "full"},
    ]
    found = prove(
        engines("parcompile"), [*cells, {**of_plan(own_plan(), 4).cell, "accumulation": 2, "masks": "uneven"}]
    )
    assert {found.text_of(one): dict(one.answer) for one in found.cells if one.verdict not in (EQUAL, ROUNDING)} == {}


def own_plan(**changed: Any) -> Plan:
    axes = {"tp": 2, "pp": 2, "ep": 2, "dp": 4, "sequence_parallel": True, "num_virtual_stages_per_pipeline_rank": 2}
    training = {"sequence_length": 64, "global_batch_size": 16, "micro_batch_size": 1, "precision": "bf16"}
    tree = {
        "version": 1,
        "name": "mine",
        "model": {"preset": "qwen3-30b-a3b"},
        "cluster": {"nodes": 4, "gpus_per_node": 4, "accelerator": "h100-sxm"},
        "parallelism": {**axes, **changed},
        "training": {**training, "activation_checkpointing": "full", "gradient_clipping": 1.0},
    }
    return parcompile.compile(tree, estimate=False)


def test_cells_take_the_layout_of_a_plan_and_name_what_they_do_not() -> None:
    found = of_plan(own_plan(), 8)
    carried = json.loads(found.cell["plan"])
    assert {axis: found.cell[axis] for axis in ("tp", "pp", "cp", "dp", "ep", "stage", "clipping")} == {
        "tp": 2, "pp": 2, "cp": 1, "dp": 2, "ep": 2, "stage": 1, "clipping": 0.5
    }  # fmt: skip
    assert carried["parallelism"]["num_virtual_stages_per_pipeline_rank"] == 2
    assert (carried["activation_checkpointing"], carried["experts"], carried["model"]["model_type"]) == (
        "full",
        True,
        "qwen3_moe",
    )
    said = {".".join(path): why for path, why in found.left_out.items()}
    assert said["parallelism.dp"] == "cells spread over 2 ranks, not 4"
    assert "training.precision" in said
    with pytest.raises(GivenError, match="tp 2 × cp 1 × pp 2 takes 4 ranks, and at most 2 are started"):
        of_plan(own_plan(), 2)


@pytest.mark.ranks
@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")
def test_megatron_is_one_process(engines: Callable[[str], Engine]) -> None:
    cells = [
        {
            "family": "qwen3",
            "tp": 2,
            "sequence_parallel": True,
            "pp": 2,
            "vpp": 2,
            "accumulation": 4,
            "tied": True,
            "masks": "uneven",
        },
        {"family": "mixtral", "dp": 2, "ep": 2, "distributed_optimizer": True, "clipping": 0.5},
        {"dtype": "bf16", "resume": True, "packed": True},
    ]
    found = prove(engines("megatron"), cells)
    assert {found.text_of(one): dict(one.answer) for one in found.cells if one.verdict not in (EQUAL, ROUNDING)} == {}


@pytest.mark.ranks
@pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed")
def test_torchtitan_is_one_process(engines: Callable[[str], Engine]) -> None:
    """A loss that is a DTensor is logged wrongly: `clone` reduces it, and the sum over ranks adds it up again."""
    cells = [
        {"dp": 4, "replicas": 2, "accumulation": 2, "masks": "uneven", "clipping": 0.5, "packed": True},
        {"family": "qwen3", "tp": 2, "sequence_parallel": True, "dp": 2, "tied": True, "resume": True},
        {"dp": 2, "dtype": "bf16", "checkpointing": "full"},
        {"family": "qwen3_moe", "dp": 2, "ep": 2, "masks": "uneven", "clipping": 0.5, "resume": True},
        {"family": "qwen3_moe", "tp": 2, "sequence_parallel": True, "ep": 2, "checkpointing": "full"},
    ]
    engine, full = engines("torchtitan"), {"dp": 2, "spmd": "full_dtensor"}
    *right, logged = prove(engine, [*cells, full], shrinks=False).cells
    assert [one.verdict for one in right] == [EQUAL] * 5, [dict(one.answer) for one in right]
    differences = logged.answer["differences"]
    assert (logged.verdict, differences["loss"], max(differences["norm"], differences["update"]) < 1e-5) == (
        RED,
        pytest.approx(1.0),
        True,
    )
    assert engine.explain({**simplest(engine.features), **full})["place"] == "the loss that is told of step 1"


@pytest.mark.ranks
def test_a_balancing_loss_is_that_of_the_micro_batches(engines: Callable[[str], Engine]) -> None:
    """transformers' Trainer neither divides it by the accumulation steps nor by the ranks."""
    cell = {"family": "mixtral", "dp": 2, "accumulation": 2, "aux_loss": True}
    for name, verdict in (("parcompile", EQUAL), ("deepspeed", EQUAL), ("transformers", RED)):
        (proved,) = prove(engines(name), [cell], shrinks=False).cells
        assert proved.verdict == verdict, (name, proved.answer)
    (proved,) = prove(engines("deepspeed"), [{**cell, "family": "llama"}]).cells
    assert (proved.verdict, proved.answer["why"]) == (CANNOT, "a balancing loss takes experts")


@pytest.mark.ranks
def test_the_trainer_loses_experts_on_resume(engines: Callable[[str], Engine]) -> None:
    """transformers 5.23.0 writes them under the names of the hub, and reads its own checkpoint without renaming."""
    cells = [{"family": "mixtral", "resume": True}, {"family": "llama", "resume": True}]
    proved = prove(engines("transformers"), cells, shrinks=False)
    assert [one.verdict for one in proved.cells] == [RED, EQUAL], proved.to_json()["cells"]


def run_pytest(_: Path, folder: str, *options: str) -> None:
    """In a process of its own, which starts with what is imported."""
    os.chdir(folder)
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-rA", "--rootdir", folder, *options]))


@pytest.mark.ranks
def test_pytest_runs_cells_as_tests(tmp_path: Path) -> None:
    adapter = Path(ADAPTER).read_text(encoding="utf-8")
    (tmp_path / "adapter.py").write_text(adapter.replace('"none",', '"none", "stale"),\n    "left": ("none",', 1))
    (tmp_path / "test_own.py").write_text("def test_own(): pass\n")

    def run(name: str, *options: str) -> tuple[int, str]:
        job = Ranks(tmp_path / f"run of {name}", 1, run_pytest, str(tmp_path), "--prove-engine", name, *options)
        (code,) = job.end(within=600)
        return code, job.text(0)

    code, said = run("adapter.py", "--prove-cells", "3", "--prove-seed", "2", "--prove-ranks", "2")
    outcomes = re.findall(r"^(PASSED|FAILED) ::prove\[(.+?)\]", said, re.MULTILINE)
    assert {state for state, _ in outcomes} == {"PASSED", "FAILED"}, said
    assert all((state == "FAILED") == ("mistake stale" in name) for state, name in outcomes), outcomes
    assert (len(outcomes), "PASSED test_own.py::test_own" in said, code) == (3, True, 1)
    assert "fewest features: llama mistake stale" in said
    assert "Traceback" not in said
    code, said = run("none.py")
    assert (code, "--prove-engine: there is no adapter none.py" in said) == (4, True), said
    code, said = run("adapter.py", "--prove-cells", "0")
    assert (code, "Invalid value for '--prove-cells': 0 is not in the range 1<=x<=10000" in said) == (4, True), said


def test_an_engine_that_cannot_run_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"^there is no engine 'nothing'; there are deepspeed, .*, or an adapter's"):
        Engine("nothing")
    (tmp_path / "half.py").write_text("def supports(cell): return None\n")
    with pytest.raises(EngineError, match=r"lacks the function build; an adapter has supports, build, step"):
        Engine(str(tmp_path / "half.py"))
    with pytest.raises(EngineError, match=r"there is no adapter .*none\.py: no file has this name"):
        Engine(str(tmp_path / "none.py"))
    with pytest.raises(EngineError, match=r"/bin/echo is no Python interpreter: it answers b'-c"):
        Engine("deepspeed", python="/bin/echo")
    with pytest.raises(EngineError, match=r"no/python cannot be started: No such file or directory"):
        Engine("deepspeed", python=str(tmp_path / "no" / "python"))


@pytest.mark.ranks
def test_ranks_that_raise_or_hang_or_exit_are_named(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter.py"
    adapter.write_text(
        "import os, time\n"
        "from parcompile.runtime.prove.ranks.cells import OtherEngineError\n"
        'FEATURES = {"ends": ("raise", "hang", "exit", "other")}\n'
        "def supports(cell): return None\n"
        "def build(model, cell):\n"
        '    if os.environ["RANK"] == "1":\n'
        '        if cell["ends"] == "raise": raise KeyError("no such layer")\n'
        '        if cell["ends"] == "hang": time.sleep(600)\n'
        '        if cell["ends"] == "other": raise OtherEngineError("DDP in place of FSDP")\n'
        "        os._exit(7)\n"
        "def step(engine, batch, cell): return 1.0, 1.0\n"
        "def full_parameters(engine, cell): return {}\n"
    )
    with Engine(str(adapter), timeout=8) as engine:
        found = prove(engine, [{"dp": 2, "ends": how} for how in ("raise", "hang", "exit", "other")])
    assert [one.answer["why"] for one in found.cells] == [
        "rank 1: KeyError: 'no such layer'",
        "no answer within 8 s: rank 1 is in build, called from adapter.py:8",
        "rank 1: exit code 7",
        "rank 1: OtherEngineError: DDP in place of FSDP",
    ]
    assert [one.verdict for one in found.cells] == ["not runnable"] * 3 + ["red"]
    assert not found.proves


@pytest.mark.ranks
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL])
def test_ranks_end_with_the_command(tmp_path: Path, sign: signal.Signals) -> None:
    """Those that hang, and what they started, and what they wrote."""
    adapter = tmp_path / "adapter.py"
    adapter.write_text(
        "import os, subprocess, tempfile, time\n"
        "def supports(cell): return None\n"
        "def build(model, cell):\n"
        '    child = subprocess.Popen(["sleep", "600"])\n'
        '    said = f"{os.getpid()} {child.pid} {os.getppid()} {tempfile.gettempdir()}"\n'
        f'    open(f"{tmp_path}/" + os.environ["RANK"], "w").write(said + "\\n")\n'
        "    time.sleep(600)\n"
        "def step(engine, batch, cell): return 1.0, 1.0\n"
        "def full_parameters(engine, cell): return {}\n"
    )
    job = Ranks(tmp_path / "command", 1, run_command, "prove", "--engine", str(adapter), "--cell", "dp=2")
    try:
        files = [tmp_path / "0", tmp_path / "1"]
        until(lambda: all(one.exists() and one.read_text().endswith("\n") for one in files), job)
        job.signal(0, sign)
        assert job.end(within=600) == [130 if sign == signal.SIGINT else -sign]
    finally:
        job.kill()
    assert job.text(0) == ("\nparcompile: interrupted\n" if sign == signal.SIGINT else "")
    for one in files:
        *numbers, folder = one.read_text().split()
        for number in numbers:
            until(lambda number=number: not alive(int(number)))
        assert not Path(folder).exists()


def run_command(_: Path, *arguments: str) -> None:
    """As a shell starts it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["parcompile", *arguments]
    main()


def until(holds: Callable[[], bool], running: Ranks | None = None) -> None:
    end = time.monotonic() + 600
    while not holds():
        assert time.monotonic() < end
        assert running is None or running.processes[0].is_alive(), running.text(0)
        time.sleep(0.05)


def test_a_red_cell_without_a_script_says_why() -> None:
    from parcompile.runtime.prove.certificate import shown

    features = {"family": ("llama", "qwen3"), "dp": (1, 2), "experts": ("own", "moe")}
    engine: Any = SimpleNamespace(name="deepspeed", features=features, versions={"deepspeed": "0.19.8"})
    assert shown(engine, {"family": "llama", "dp": 2, "experts": "moe"}) == {"no_script": "scripts do not have experts"}
    assert "can be turned off" in shown(engine, {"family": "qwen3", "dp": 1, "experts": "own"})["no_script"]
    engine.name = "megatron"
    said = "what megatron needs to run on CPUs does not fit into 100 lines"
    assert shown(engine, {"family": "llama", "dp": 2, "experts": "own"}) == {"no_script": said}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "cell", "off"),
    [
        ("deepspeed", {"stage": 3, "cp": 2}, "stage"),
        ("transformers", {"family": "qwen3", "tp": 2, "accumulation": 2}, "accumulation"),
        ("deepspeed", {"tp": 2, "accumulation": 2}, None),
        ("parcompile", {"family": "mixtral", "dp": 2, "ep": 2, "pp": 2, "aux_loss": True}, None),
    ],
)
def test_a_script_of_upstream_alone_shows_a_red_cell(
    name: str, cell: dict[str, Any], off: str | None, engines: Callable[[str], Engine]
) -> None:
    """It differs, and is equal without what is suspected; that of a right cell (`off` is None) is equal at once."""
    from parcompile.runtime.prove.certificate import shown

    engine = engines(name)
    found = shown(engine, {**simplest(engine.features), **cell})
    if off is None:
        assert found == {"no_script": "it is 'equal', where 'differs' was expected"}
    else:
        assert f"without its {off}: equal" in found.get("script", ""), found


def test_the_hash_of_the_code_is_that_of_the_engines_own(
    engines: Callable[[str], Engine], plain: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, codes = tmp_path / "ranks", [engines(str(EXAMPLE)).code]
    shutil.copytree(Path(server.__file__).parent, ranks, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr("parcompile.runtime.prove.engine._RANKS", ranks)
    for changed in (ranks / "engines" / "deepspeed_engine.py", ranks / "comparison.py"):
        changed.write_text(changed.read_text(encoding="utf-8") + "\n", encoding="utf-8")
        with Engine(str(EXAMPLE)) as engine:
            codes.append(engine.code)
    assert (codes[0] == codes[1], len({*codes, plain.code})) == (True, 3)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


@pytest.mark.ranks
def test_the_commands_of_the_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Callable[..., Result]
) -> None:
    """With one cell where it draws twenty."""
    root = Path(__file__).parents[2]
    page = (root / "docs" / "prove.md").read_text(encoding="utf-8")
    lines = [line.partition("#")[0] for line in re.findall(r"^parcompile prove (.*)$", page, re.MULTILINE)]
    assert len(lines) == 6
    (tmp_path / "examples").symlink_to(root / "examples")
    parcompile.compile(str(root / "examples" / "byte_llama.json"), str(tmp_path / "plan"))
    monkeypatch.chdir(tmp_path)
    for line in lines:
        arguments, _, file = line.replace("--cells 20", "--cells 1 --no-shrink").partition(" > ")
        found = command(*shlex.split(arguments))
        if file:
            Path(file).write_text(found.stdout)
            assert "   1  equal " in found.stderr  # each cell as it ends
        assert found.exit_code == (1 if "pp 2" in line else 0), found.output
        if "pp 2" in line:
            assert "first wrong: the gradient of every parameter, step 1 on rank 0: it is 1." in found.output
            assert "a script of upstream alone shows it" in found.output
            (shown,) = Path("shown").glob("*.py")
            assert len(shown.read_text().splitlines()) <= 100
            assert "parcompile" not in shown.read_text()
    assert found.output == "certificate.json: every cell is as it says\n"


CONFIG = {
    "train_batch_size": 512,
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 1.0,
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
    "fp16": {"enabled": False},
    "bf16": {"enabled": True},
    "tensor_parallel": {"autotp_size": 8},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": "auto", "overlap_comm": True},
}


def test_what_cells_do_not_carry_of_a_configuration_is_named() -> None:
    found = given(CONFIG)
    assert {".".join(path): why for path, why in found.left_out.items()} == {
        "train_batch_size": "a cell has its own",
        "gradient_accumulation_steps": "a cell has its own",
        "gradient_clipping": "cells clip at 0.5, which a tiny model exceeds",
        "scheduler": "every cell has one learning rate",
        "fp16": "it is not enabled",
        "tensor_parallel.autotp_size": "cells spread over 2 ranks, not 8",
        "zero_optimization.reduce_bucket_size": "nobody fills in auto here",
    }
    config = json.loads(found.cell["config"])
    assert config.pop("zero_optimization") == {"overlap_comm": True}
    assert config == {key: CONFIG[key] for key in ("bf16", "tensor_parallel")}
    decided = {name: value for name, value in found.cell.items() if name != "config"}
    assert decided == {"stage": 1, "tp": 2, "cp": 1, "clipping": 0.5, "dtype": "bf16"}
    assert given({}).cell == {"stage": 0, "tp": 1, "cp": 1, "clipping": 0.0, "dtype": "fp32", "config": "{}"}
    assert "dtype" not in given({"bf16": {"enabled": "auto"}}).cell


@pytest.mark.parametrize(
    ("tree", "why"),
    [
        ([], "a DeepSpeed configuration is a mapping of keys"),
        ({"zero_optimization": 2}, r"zero_optimization: 2 is no mapping: write {} with its keys"),
        ({"fp16": {"enabled": True}}, r"fp16\.enabled: no cell runs in fp16: prove it with bf16, or without the key"),
        ({"tensor_parallel": {"autotp_size": "2"}}, r'tensor_parallel\.autotp_size: "2" is no number of ranks'),
        ({"sequence_parallel_size": -1}, "sequence_parallel_size: -1 is no number of ranks"),
    ],
)
def test_a_configuration_that_no_cell_has_is_refused(tree: Any, why: str) -> None:
    with pytest.raises(GivenError, match=why):
        given(tree)


@pytest.mark.ranks
def test_the_command_says_what_it_found(tmp_path: Path, command: Callable[..., Result]) -> None:
    scripts = tmp_path / "scripts"
    shown = ["--scripts", str(scripts)]
    said = command("--engine", ADAPTER, "--cell", "dp=2,mistake=no all-reduce,masks=uneven", *shown)
    assert sorted(file.name for file in scripts.iterdir()) == ["mistakes.py", "mistakes_1.py"]
    assert "without its mistake: equal" in (scripts / "mistakes_1.py").read_text(encoding="utf-8")
    assert said.exception is None or said.exit_code == 1
    assert "red          llama dp 2 masks uneven mistake no all-reduce" in said.output
    assert "fewest features: llama dp 2 mistake no all-reduce" in said.output
    again = command("--engine", ADAPTER, "--no-shrink", "--cell", "llama dp 2 masks uneven mistake no all-reduce")
    assert again.output.splitlines()[:2] == said.output.splitlines()[:2]
    files = {
        "deep.json": "[" * 100_000,
        "fp16.json": '{\n"fp16": {"enabled": true}}',
        "empty.json": "{}",
        "newer.json": '{"version": 2}',
        "none.certificate": NO_CELL,
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    parcompile.compile(str(Path(__file__).parents[2] / "examples" / "byte_llama.json"), str(tmp_path / "plan"))
    own = ["--engine", ADAPTER]
    for arguments, sentence in (
        ([*own, "--cell", "width=2"], "the engine has no feature 'width'"),
        ([*own, "--cell", "dp=3"], "dp 3: the engine's adapter has 1, 2, 4"),
        ([*own, "--cell", "dp=4", "--ranks", "2"], "dp 4 takes 4 ranks, and at most 2 are started"),
        ([*own, "--cell", "seed=x"], "seed 'x' is no whole number from 0"),
        ([*own, "--cell", "dp=2,tied"], "'tied' has no value"),
        ([*own, "--cell", "llama seed -1"], "seed '-1' is no whole number from 0"),
        ([*own, "--cell", "llama dp 3"], "dp '3': the engine's adapter has 1, 2, 4"),
        ([*own, "--cell", f"dp={'[' * 100_000}"], "the engine's adapter has 1, 2, 4"),
        ([*own, "--config", tmp_path / "empty.json"], "--config is read by --engine deepspeed alone"),
        ([*own, "--config", tmp_path / "deep.json"], "deep.json:1: more than 100 brackets inside each other"),
        ([*own, "--config", tmp_path / "fp16.json"], "fp16.json:2: fp16.enabled: no cell runs in fp16"),
        ([*own, "--config", tmp_path / "none.json"], "none.json: there is no such file"),
        ([*own, "--plan", tmp_path / "empty.json"], "empty.json"),
        (["--plan", "p", "--config", "c"], "--config is a DeepSpeed configuration and --plan a plan"),
        (["--verify", tmp_path / "deep.json"], "deep.json:1: more than 100 brackets inside each other"),
        (["--verify", tmp_path / "newer.json"], "newer.json:1: "),
        (["--verify", tmp_path / "none.certificate"], "cells: 0 entries, but at least 1 is needed"),
        (["--verify", "c", "--plan", tmp_path / "plan"], "--verify runs the cells of its certificate: leave"),
        (["--verify", "c", "--format", "json"], "--verify runs the cells of its certificate: leave"),
        ([*own, "--config", tmp_path / "plan" / "plan.json"], "plan.json is of kind spec: --config is a DeepSpeed"),
        ([*own, "--cell", "llama dp"], "dp has no value: the engine's adapter has 1, 2, 4"),
        ([*own, "--scripts", tmp_path / "deep.json"], "deep.json cannot be written: File exists"),
        ([], "--engine says which engine"),
        ([*own, "--plan", tmp_path / "plan"], "--plan is executed by --engine parcompile alone"),
    ):
        wrong = command(*map(str, arguments))
        assert sentence in wrong.output, (arguments, wrong.output)
        assert (wrong.exit_code, type(wrong.exception)) in ((1, SystemExit), (2, SystemExit))


def test_the_page_of_engines_is_made_of_its_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[2]
    spec = importlib.util.spec_from_file_location("engine_matrix", root / ".ci" / "engine_matrix.py")
    assert spec is not None
    assert spec.loader is not None
    matrix = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "engine_matrix", matrix)  # where its data classes look
    spec.loader.exec_module(matrix)
    page = (root / "docs" / "engines.md").read_text(encoding="utf-8")
    proved = matrix.certificates()
    assert matrix.page(proved) == page
    assert matrix.svg(matrix.picture(proved)) == matrix.PICTURE.read_text(encoding="utf-8")
    assert {one.engine for one in proved.values()} < set(proved)  # other versions too
    for file in (root / "docs" / "certificates").glob("*.json"):
        tree = json.loads(file.read_text(encoding="utf-8"))
        assert validate(tree, "certificate").diagnostics == ()
        assert tree["counts"]["red"] == sum(one["verdict"] == RED for one in tree["cells"])
    scripts = {file.name: file.read_text(encoding="utf-8") for file in (root / "docs" / "red_cells").glob("*.py")}
    assert set(re.findall(r"\(red_cells/(.+?)\)", page)) == set(scripts)
    for name, text in scripts.items():
        compile(text, name, "exec")
        assert ("parcompile" in text, len(text.splitlines()) <= 100) == (False, True), name


def test_without_torch_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "parcompile.runtime.prove", None)
    said = CliRunner().invoke(cli, ["prove", "--engine", "deepspeed"])
    assert how_to_install("runtime,hf") in said.output
