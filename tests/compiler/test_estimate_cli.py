"""`parcompile estimate`, as a user meets it."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from layout_cases import compile_tree, spec_tree

from parcompile.cli import main
from parcompile.cost.footprint import STATIC, footprint
from parcompile.cost.memory import static_memory
from parcompile.cost.step import step_terms
from parcompile.spec.values import workload_of

pytestmark = pytest.mark.usefixtures("one_search_for_a_spec")

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["parcompile", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        captured = capsys.readouterr()
        return int(stopped.value.code or 0), captured.out, captured.err

    return call


def write(tree: dict[str, Any]) -> None:
    Path("spec.json").write_text(json.dumps(tree), encoding="utf-8")


LLAMA = spec_tree(
    nodes=4,
    model={"preset": "llama-3-8b"},
    parallelism={"tp": 2, "cp": 4},
    training={"sequence_length": 8192, "global_batch_size": 64},
)


def test_the_busiest_rank_of_experts_costs_memory_and_time_by_a_stated_factor(run: Run) -> None:
    layout = {"tp": 2, "ep": 4}
    write(spec_tree(nodes=4, model={"preset": "mixtral-8x7b"}, parallelism=layout, training=LLAMA["training"]))
    even, busy = (json.loads(run("estimate", "spec.json", "--format", "json", *more)[1]) for more in ((), UNEVEN))
    assert (even["expert_imbalance"], busy["expert_imbalance"]) == (
        {"factor": 1.0, "assumed": True},
        {"factor": 1.5, "assumed": False},
    )
    exchange = [one["time"]["parts_seconds"]["ep, exposed"] for one in (even, busy)]
    assert exchange[1] == pytest.approx(1.5 * exchange[0])
    assert busy["time"]["step_seconds"] > 1.1 * even["time"]["step_seconds"]
    assert busy["memory"]["peak_bytes"] > even["memory"]["peak_bytes"]
    assert busy["communication"][0]["bytes"] == even["communication"][0]["bytes"]
    assert "assumes balanced experts" in run("estimate", "spec.json")[1]
    assert "computes 1.5 times the mean of all rows" in run("estimate", "spec.json", *UNEVEN)[1]


UNEVEN = ("--expert-imbalance", "1.5")


def test_packed_documents_shorten_attention_and_nothing_else(run: Run) -> None:
    layout = {"tp": 2, "cp": 4, "cp_implementation": "ring"}
    write(spec_tree(nodes=4, model={"preset": "llama-3-8b"}, parallelism=layout, training=LLAMA["training"]))
    found = {}
    for length in (None, 8192, 4096, 512):
        more = () if length is None else ("--document-length", str(length))
        found[length] = json.loads(run("estimate", "spec.json", "--format", "json", *more)[1])
    assert found[None]["documents"] == {"tokens": 8192, "assumed": True}
    assert found[512]["documents"] == {"tokens": 512, "assumed": False}
    assert found[8192]["time"] == found[None]["time"]
    busy = {length: found[length]["time"]["parts_seconds"]["computation"] for length in (8192, 4096, 512)}
    # Operations of attention are in proportion to the length of what is attended to.
    assert (busy[8192] - busy[512]) / (busy[8192] - busy[4096]) == pytest.approx((8192 - 512) / (8192 - 4096))
    assert busy[512] < 0.97 * busy[8192]
    # A ring sends the same keys; with less attention in front of them fewer of these seconds are hidden.
    assert found[512]["communication"][0]["bytes"] == found[8192]["communication"][0]["bytes"]
    assert found[512]["time"]["parts_seconds"]["cp, exposed"] >= found[8192]["time"]["parts_seconds"]["cp, exposed"]
    assert found[512]["memory"] == found[8192]["memory"]


def test_attention_of_packed_documents_is_that_of_sequences_as_long_as_they_are(tmp_path: Path) -> None:
    whole = workload_of(compile_tree(LLAMA, tmp_path).spec)
    short = replace(whole, sequence_length=1024, micro_batch=8 * whole.micro_batch)
    assert step_terms(replace(whole, document_length=1024)).attention == pytest.approx(step_terms(short).attention)


def test_a_document_longer_than_the_sequence_is_refused_with_both_numbers(run: Run) -> None:
    write(LLAMA)
    for more in ((), ("--sweep", "tp=1,2")):
        code, out, err = run("estimate", "spec.json", "--document-length", "9000", *more)
        assert (code, out) == (2, "")
        assert "--document-length 9000 > sequence_length 8192" in err
        assert "Traceback" not in err


def test_a_sweep_takes_the_length_of_documents(run: Run) -> None:
    write(LLAMA)
    packed = ("--document-length", "1024")
    rows = json.loads(run("estimate", "spec.json", "--sweep", "tp=2,4", "--format", "json", *packed)[1])
    one = json.loads(run("estimate", "spec.json", "--format", "json", *packed)[1])
    assert rows[0]["time"] == one["time"]
    text = run("estimate", "spec.json", *packed)[1]
    assert "1,024 tokens each, packed into sequences of 8,192" in " ".join(text.split())


def test_the_table_names_the_rank_the_largest_part_the_interval_and_the_convention(run: Run) -> None:
    write(LLAMA)
    code, out, _ = run("estimate", "spec.json")
    assert code == 0
    for text in (
        "8,030,261,248 in all",
        "GiB on rank 0",
        "90 % interval",
        "the largest part is",
        "usable of",
        "MFU by",
    ):
        assert text in out
    assert "    0 |" in out


def test_json_is_the_whole_of_standard_output_and_its_parts_add_up(run: Run) -> None:
    write(LLAMA)
    code, out, _ = run("estimate", "spec.json", "--format", "json", "--tokens", "1e12", "--price", "2")
    assert code == 0
    tree = json.loads(out)
    stage = tree["memory"]["stages"][0]
    assert sum(stage["components_bytes"].values()) == pytest.approx(stage["total_bytes"], abs=10)
    assert sum(tree["time"]["parts_seconds"].values()) == pytest.approx(tree["time"]["step_seconds"])
    low, high = tree["memory"]["interval_90_bytes"]
    assert low <= tree["memory"]["peak_bytes"] <= high
    budget = tree["budget"]
    assert budget["days"] == pytest.approx(budget["steps"] * tree["time"]["step_seconds"] / 86400)
    assert budget["cost"] == pytest.approx(budget["days"] * 24 * 32 * 2)
    assert sum(tree["parameters"]["rank_by_layer"]) < tree["parameters"]["rank_by_stage"][0]


def test_static_parts_equal_those_of_the_plan(tmp_path: Path) -> None:
    spec = compile_tree(LLAMA, tmp_path).spec
    peak, exact = footprint(workload_of(spec)).peak, static_memory(workload_of(spec))
    parts = [peak.components[name] for name in STATIC]
    assert parts == [
        exact.weight_bytes,
        exact.gradient_bytes,
        exact.master_bytes,
        exact.optimizer_bytes,
        exact.bucket_bytes,
    ]


def test_a_sweep_is_a_grid_and_says_which_rule_refuses(run: Run) -> None:
    write(LLAMA)
    code, out, _ = run("estimate", "spec.json", "--sweep", "tp=1,2,3", "cp=1,2")
    assert code == 0
    rows = out.splitlines()
    assert rows[0].split()[:3] == ["tp", "cp", "dp"]
    assert len(rows) == 7
    assert all("refused [" in row for row in rows if row.startswith("3"))
    cells = json.loads(run("estimate", "spec.json", "--sweep", "tp=1,2", "--format", "json")[1])
    assert [cell["tp"] for cell in cells] == [1, 2]
    assert cells[1]["memory"]["peak_bytes"] < cells[0]["memory"]["peak_bytes"]


def test_what_cannot_be_swept_is_a_mistake_of_usage(run: Run) -> None:
    write(LLAMA)
    assert run("estimate", "spec.json", "--sweep", "colour=1")[0] == 2
    assert run("estimate", "spec.json", "tp=1")[0] == 2
    assert run("estimate", "spec.json", "--sweep", "tp")[0] == 2


@pytest.mark.parametrize("values", ["tp=0", "tp=-1", "sequence_length=0", "micro_batch_size=0", "tp=many", "stage=9"])
def test_a_value_that_no_spec_may_hold_is_not_swept(run: Run, values: str) -> None:
    write(LLAMA)
    code, out, err = run("estimate", "spec.json", "--sweep", values)
    assert (code, out) == (2, "")
    assert f"--sweep {values}: " in err


@pytest.mark.parametrize("option", ["--tokens", "--price"])
@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "0", "-1", "1e999"])
def test_budgets_and_prices_are_finite_numbers_above_zero(run: Run, option: str, number: str) -> None:
    write(LLAMA)
    code, out, err = run("estimate", "spec.json", option, number)
    assert (code, out) == (2, "")
    assert f"{number} is not a finite number above 0" in err


@pytest.mark.parametrize("given", [["--tokens", "1e99"], ["--tokens", "0.5"], ["--tokens", "1", "--price", "1e99"]])
def test_what_no_run_trains_on_or_costs_is_refused(run: Run, given: list[str]) -> None:
    write(LLAMA)
    code, out, err = run("estimate", "spec.json", *given)
    assert (code, out) == (2, "")
    assert f"Invalid value for '{given[-2]}': {float(given[-1])} is not in the range" in err


def test_an_accelerator_smaller_than_what_a_run_leaves_free_is_estimated_and_nothing_fits(run: Run) -> None:
    link = {"title": "a link", "bytes_per_s": 1e10, "latency_seconds": 1e-5, "source": "assumed"}
    preset = {
        "version": 1,
        "name": "small",
        "title": "400 MiB",
        "source": "assumed",
        "like": "l40s",
        "memory_mib": 400,
        "bf16_flops_per_s": 1e13,
        "fp32_flops_per_s": 1e12,
        "attention_flops_per_s": 5e12,
        "memory_bytes_per_s": 1e11,
        "layer_seconds": 0.001,
        "node_link": link,
        "network_link": link,
    }
    Path("small.json").write_text(json.dumps(preset), encoding="utf-8")
    tree = spec_tree(model={"preset": "gpt2"}, training={"sequence_length": 128, "global_batch_size": 8})
    write({**tree, "cluster": {"gpus_per_node": 2, "accelerator": "small.json"}})
    code, out, _ = run("estimate", "spec.json", "--format", "json")
    assert code == 0
    assert json.loads(out)["memory"]["probability_to_fit"] == 0.0


GLM = {"intermediate_size": 128, "vocab_size": 256, "max_position_embeddings": 512}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 256, "n_positions": 1024}


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gemma4_text", "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4},
        GPT2,
        {**GPT2, "n_inner": 96},
        {"model_type": "glm4_moe_lite", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, **GLM},
    ],
    ids=["left out", "other names", "a width of its own", "a type that is not written inline"],
)
def test_a_plan_is_estimated_as_its_spec_where_a_spec_has_no_keys_for_its_config(
    run: Run, config: dict[str, Any]
) -> None:
    Path("config.json").write_text(json.dumps(config), encoding="utf-8")
    training = {"sequence_length": 128, "global_batch_size": 8}
    write(spec_tree(model={"hf_config": "config.json"}, training=training))
    assert run("compile", "spec.json", "-o", "plan", "-q")[0] == 0
    (code, of_spec, _), of_plan = (run("estimate", one, "--format", "json") for one in ("spec.json", "plan"))
    assert code == 0
    assert of_plan == (0, of_spec, "")


def test_a_layout_that_is_too_large_is_estimated_all_the_same(run: Run) -> None:
    write(spec_tree(model={"preset": "llama-3-70b"}, training={"sequence_length": 4096, "global_batch_size": 8}))
    code, out, _ = run("estimate", "spec.json")
    assert code == 0
    assert "does not fit" in out


def test_a_wrong_spec_is_reported_and_not_estimated(run: Run) -> None:
    write({**LLAMA, "parallelism": {"tp": 3}})
    code, out, err = run("estimate", "spec.json")
    assert (code, out) == (1, "")
    assert "T001" in err or "W0" in err


def test_the_drawing_is_well_formed_and_has_a_box_for_each_component(run: Run) -> None:
    write(LLAMA)
    assert run("estimate", "spec.json", "--plot", "stages.svg")[0] == 0
    root = ET.parse("stages.svg").getroot()
    titles = [one.text or "" for one in root.iter("{http://www.w3.org/2000/svg}title")]
    assert any(title.startswith("stage 0, activations: ") for title in titles)


def test_uneven_and_interleaved_stages_are_those_of_the_spec(run: Run) -> None:
    stages = {"pp": 4, "num_layers_in_first_pipeline_stage": 5, "num_layers_in_last_pipeline_stage": 7}
    training = {"sequence_length": 8192, "global_batch_size": 64, "gradient_accumulation_dtype": "fp32"}
    tree = spec_tree(nodes=4, model={"preset": "llama-3-8b"}, parallelism={"tp": 2, **stages})
    write({**tree, "training": training})
    found = json.loads(run("estimate", "spec.json", "--format", "json")[1])
    layer = found["parameters"]["rank_by_layer"][0]
    held = found["parameters"]["rank_by_stage"]
    assert held[1] == held[2] == 10 * layer
    assert 5 * layer < held[0] < 10 * layer
    even = {"pp": 4, "num_virtual_stages_per_pipeline_rank": 2}
    bubbles = []
    for more in ({"pp": 4}, even):
        tree["parallelism"] = {"tp": 2, **more}
        write({**tree, "training": training})
        time = json.loads(run("estimate", "spec.json", "--format", "json")[1])["time"]
        bubbles.append(time["parts_seconds"]["pipeline bubble and imbalance"])
    assert bubbles[1] == pytest.approx(bubbles[0] / 2)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--price", "2"), "--price needs the length of the run: add --tokens"),
        (("--sweep", "tp=1,2", "--tokens", "1e12"), "--tokens and --sweep cannot be combined"),
        (("--sweep", "tp=1", "cp=1", "tp=2"), "--sweep has tp twice: write its values together, as in tp=1,2,4"),
        (("--expert-imbalance", "nan"), "nan is not a finite number above 0"),
        (("--expert-imbalance", "0.5"), "0.5 is not in the range x>=1.0"),
        (("--expert-imbalance", "5"), "--expert-imbalance 5, but with ep 4 it is 1 to 4"),
    ],
)
def test_no_option_is_dropped_without_a_word(run: Run, more: tuple[str, ...], said: str) -> None:
    layout = {"tp": 2, "ep": 4}
    write(spec_tree(nodes=4, model={"preset": "mixtral-8x7b"}, parallelism=layout, training=LLAMA["training"]))
    code, out, err = run("estimate", "spec.json", *more)
    assert (code, out) == (2, "")
    assert said in " ".join(err.split())
