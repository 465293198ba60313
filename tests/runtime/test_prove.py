"""Contract: `prove` finds engines that train something else than one process does, and accuses none that does not."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from click.testing import CliRunner

from parcompile.cli.main import cli
from parcompile.runtime.prove import Certificate, Engine, EngineError, prove, shrink, verify
from parcompile.runtime.prove.ranks.cells import FEATURES, batch_size, draw, simplest, world_size
from parcompile.runtime.prove.ranks.comparison import CANNOT, EQUAL, RED, ROUNDING, judge

ADAPTER = str(Path(__file__).parents[2] / "examples" / "prove_adapter.py")
SEEN = {"masks": "uneven", "clipping": 0.5, "dp": 2}
"""With which the mistakes of the adapter show: means differ where masks do."""


@pytest.fixture(scope="module")
def plain() -> Iterator[Engine]:
    with Engine(ADAPTER, timeout=120) as engine:
        yield engine


def test_drawn_cells_cover_pairs_and_are_the_same_each_time() -> None:
    cells = draw(FEATURES, lambda _: None, 40, 3, 4)
    assert cells == draw(FEATURES, lambda _: None, 40, 3, 4) != draw(FEATURES, lambda _: None, 40, 4, 4)
    for (one, values), (other, others) in itertools.combinations(FEATURES.items(), 2):
        missing = set(itertools.product(values, others)) - {(cell[one], cell[other]) for cell in cells}
        assert not missing, (one, other)
    assert all(world_size(cell) <= 4 for cell in cells)
    assert batch_size({"dp": 2, "micro_batch": 3, "accumulation": 4}) == 24


def result(*, loss: float = 2.0, norm: float | None = 1.0, weight: float = 1.0, **others: Any) -> dict[str, Any]:
    params = {"w": torch.full((4,), weight, dtype=torch.float64)}
    start = {"w": torch.zeros(4, dtype=torch.float64)}
    return {"loss": [3.0, loss], "norm": [norm, norm], "params": params, "start": start, **others}


@pytest.mark.parametrize(
    ("found", "moved", "verdict", "why"),
    [
        (result(), 0.0, EQUAL, None),
        (result(weight=1 + 9e-5), 0.0, EQUAL, None),
        (result(loss=2 + 1e-4), 2e-5, ROUNDING, None),
        (result(loss=2 + 1e-4), 1e-6, RED, "loss off by 5.0e-05 at step 2"),
        (result(weight=1.5), 1.0, RED, "update off by 5.0e-01 at w"),  # no rounding is so large
        (result(norm=None), 0.0, EQUAL, None),
        (result(norm=0.0), 0.0, RED, "the gradient norm is 0 at every step"),
        (result(loss=3.0), 0.0, RED, "the loss is 3.0 at every step"),
        (result(loss=float("nan")), 0.0, RED, "a loss or a norm is not a finite number"),
        (result(params={}), 0.0, RED, "the engine lacks w, of 1 such parameters"),
        (result(params={"w": torch.ones(3)}), 0.0, RED, "the engine has another shape of w, of 1 such parameters"),
    ],
)
def test_a_difference_is_rounding_where_other_last_bits_do_as_much(
    found: dict[str, Any], moved: float, verdict: str, why: str | None
) -> None:
    answer = judge("fp32", found, result(), lambda: [result(loss=2 * (1 + moved), weight=1 + moved)])
    assert (answer["verdict"], answer.get("why")) == (verdict, why)


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
    wrong = [{**SEEN, "mistake": mistake} for mistake in plain.features["mistake"][1:]]
    found = prove(plain, [*right, *wrong], shrinks=False)
    assert {found.text_of(one): one.verdict for one in found.cells[:2] if one.verdict not in (EQUAL, ROUNDING)} == {}
    assert {found.text_of(one): one.verdict for one in found.cells[2:] if one.verdict != RED} == {}
    assert not found.proves


@pytest.mark.ranks
def test_a_red_cell_shrinks_to_what_it_needs(plain: Engine) -> None:
    cell = {**simplest(plain.features), **SEEN, "family": "qwen3", "packed": True, "mistake": "ranks weigh alike"}
    smallest = shrink(plain, cell)
    assert smallest == {**simplest(plain.features), "dp": 2, "mistake": "ranks weigh alike"}


@pytest.mark.ranks
def test_a_certificate_is_read_back_and_runs_again(plain: Engine) -> None:
    found = prove(plain, [{"dp": 2}, {"dp": 2, "mistake": "no all-reduce"}, {"family": "mixtral", "dtype": "fp64"}])
    assert [one.verdict for one in found.cells] == [EQUAL, RED, CANNOT]
    again = Certificate.from_json(json.loads(json.dumps(found.to_json())))
    assert again.to_json() == found.to_json()
    assert verify(plain, again) == []
    tree = found.to_json()
    tree["cells"][0]["verdict"], tree["versions"]["torch"] = RED, "1.0"
    said = verify(plain, Certificate.from_json(tree))
    assert len(said) == 2
    assert said[1] == "llama dp 2: equal, the certificate says red"
    suite = ElementTree.fromstring(found.to_junit())
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("3", "1", "1")


@pytest.mark.ranks
def test_deepspeed_is_right_where_it_is_and_red_where_it_is_known_to_be_wrong() -> None:
    """ZeRO 0 in bf16 begins AdamW at step 2, and PipelineEngine clips by the norm of a stage: as 0.19.8 does."""
    cells = [
        {"stage": 2, "dp": 2, "accumulation": 2, "masks": "uneven", "clipping": 0.5},
        {"stage": 1, "dp": 2, "dtype": "bf16", "clipping": 0.5},
        {"stage": 0, "dtype": "bf16"},
        {"stage": 0, "pp": 2, "clipping": 0.5},
    ]
    with Engine("deepspeed", timeout=200) as engine:
        found = prove(engine, cells, shrinks=False)
    assert [one.verdict for one in found.cells] == [EQUAL, EQUAL, RED, RED], found.to_json()["cells"]


@pytest.mark.ranks
def test_this_runtime_is_one_process() -> None:
    cells = [
        {"tp": 2, "cp": 2, "sequence_parallel": True, "masks": "uneven", "clipping": 0.5, "accumulation": 2},
        {"family": "mixtral", "dp": 2, "ep": 2, "packed": True, "masks": "empty", "checkpointing": "full"},
    ]
    with Engine("parcompile", timeout=200) as engine:
        found = prove(engine, cells)
    assert {found.text_of(one): dict(one.answer) for one in found.cells if one.verdict not in (EQUAL, ROUNDING)} == {}


def test_an_engine_that_cannot_run_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"nothing cannot run in .*: ModuleNotFoundError"):
        Engine("nothing")
    (tmp_path / "half.py").write_text("def supports(cell): return None\n")
    with pytest.raises(EngineError, match=r"lacks the function build; an adapter has supports, build, step"):
        Engine(str(tmp_path / "half.py"))
    with pytest.raises(EngineError, match=r"no/python cannot be started: No such file or directory"):
        Engine("deepspeed", python=str(tmp_path / "no" / "python"))


@pytest.mark.ranks
def test_ranks_that_raise_or_hang_or_exit_are_named(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter.py"
    adapter.write_text(
        "import os, time\n"
        'FEATURES = {"ends": ("raise", "hang", "exit")}\n'
        "def supports(cell): return None\n"
        "def build(model, cell):\n"
        '    if os.environ["RANK"] == "1":\n'
        '        if cell["ends"] == "raise": raise KeyError("no such layer")\n'
        '        if cell["ends"] == "hang": time.sleep(600)\n'
        "        os._exit(7)\n"
        "def step(engine, batch, cell): return 1.0, 1.0\n"
        "def full_parameters(engine, cell): return {}\n"
    )
    with Engine(str(adapter), timeout=15) as engine:
        found = prove(engine, [{"dp": 2, "ends": how} for how in ("raise", "hang", "exit")])
    assert [one.answer["why"] for one in found.cells] == [
        "rank 1: KeyError: 'no such layer'",
        "no answer from rank 1 within 15 s",
        "rank 1: exit code 7",
    ]
    assert not found.proves


@pytest.mark.ranks
def test_the_certificate_that_the_page_shows_is_made_and_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs" / "prove.md").read_text(encoding="utf-8")
    making, verifying = re.findall(r"^parcompile (prove .*certificate\.json)$", page, re.MULTILINE)
    (tmp_path / "examples").symlink_to(root / "examples")
    monkeypatch.chdir(tmp_path)
    made = CliRunner().invoke(cli, making.partition(" > ")[0].split())
    assert made.exit_code == 0, made.output
    Path("certificate.json").write_text(made.stdout)
    verified = CliRunner().invoke(cli, verifying.split())
    assert (verified.exit_code, verified.output) == (0, "certificate.json: every cell is as it says\n")


@pytest.mark.ranks
def test_the_command_says_what_it_found() -> None:
    cell = "dp=2,mistake=no all-reduce,masks=uneven"
    said = CliRunner().invoke(cli, ["prove", "--engine", ADAPTER, "--cell", cell, "--python", sys.executable])
    assert said.exception is None or said.exit_code == 1
    assert "red          llama dp 2 masks uneven mistake no all-reduce" in said.output
    assert "fewest features: llama dp 2 mistake no all-reduce" in said.output
    for arguments, sentence in (
        (["--cell", "width=2"], "the engine has no feature 'width'"),
        (["--cell", "dp=3"], "dp 3: the engine's adapter has 1, 2, 4"),
        (["--cell", "dp"], "'dp' has no value"),
        (["--config", "pyproject.toml"], "--config is read by --engine deepspeed alone"),
    ):
        wrong = CliRunner().invoke(cli, ["prove", "--engine", ADAPTER, *arguments], standalone_mode=True)
        assert sentence in wrong.output, arguments
        assert wrong.exit_code not in (0, None)
