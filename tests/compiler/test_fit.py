"""Whether a plan fits is said where a user looks, with changes that make it fit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from layout_cases import compile_tree

import parcompile
from parcompile.cli import cli
from parcompile.cost.changes import NAMES, changes_that_fit
from parcompile.cost.estimate import estimate
from parcompile.cost.footprint import HOPELESS, SAFE, footprint
from parcompile.diagnostics import Severity
from parcompile.model.presets import presets
from parcompile.pipeline import check_file, check_read
from parcompile.searching import first
from parcompile.searching.first import first_spec
from parcompile.show.page.render import page
from parcompile.show.pictures import Subject
from parcompile.spec.values import workload_of
from parcompile.text import Result as Text
from parcompile.text.fixes import apply_edit
from parcompile.units import format_bytes, format_seconds

Run = Callable[..., Result]
NEGATIVE = Path(__file__).parents[1] / "specs" / "negative"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(cli, list(map(str, arguments)))


def spec(
    model: str = "llama-3-8b", nodes: int = 1, accelerator: object = "h100-sxm", **sections: Any
) -> dict[str, Any]:
    cluster = {"nodes": nodes, "gpus_per_node": 8, **({"accelerator": accelerator} if accelerator else {})}
    training = {"sequence_length": 8192, "global_batch_size": 64, "micro_batch_size": 1}
    training["gradient_accumulation_dtype"] = "bf16"  # with fp32 less fits
    tree: dict[str, Any] = {"version": 1, "model": {"preset": model}, "cluster": cluster, "training": training}
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    return tree


@pytest.mark.parametrize("name", sorted(file.name for file in NEGATIVE.glob("H00[14]-*[!d].json")))
def test_every_offered_change_fits_keeps_the_batch_and_costs_what_it_says(name: str) -> None:
    if name.endswith(".expected.json"):
        return
    checked = check_file(NEGATIVE / name)
    assert checked.document is not None
    assert checked.resolution is not None
    (one,) = (found for found in checked.diagnostics if found.code in ("H001", "H004"))
    before = workload_of(checked.resolution.spec())
    assert 1 <= len(one.fixes) <= 3
    for fix in one.fixes:
        document = checked.document
        for edit in fix.edits:
            document = apply_edit(document, edit)
        again = check_read(Text(document.source, document), NEGATIVE)
        assert again.resolution is not None
        assert not [found for found in again.diagnostics if found.code in ("H001", "H004")]
        after = estimate(workload_of(again.resolution.spec()))
        assert (after.memory.probability or 0) >= SAFE
        assert after.work.global_batch == before.global_batch
        assert f"peak {format_bytes(after.memory.peak.total_bytes)}, " in fix.title
        assert f"step {format_seconds(after.time.step.seconds)} (" in fix.title


def test_the_equation_adds_up_to_the_peak_that_estimate_shows(run: Run) -> None:
    Path("spec.json").write_text(json.dumps(spec()), encoding="utf-8")
    (found,) = parcompile.check("spec.json").errors
    terms, _, total = found.message.partition(" = ")
    added = sum(float(term.rsplit(" ", 2)[1]) for term in terms.split(" + "))
    peak = json.loads(run("estimate", "spec.json", "--format", "json").stdout)["memory"]
    assert total.startswith(format_bytes(peak["peak_bytes"]))
    assert added == pytest.approx(peak["peak_bytes"] / 2**30, abs=0.05)
    assert f"on rank {peak['rank']} (stage {peak['stage']}) > " in total
    assert total.endswith(f"the largest part is {peak['largest_component']}")


def test_a_narrow_fit_is_a_warning_and_a_hopeless_one_an_error() -> None:
    seen = set()
    for gib in (60, 88, 92, 96, 100, 104, 130):
        result = parcompile.check(spec(accelerator={"memory_gib": gib, "like": "h100-sxm"}))
        chance = parcompile.compile(
            spec(accelerator={"memory_gib": gib, "like": "h100-sxm"}), estimate=False
        ).estimate()
        found = [one.severity for one in result.diagnostics if one.code == "H004"]
        probability = chance.memory.probability or 0.0
        expected = Severity.ERROR if probability < HOPELESS else Severity.WARNING if probability < SAFE else None
        assert found == ([expected] if expected else []), (gib, probability)
        seen.add(expected)
    assert seen == {Severity.ERROR, Severity.WARNING, None}


def test_a_plan_that_cannot_fit_is_not_written_unless_no_estimate_is_wanted(run: Run) -> None:
    Path("spec.json").write_text(json.dumps(spec()), encoding="utf-8")
    refused = run("spec.json", "-o", "plan")
    assert refused.exit_code == 1
    assert "error[H004]" in refused.output
    assert not Path("plan").exists()
    written = run("spec.json", "-o", "plan", "--no-estimate")
    assert written.exit_code == 0
    assert "H004" not in written.output
    assert "\nmemory " not in written.output
    assert "\nstatic " in written.output
    assert run("check", "spec.json").exit_code == 1
    assert run("check", "spec.json", "--no-estimate").exit_code == 0


def test_unsafe_fixes_make_it_fit(run: Run) -> None:
    Path("spec.json").write_text(json.dumps(spec()), encoding="utf-8")
    assert run("check", "spec.json", "--fix").exit_code == 1
    assert run("check", "spec.json", "--unsafe-fixes").exit_code == 0
    assert run("spec.json", "-o", "plan").exit_code == 0


def test_without_an_accelerator_no_fit_is_claimed(run: Run) -> None:
    Path("spec.json").write_text(json.dumps(spec(accelerator=None)), encoding="utf-8")
    said = run("spec.json", "-o", "plan")
    assert said.exit_code == 0
    assert "info[H005]: cluster.accelerator is not given" in said.output
    for output in (said.output, run("estimate", "spec.json").output, run("view", "plan").output):
        assert "probability" not in output
        assert "no accelerator is named" in " ".join(output.split())
    memory = json.loads(run("estimate", "plan", "--format", "json").stdout)["memory"]
    assert (memory["fits"], memory["probability_to_fit"], memory["usable_bytes"]) == (None, None, None)


@pytest.mark.parametrize(("gib", "marked"), [(40, 'class="bad"'), (98, 'class="warn"'), (180, None)])
def test_the_tile_of_memory_on_the_page_is_red_when_it_does_not_fit(
    tmp_path: Path, gib: int, marked: str | None
) -> None:
    plan = compile_tree(spec(accelerator={"memory_gib": gib, "like": "h100-sxm"}), tmp_path)
    text = str(page(Subject.of(plan), None, None))
    tile = text.partition("<dt>Peak memory</dt>")[0].rpartition("<div")[2]
    assert tile == (f" {marked}>" if marked else ">")


def test_changes_are_computed_only_where_it_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> list[object]:
        raise AssertionError("computed")

    monkeypatch.setattr("parcompile.cost.changes.changes_that_fit", never)
    assert not parcompile.check(spec(accelerator="h200")).errors
    with pytest.raises(AssertionError, match="computed"):
        parcompile.check(spec())


def test_fewer_changes_come_first_and_what_has_to_be_bought_last(tmp_path: Path) -> None:
    work = workload_of(compile_tree(spec("llama-3-70b", nodes=8, parallelism={"tp": 8}), tmp_path).spec)
    found = changes_that_fit(work)
    ranks = [(sum(name in ("nodes", "stage") for name in one.settings), len(one.settings)) for one in found]
    assert [bool(resort) for resort, _ in ranks] == sorted(bool(resort) for resort, _ in ranks)
    assert ranks[0] == (0, 1)
    sets = [set(one.settings) for one in found]
    assert [one.work.nodes for one in found] == sorted(one.work.nodes for one in found)
    # More is changed only where fewer nodes are enough then.
    pairs = [(one, other) for one in found for other in found if set(other.settings) < set(one.settings)]
    assert all(one.work.nodes < other.work.nodes for one, other in pairs)
    assert all((footprint(one.work).probability or 0) >= SAFE for one in found)
    assert not changes_that_fit(work, ())
    assert all(set(one.settings) <= {"tp", "cp"} for one in changes_that_fit(work, ("tp", "cp")))
    assert set().union(*sets) <= set(NAMES)


def test_a_pipeline_is_offered_recomputation_of_as_few_first_stages_as_fit() -> None:
    layout = {"tp": 2, "pp": 4}
    training = {"micro_batch_size": 2, "gradient_accumulation_dtype": "fp32"}
    tree = spec(parallelism=layout, training=training)
    (found,) = parcompile.check(tree).errors
    (fix,) = (one for one in found.fixes if one.edits[0].path == ("training", "activation_checkpointing"))
    assert fix.title.startswith("set activation_checkpointing to full on stage 0, none on stages 1-3: peak ")
    words = fix.edits[0].value
    assert words == ["full", "none", "none", "none"]
    seconds, safe = {}, {}
    for count in range(5):
        tree["training"]["activation_checkpointing"] = ["full"] * count + ["none"] * (4 - count)
        one = parcompile.compile(tree, estimate=False).estimate()
        seconds[count], safe[count] = one.time.step.seconds, (one.memory.probability or 0) >= SAFE
    assert safe == {0: False, 1: True, 2: True, 3: True, 4: True}
    assert seconds[1] < min(seconds[count] for count in (2, 3, 4))
    work = workload_of(parcompile.compile(tree, estimate=False).spec)
    none = replace(work, recompute="none")
    (whole,) = changes_that_fit(none, ("activation_checkpointing",), by_stage=False)
    assert whole.settings == {"activation_checkpointing": "full"}
    # What is recomputed already is not taken back, and virtual stages recompute alike.
    assert not changes_that_fit(replace(none, recompute="full"), ("activation_checkpointing",))
    (virtual,) = changes_that_fit(replace(none, virtual_stages=2, stage_layers=None), ("activation_checkpointing",))
    assert virtual.settings == {"activation_checkpointing": "mlp+norms"}


def test_init_recomputes_no_more_stages_than_have_to_be(tmp_path: Path) -> None:
    cluster = {"nodes": 32, "gpus_per_node": 8, "accelerator": "h100-sxm"}
    found = first_spec("run", {"preset": "llama-3.1-405b"}, cluster, 8192, tmp_path)
    assert found.spec is not None, found.reason
    checked = parcompile.check(found.spec)
    assert checked.valid
    assert "H004" not in {one.code for one in checked.diagnostics}
    # Each stage of the layout has to recompute.
    stages = found.spec["parallelism"]["pp"]
    assert found.spec["training"]["activation_checkpointing"] == "full"
    last_without = ["full"] * (stages - 1) + ["none"]
    virtual = "num_virtual_stages_per_pipeline_rank" in found.spec["parallelism"]  # beside which all have one word
    found.spec["training"]["activation_checkpointing"] = "none" if virtual else last_without
    assert (parcompile.compile(found.spec, estimate=False).estimate().memory.probability or 0) < SAFE


def test_init_searches_no_cluster_that_cannot_hold_the_state_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[tuple[int, int]] = []
    monkeypatch.setattr(
        first,
        "_any_that_fits",
        lambda tree, _: tried.append((tree["cluster"]["nodes"], tree["training"]["sequence_length"])),
    )
    cluster = {"nodes": 1, "gpus_per_node": 8, "accelerator": "h100-sxm"}
    assert first_spec("run", {"preset": "llama-3.1-405b"}, cluster, 8192, tmp_path).spec is None
    # 405.9e9 parameters of 14 bytes over GPUs of 73 GiB: nine nodes and more.
    assert tried == [(nodes, 8192) for nodes in (16, 32, 64)]


def test_experts_may_be_dealt_so_that_a_model_of_experts_fits() -> None:
    tree = spec("mixtral-8x7b", nodes=2, parallelism={"tp": 4}, training={"sequence_length": 4096})
    (found,) = parcompile.check(tree).errors
    (fix,) = (one for one in found.fixes if one.edits[0].path == ("parallelism", "ep"))
    tree["parallelism"]["ep"] = fix.edits[0].value
    assert parcompile.check(tree).valid
    assert (parcompile.compile(tree).estimate().memory.probability or 0) >= SAFE


def test_init_deals_experts_where_nothing_fits_without(run: Run) -> None:
    done = run("init", "--model", "deepseek-v3", "--nodes", 32, "-o", "spec.json")
    assert done.exit_code == 0, done.output
    layout = json.loads(Path("spec.json").read_text(encoding="utf-8"))["parallelism"]
    assert f"ep {layout['ep']} · pp {layout['pp']}" in done.output
    found = parcompile.check("spec.json")
    assert found.valid
    assert not [one for one in found.diagnostics if one.code[0] in "HX" and one.severity is not Severity.INFO]


@pytest.mark.parametrize("nodes", [1, 16])
def test_init_never_writes_what_its_own_estimate_says_cannot_fit(run: Run, nodes: int) -> None:
    written = 0
    for name in list(presets())[::6]:
        done = run("init", "--model", name, "--nodes", nodes, "-o", f"{name}.json")
        if done.exit_code:
            assert f"no layout of {name} fits" in " ".join(done.output.split())
            assert "the layout that needs least is" in " ".join(done.output.split())
            continue
        written += 1
        found = parcompile.check(f"{name}.json")
        assert not found.errors, name
        assert "H004" not in {one.code for one in found.diagnostics}, name
    assert written >= 4


def test_init_says_what_would_fit_and_it_does(run: Run) -> None:
    done = run("init", "--model", "llama-3-70b", "--accelerator", "a100-40gb", "-o", "spec.json")
    assert done.exit_code
    assert not Path("spec.json").exists()
    remedies = done.output.partition("what would fit:\n")[2]
    nodes = int(remedies.partition(" nodes: ")[0])
    assert (
        run(
            "init", "--model", "llama-3-70b", "--accelerator", "a100-40gb", "--nodes", nodes, "-o", "spec.json"
        ).exit_code
        == 0
    )
    assert parcompile.check("spec.json").valid


def test_init_cuts_layers_that_do_not_divide(run: Run) -> None:
    """126 layers go onto no power of two of stages unless embedding and loss count."""
    done = run("init", "--model", "llama-3.1-405b", "--nodes", 32, "-o", "spec.json")
    assert done.exit_code == 0, done.output
    assert json.loads(Path("spec.json").read_text(encoding="utf-8"))["parallelism"]["pp"] >= 4
    assert run("spec.json", "-o", "plan").exit_code == 0


def test_what_no_small_change_lets_fit_is_offered_the_layout_that_a_search_gives() -> None:
    training = {"sequence_length": 2**20, "micro_batch_size": 1, "global_batch_size": 32}
    tree = spec("llama-3.1-8b", nodes=4, parallelism={"tp": 1}, training=training)
    (error,) = parcompile.check(tree).errors
    (fix,) = error.fixes
    assert error.code == "H004"
    assert error.help is None
    values = {edit.path[1]: edit.value for edit in fix.edits}
    assert values == {"tp": 8, "cp": 4, "sequence_parallel": True, "activation_checkpointing": "full"}
    assert fix.title.endswith(": the choice of `parcompile search`")
    assert fix.replacement is not None  # it was tried
    for path, value in values.items():
        tree["training" if path == "activation_checkpointing" else "parallelism"][path] = value
    assert not parcompile.check(tree).errors


def test_beside_small_changes_stands_what_a_search_chooses(tmp_path: Path) -> None:
    training = {"sequence_length": 32768, "global_batch_size": 64}
    tree = spec("llama-3-8b", nodes=2, training=training)
    (error,) = parcompile.check(tree).errors
    assert len(error.fixes) == 3
    (chosen,) = (fix for fix in error.fixes if fix.title.endswith(": the choice of `parcompile search`"))
    for edit in chosen.edits:
        tree.setdefault(str(edit.path[0]), {})[str(edit.path[1])] = edit.value
    assert parcompile.check(tree).valid
    given = {**training, "gradient_accumulation_dtype": "bf16"}
    best = parcompile.search({**tree, "parallelism": {}, "training": given}).best
    assert best is not None
    assert compile_tree(tree, tmp_path).estimate().time.step.seconds == pytest.approx(best.seconds)


def test_that_no_layout_fits_is_said_where_every_layout_was_tried() -> None:
    training = {"sequence_length": 131072, "micro_batch_size": 1, "global_batch_size": 8}
    (error,) = parcompile.check(spec("llama-3.1-405b", parallelism={"tp": 1}, training=training)).errors
    assert not error.fixes
    assert error.help is not None
    assert error.help.startswith("none of the 205 layouts of these GPUs that were tried fits; tp 8")
    assert "nodes 16: peak" in error.help


def test_of_more_layouts_than_a_check_has_time_for_the_best_of_some_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parcompile.searching.advice.MOST_SETTINGS", 40)
    training = {"sequence_length": 2**20, "micro_batch_size": 1, "global_batch_size": 32}
    tree = spec("llama-3.1-8b", nodes=4, parallelism={"tp": 1}, training=training)
    (error,) = parcompile.check(tree).errors
    (fix,) = error.fixes
    assert re.search(r": the best of \d+ layouts$", fix.title)
    for edit in fix.edits:
        tree.setdefault(str(edit.path[0]), {})[str(edit.path[1])] = edit.value
    assert not parcompile.check(tree).errors
