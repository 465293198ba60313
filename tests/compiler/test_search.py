"""The search: exact among what it enumerates, inside the rules and the memory, with a reason for every loser."""

from __future__ import annotations

import itertools
import json
import random
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from layout_cases import spec_tree

from parcompile.cli import cli, main
from parcompile.cli.search import PROGRESS_SECONDS
from parcompile.cost.calibration import TIE
from parcompile.cost.context_time import EQUAL
from parcompile.cost.executions import OpenChoices, all_executions, fastest, orders
from parcompile.cost.footprint import SAFE, footprint
from parcompile.cost.step import timing, values_of
from parcompile.cost.workload import Workload
from parcompile.layout.groups import Axis
from parcompile.layout.pipeline import PipelineSplit
from parcompile.layout.sequence import ContextParallel, CpImplementation, level_sizes
from parcompile.model.hf_config import shape_from_config
from parcompile.model.presets import presets
from parcompile.searching.first import first_spec
from parcompile.searching.ranking import Predictor, SearchResult, search
from parcompile.searching.space import EMBEDDING, FIRST, LAST, LOSS, VIRTUAL, ZERO_STAGES, Space, cuts, open_space
from parcompile.searching.variant import changed, variant
from parcompile.show.pictures import WIDE, Box
from parcompile.show.pictures.front import draw
from parcompile.spec.resolve import Resolution

FOLDER = Path()


def space(tree: dict[str, Any], *, executable: bool = True) -> Space:
    return open_space(Resolution(tree), executable=executable)


def llama(nodes: int = 1, batch: int = 64, **parallelism: object) -> dict[str, Any]:
    tree = spec_tree(nodes=nodes, model={"preset": "llama-3-8b"}, parallelism=parallelism)
    tree["training"] = {"sequence_length": 8192, "global_batch_size": batch}
    return tree


@pytest.fixture(scope="module")
def found() -> SearchResult:
    return search(space(llama()))


def test_no_enumerated_layout_that_fits_is_faster_by_more_than_predictions_tell_apart(found: SearchResult) -> None:
    assert found.best is not None
    assert found.best.seconds <= TIE * min(one.seconds for one in found.fitting)
    assert all(one.memory.probability is None or one.memory.probability >= SAFE for one in found.fitting)
    assert all(one.memory.probability is not None and one.memory.probability < SAFE for one in found.too_large)


def test_every_loser_has_a_reason(found: SearchResult) -> None:
    assert found.best is not None
    assert found.best.reason is None
    assert all(one.reason for one in (*found.fitting[1:], *found.too_large))
    assert any("mostly because of" in (one.reason or "") for one in found.fitting)
    assert all("usable on rank" in (one.reason or "") for one in found.too_large)
    assert found.too_large
    assert all(one.code and one.message for one in found.refused)


def test_no_layout_beats_one_of_the_front_in_both(found: SearchResult) -> None:
    assert len(found.front) > 1
    for one in found.front:
        assert not [
            other for other in found.fitting if other.seconds < one.seconds and other.peak_bytes < one.peak_bytes
        ]


def test_what_the_spec_gives_stays() -> None:
    outcome = search(space(llama(tp=4, sequence_parallel=True)))
    for one in (*outcome.fitting, *outcome.too_large):
        assert one.candidate.work.tp == 4
        assert one.candidate.work.sequence_parallel


def test_the_number_of_copies_stays_where_it_is_given() -> None:
    tree = llama(dp=2)
    outcome = search(space(tree))
    found = [one.candidate for one in (*outcome.fitting, *outcome.too_large)]
    assert {one.work.dp for one in found} == {2}
    assert {one.work.tp for one in found} >= {1, 2, 4}
    assert {changed(tree, one.changes)["parallelism"]["dp"] for one in found} == {2}


def test_the_accumulation_steps_stay_where_they_are_given() -> None:
    tree = llama(dp=4)
    tree["training"]["gradient_accumulation_steps"] = 4
    outcome = search(space(tree))
    found = [one.candidate for one in (*outcome.fitting, *outcome.too_large)]
    assert {(one.work.micro_batch, one.work.micro_batches) for one in found} == {(4, 4)}
    written = changed(tree, found[0].changes)["training"]
    assert (written["gradient_accumulation_steps"], written["micro_batch_size"]) == (4, 4)


def test_axes_that_cannot_make_the_world_are_named() -> None:
    with pytest.raises(ValueError, match="tp 4 · dp 4 does not divide the world 8"):
        space(llama(tp=4, dp=4))


def test_pipelines_are_searched_as_the_runtime_runs_them() -> None:
    outcome = search(space(llama(tp=2, cp=1)))
    assert {one.candidate.work.pp for one in outcome.fitting} >= {1, 2, 4}


def test_all_layouts_process_the_same_batch(found: SearchResult) -> None:
    assert {one.candidate.work.global_batch for one in found.fitting} == {64}
    assert {one.candidate.work.world_size for one in found.fitting} == {8}


def test_experts_open_their_axis() -> None:
    tree = spec_tree(nodes=2, model={"preset": "mixtral-8x7b"}, parallelism={"tp": 4, "cp": 1, "pp": 1})
    tree["training"] = {"sequence_length": 4096, "global_batch_size": 64}
    choices = space(tree, executable=False)
    assert choices.axes["ep"] == (1, 2, 4, 8)
    outcome = search(choices)
    works = [one.candidate.work for one in (*outcome.fitting, *outcome.too_large)]
    assert {one.ep for one in works} >= {1, 4}
    # Beside tp 4, experts of ep 4 are cut over tp, or whole on the tp ranks among those 4.
    assert {one.expert_tp for one in works if one.ep == 4} == {None, 1}
    assert {one.expert_tp for one in works if one.ep == 2} == {None}
    tree["parallelism"]["expert_tp"] = 4
    assert not space(tree, executable=False).whole_experts


def test_layouts_without_a_common_batch_are_not_compared() -> None:
    tree = llama()
    del tree["training"]["global_batch_size"]
    with pytest.raises(ValueError, match="global_batch_size is not given"):
        space(tree)


def test_hundreds_of_gpus_are_searched() -> None:
    """How long larger ones take is measured by benchmarks/search.py."""
    outcome = search(space(llama(nodes=64, batch=512), executable=False))
    assert outcome.enumerated > 500
    assert outcome.best is not None


def long_context(**more: object) -> Workload:
    settings: dict[str, Any] = {"tp": 2, "cp": 8, "pp": 2, "dp": 2, "sequence_parallel": True, **more}
    setting: dict[str, Any] = {"gpus_per_node": 8, "accelerator": "h100-sxm", "micro_batch": 1, "micro_batches": 8}
    setting |= {"shape": shape_from_config(presets()["llama-3-8b"].config), "nodes": 8, "sequence_length": 131072}
    return Workload(**setting | settings)


FP32_SUMS = {"gradient_accumulation_dtype": "fp32"}
EVERYTHING = OpenChoices(orders=True, implementations=True)


@pytest.mark.parametrize(
    "sizes", [{}, {"tp": 8, "cp": 4, "dp": 1}, {"cp": 32, "dp": 1, "pp": 1}, {"cp": 1, "dp": 8, "pp": 4}]
)
def test_the_way_of_a_layout_is_the_fastest_of_all_and_no_order_changes_memory(sizes: dict[str, int]) -> None:
    work = long_context(**sizes)
    values = values_of(work)
    executions = all_executions(work, EVERYTHING, values)
    assert len({(one.work.order, one.work.context) for one in executions}) == len(executions)
    assert fastest(work, EVERYTHING, values).step.seconds <= EQUAL**2 * min(one.step.seconds for one in executions)
    assert all(one.step.seconds == timing(one.work).step.seconds for one in executions)
    peaks: dict[str, set[float]] = defaultdict(set)
    for one in executions:
        peaks[one.work.context.name].add(footprint(one.work).peak.total_bytes)
    assert all(len(of_orders) == 1 for of_orders in peaks.values()), "an order changes memory"
    assert peaks[work.context.name] == {footprint(work).peak.total_bytes}


@pytest.mark.parametrize("length", [32768, 131072])
def test_memory_is_that_of_the_implementation_that_is_chosen(length: int) -> None:
    """Where an MLP is narrow, the peak is in what ranks exchange while attention goes backward."""
    config = {"model_type": "gptj", "n_embd": 4096, "n_layer": 8, "n_head": 16, "rotary_dim": 64, "n_inner": 4096}
    shape = shape_from_config({**config, "n_positions": length, "vocab_size": 2048})
    work = long_context(tp=1, pp=1, dp=1, sequence_parallel=False, shape=shape, nodes=1, sequence_length=length)
    peaks = {
        one.work.context: footprint(one.work).peak.total_bytes
        for one in all_executions(work, EVERYTHING, values_of(work))
    }
    assert len(set(peaks.values())) > 1
    chosen = fastest(work, EVERYTHING, values_of(work)).work
    assert Predictor(EVERYTHING).footprint(work).peak.total_bytes == peaks[chosen.context]


def test_an_implementation_is_searched_when_and_only_when_the_rules_allow_it() -> None:
    work = long_context(pp=1, dp=4)
    searched = {one.work.context for one in all_executions(work, EVERYTHING, values_of(work))}
    for kind in CpImplementation:
        for sizes in level_sizes(work.cp) if kind.has_levels else [None]:
            axes = {"tp": 2, "cp": 8, "pp": 1, "cp_implementation": kind.value}
            changes = axes if sizes is None else {**axes, "hierarchical_cp_sizes": list(sizes)}
            legal = variant(llama(nodes=8), changes, FOLDER, executable=False).work is not None
            assert legal == (ContextParallel(kind, work.cp, sizes) in searched), (kind, sizes)


@pytest.mark.parametrize("executable", [True, False])
@pytest.mark.parametrize("extra", [{}, {"training": {"precision": "fp16", "sequence_length": 8188}}])
def test_a_search_asks_the_rules_that_a_check_asks(executable: bool, extra: dict[str, Any]) -> None:
    """It leaves out those that say the same of every variant, and reads once what no variant changes.

    Sequence parallelism is refused by none of them.
    """
    tree = {**llama(), "model": {"preset": "mixtral-8x7b"}, **extra}
    tree["training"] = {**llama()["training"], **extra.get("training", {})}
    opened, answers = space(tree, executable=executable), set()
    variants = opened.variants
    for changes in random.Random(1).sample(opened.combinations, 60):
        for more in ({"stage": 1, "micro_batch_size": 1}, {"stage": 3, "micro_batch_size": 2}, {"micro_batch_size": 4}):
            alone = variant(opened.tree, {**changes, **more}, FOLDER, executable=executable)
            together = variants.having({**changes, **more})
            assert (together.work, together.code, together.message) == (alone.work, alone.code, alone.message)
            assert (variants.having({**changes, **more}, any_rule=True).work is None) == (alone.work is None)
            if alone.work is None and changes["sequence_parallel"]:
                less = {**changes, **more, "sequence_parallel": False}
                assert variant(opened.tree, less, FOLDER, executable=executable).work is None
            answers.add(alone.code)
    assert len(answers) > 2


@pytest.mark.parametrize(
    "sizes", [{"tp": 2, "cp": 2, "pp": 2}, {"tp": 4, "cp": 4, "pp": 1}, {"tp": 2, "cp": 1, "pp": 3}]
)
def test_no_rule_decides_by_the_order(sizes: dict[str, int]) -> None:
    found = {
        variant(llama(nodes=8), {**sizes, **FP32_SUMS, "order": "-".join(order)}, FOLDER, executable=False).code
        for order in orders(long_context(**sizes))
    }
    assert found == {"L001" if sizes["pp"] == 3 else None}


def test_the_other_executions_of_the_chosen_layout_say_why_they_lost() -> None:
    tree = llama(nodes=8, batch=8, tp=2, cp=8, sequence_parallel=True)
    tree["training"]["sequence_length"] = 131072
    outcome = search(space(tree))
    assert outcome.best is not None
    names = {one.work.cp_implementation for one, _ in outcome.other_executions}
    assert names == {one.value for one in CpImplementation}
    assert {one.work.order for one, _ in outcome.other_executions} == set(orders(outcome.best.candidate.work))
    assert any("slower, mostly because of cp, exposed" in reason for _, reason in outcome.other_executions)
    chosen = variant(tree, outcome.best.candidate.changes, FOLDER, executable=True).work
    assert chosen is not None
    assert timing(chosen).step.seconds == pytest.approx(outcome.best.seconds)


def test_an_order_and_an_implementation_that_are_given_stay() -> None:
    tree = llama(nodes=8, batch=8, tp=2, cp=8, order="tp-dp-cp-pp", cp_implementation="all_gather")
    outcome = search(space(tree))
    assert outcome.best is not None
    assert outcome.best.candidate.work.order[:2] == ("tp", "dp")
    assert outcome.best.candidate.work.cp_implementation == "all_gather"
    assert not outcome.other_executions


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


def test_the_chosen_spec_is_written_and_compiles(run: Run) -> None:
    tree = llama()
    tree["parallelism"] = {"tp": "auto", "cp": "auto", "dp": "auto"}
    Path("open.json").write_text(json.dumps(tree), encoding="utf-8")
    code, out, _ = run("search", "open.json", "-o", "chosen.json", "--losers")
    assert code == 0
    assert "Pareto front: no other layout is both faster and smaller" in out
    assert "why it lost" in out
    assert run("chosen.json", "-o", "plan")[0] == 0
    assert "auto" not in Path("chosen.json").read_text(encoding="utf-8")
    again = " ".join(run("search", "chosen.json")[1].split())
    assert 'one layout: a search tries the values of parallelism that are left out or "auto"' in again


def test_a_search_chooses_by_the_length_of_documents(run: Run) -> None:
    tree = llama(batch=8, tp=1, cp=8, pp=1)
    tree["training"] |= {"sequence_length": 131072, "micro_batch_size": 1, "activation_checkpointing": "full"}
    Path("spec.json").write_text(json.dumps(tree), encoding="utf-8")
    chosen, seconds = {}, {}
    for length in (None, 131072, 512):
        more = () if length is None else ("--document-length", str(length))
        code, out, _ = run("search", "spec.json", "--format", "json", *more)
        assert code == 0
        best = json.loads(out)
        chosen[length] = best["spec"]["parallelism"]["cp_implementation"]
        seconds[length] = best["best"]["step_seconds"]
    # Little attention hides little of a ring, which sends the keys of whole sequences.
    assert chosen == {None: "ring", 131072: "ring", 512: "ulysses"}
    assert seconds[None] == seconds[131072] > 4 * seconds[512]
    tree["parallelism"]["cp_implementation"] = "auto"
    Path("spec.json").write_text(json.dumps(tree), encoding="utf-8")
    code, _, err = run("estimate", "spec.json", "--document-length", "512")
    assert code == 0
    assert "a plan has ring, chosen for whole sequences, and so has this estimate" in err
    assert "For documents of 512 tokens ulysses is better" in err
    assert "is better" not in run("estimate", "spec.json", "--document-length", "131072")[2]
    code, out, err = run("search", "spec.json", "--document-length", "200000")
    assert (code, out) == (2, "")
    assert "--document-length 200000 > sequence_length 131072" in err


def test_json_holds_the_winner_the_front_and_the_losers(run: Run) -> None:
    Path("open.json").write_text(json.dumps(llama(nodes=2)), encoding="utf-8")
    code, out, _ = run("search", "open.json", "--format", "json")
    found = json.loads(out)
    assert code == 0
    assert found["best"] == found["fitting"][0]
    assert found["spec"]["parallelism"]["tp"] == found["best"]["layout"]["tp"]
    assert found["pareto_front"]


def test_a_search_without_a_terminal_says_from_time_to_time_how_far_it_is(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert PROGRESS_SECONDS == 10
    seconds = itertools.count(step=3)
    monkeypatch.setattr("parcompile.cli.search.time", SimpleNamespace(monotonic=lambda: next(seconds)))
    Path("spec.json").write_text(json.dumps(llama(cp=1)), encoding="utf-8")
    told = re.findall(r"predicted (\d+) of (\d+) settings of the axes", run("search", "spec.json")[2])
    total = len(space(llama(cp=1)).combinations)
    assert told
    assert [int(count) for count, _ in told] == list(range(3, total, 4))[: len(told)]
    assert {int(every) for _, every in told} == {total}


def test_what_stands_in_the_way_of_every_layout_is_said(run: Run) -> None:
    tree = llama()
    tree["cluster"]["accelerator"] = "none.json"
    Path("open.json").write_text(json.dumps(tree), encoding="utf-8")
    code, out, _ = run("search", "open.json")
    assert code == 1
    assert "H002  accelerator none.json:" in out
    assert "cannot be read: No such file" in " ".join(out.split())
    Path("config.json").write_text('{"num_hidden_layers": 2}', encoding="utf-8")
    code, out, err = run("init", "--hf-config", "config.json")
    assert (code, out) == (2, "")
    assert "Error: config.json: model_type is None" in err


def test_when_nothing_fits_the_smallest_layout_is_named(run: Run) -> None:
    tree = llama()
    tree["model"] = {"preset": "llama-3.1-405b"}
    Path("open.json").write_text(json.dumps(tree), encoding="utf-8")
    code, out, _ = run("search", "open.json")
    assert code == 1
    assert "no layout fits; the smallest is" in out


def test_layers_that_do_not_divide_go_onto_uneven_stages() -> None:
    """DeepSeek-V3 has 61 layers: on 128 nodes no search left pp 1, for want of stages."""
    for layers, pp in itertools.product((61, 80, 126, 7), (1, 2, 4, 5, 8, 16)):
        if layers < pp:
            assert cuts(layers, pp) == []
            continue
        for way in cuts(layers, pp):
            virtual = int(str(way.get(VIRTUAL, 1)))
            split = PipelineSplit(
                pp,
                virtual,
                embedding=bool(way.get(EMBEDDING)),
                loss=bool(way.get(LOSS)),
                first=way.get(FIRST),  # type: ignore[arg-type]
                last=way.get(LAST),  # type: ignore[arg-type]
            )
            counts = split.counts(layers)
            assert sum(counts) == layers
            assert min(counts) >= 1
            assert max(counts) <= -(-layers // (pp * virtual))


def test_a_model_of_61_layers_is_searched_with_stages() -> None:
    tree = spec_tree(nodes=16, model={"preset": "deepseek-v3"}, parallelism={"tp": 1, "cp": 1, "pp": "auto", "ep": 64})
    tree["cluster"]["accelerator"] = "b200"
    tree["training"] = {"sequence_length": 4096, "global_batch_size": 512, "micro_batch_size": 1}
    found = search(space(tree, executable=False))
    depths = {one.candidate.work.pp for one in (*found.fitting, *found.too_large)}
    assert depths >= {2}
    assert not [one for one in found.refused if one.code == "L001"]


def test_virtual_stages_are_searched_where_the_spec_leaves_them_open() -> None:
    found = search(space(llama(nodes=2, tp=2, cp=1, pp=4)))
    tried = {one.candidate.work.virtual_stages for one in (*found.fitting, *found.too_large)}
    assert tried == {1, 2}
    for one in found.fitting:
        work = one.candidate.work
        assert work.virtual_stages == 1 or work.micro_batches % work.pp == 0
    given = search(space(llama(nodes=2, tp=2, cp=1, pp=4, num_virtual_stages_per_pipeline_rank=4)))
    assert {one.candidate.work.virtual_stages for one in (*given.fitting, *given.too_large)} == {4}


def test_a_search_without_an_accelerator_says_which_one_it_means() -> None:
    tree = llama(tp=2)
    del tree["cluster"]["accelerator"]
    opened = space(tree)
    assert opened.assumes_accelerator
    found = search(opened)
    assert found.best is not None
    assert changed(opened.tree, found.best.candidate.changes)["cluster"]["accelerator"] == "h100-sxm"
    assert all((one.memory.probability or 0) >= SAFE for one in found.fitting)


def test_when_nothing_fits_it_says_what_would_and_that_does() -> None:
    tree = spec_tree(nodes=1, model={"preset": "llama-3-70b"})
    tree["training"] = {"sequence_length": 8192, "global_batch_size": 64}
    # With more of it the optimizer goes there.
    tree["cluster"]["host_memory_gib"] = 512
    opened = space(tree)
    found = search(opened)
    assert found.best is None
    assert found.remedies
    for one in found.remedies:
        mended = variant(opened.tree, {**one.candidate.changes, **one.change.settings}, FOLDER, executable=False)
        assert mended.work is not None
        assert (footprint(mended.work).probability or 0) >= SAFE
        assert mended.work.global_batch == 64


def test_the_front_is_drawn_with_the_chosen_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("open.json").write_text(json.dumps(llama()), encoding="utf-8")
    run = CliRunner()
    text = run.invoke(cli, ["search", "open.json", "--format", "json"]).stdout
    Path("search.json").write_text(text, encoding="utf-8")
    tree = json.loads(text)
    drawn = draw(tree, WIDE)
    dots = [shape for shape in drawn.shapes if isinstance(shape, Box) and shape.title]
    assert sum(one.fill == "activations" for one in dots) == 1
    near = [one for one in tree["pareto_front"] if one["step_seconds"] <= 3 * tree["best"]["step_seconds"]]
    assert sum(one.fill == "dp" for one in dots) >= len(near) - 1
    assert all(0 <= one.x <= WIDE and 0 <= one.y <= drawn.height for one in dots)
    run.invoke(cli, ["search", "open.json", "-o", "chosen.json"])
    assert run.invoke(cli, ["view", "chosen.json", "--search", "search.json", "-o", "report.html"]).exit_code == 0
    page = Path("report.html").read_text(encoding="utf-8")
    assert "Time against memory" in page
    assert page.count("(this plan)") == 1


@pytest.mark.parametrize(
    ("model", "nodes", "parallelism"),
    [
        ("llama-3-8b", 2, {"tp": 1, "cp": 1, "pp": 8}),
        ("gemma-2b", 1, {"pp": 4, "tp": 1, "cp": 1}),
        ("deepseek-v3", 32, {"tp": 1, "cp": 1, "pp": 16}),
        ("gpt-oss-120b", 4, {"tp": 2, "cp": 1, "pp": 4}),
        ("qwen3-next-80b-a3b", 4, {"tp": 1, "cp": 1, "pp": 8}),
        ("nemotron-h-56b", 4, {"tp": 1, "cp": 1, "pp": 8}),
        ("mimo-v2-flash", 8, {"tp": 1, "cp": 1, "pp": 8}),
    ],
)
def test_the_stages_that_a_search_leaves_out_are_never_the_fullest(
    model: str, nodes: int, parallelism: dict[str, int]
) -> None:
    tree = llama(nodes, 256, **parallelism) | {"model": {"preset": model}}
    opened = space(tree)
    every = search(opened)
    works = [one.base.work for one in (*every.fitting, *every.too_large)]
    assert works
    for work in works:
        whole, part = footprint(work), footprint(work, fullest=True)
        assert (part.peak, part.interval_bytes, part.probability) == (
            whole.peak,
            whole.interval_bytes,
            whole.probability,
        )
        assert part.static_bytes == whole.static_bytes


def test_the_first_offer_of_init_is_the_best_of_the_search() -> None:
    script = Path(__file__).parents[2] / ".ci" / "first_layouts.py"
    done = subprocess.run([sys.executable, script, "--only", "8"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("init") == 8


def test_init_takes_tp_over_nodes_where_nothing_else_fits_and_warns_of_it() -> None:
    cluster = {"nodes": 4, "gpus_per_node": 2, "accelerator": {"memory_gib": 20, "like": "rtx-4090"}}
    offer, *_ = first_spec("small", {"preset": "llama-3.1-8b"}, cluster, 4096, Path()).offers
    assert (offer.spec["parallelism"]["tp"], offer.spec["parallelism"]["pp"]) == (8, 1)
    assert any("tp 8 leaves the node of 2 GPUs" in warning for warning in offer.warnings)


def test_zero_stage_3_is_tried_where_else_tp_would_leave_its_node() -> None:
    cluster = {"nodes": 8, "gpus_per_node": 4, "accelerator": "h100-sxm"}
    offer, *_ = first_spec("long", {"preset": "llama-3-70b"}, cluster, 131072, Path()).offers
    assert offer.spec["zero"] == {"stage": 3}
    assert (offer.spec["parallelism"]["tp"], offer.spec["parallelism"]["cp"]) == (4, 4)
    assert offer.warnings == ()
    # Both fit at the other stages only with tp 8, which takes longer; the search knows all of them.
    tree = {name: part for name, part in offer.spec.items() if name not in ("zero", "parallelism")}
    del tree["training"]["activation_checkpointing"], tree["training"]["micro_batch_size"]
    whole = space({**tree, "parallelism": {}})
    axes = {**whole.axes, Axis.PP: (1,), Axis.TP: (4, 8), Axis.CP: (4, 8)}
    found = search(replace(whole, axes=axes))
    assert found.best is not None
    assert (found.best.base.work.tp, found.best.base.work.zero_stage) == (4, 3)
    assert {one.base.work.tp for one in found.fitting if one.base.work.zero_stage != 3} == {8}
    # At a stage that the spec gives no other is tried, and where a layout fits in its node neither.
    given = search(space({**tree, "parallelism": {"pp": 1}, "zero": {"stage": 1}}))
    assert all(one.base.work.zero_stage == 1 for one in (*given.fitting, *given.too_large))
    assert all(one.base.work.zero_stage < 3 for one in search(space(llama(nodes=1, batch=64))).fitting)


def _of_stages(found: SearchResult) -> dict[Workload, int]:
    """The ZeRO stage at which each layout fits; without those that recompute some stages or parts only."""
    works = [one.base.work for one in found.fitting if one.base.work.recompute in ("none", "full")]
    return {replace(work, zero_stage=1): work.zero_stage for work in works}


@pytest.mark.parametrize(("precision", "stages"), [("bf16", {1, 2}), ("fp32", {0, 1, 2})])
def test_a_search_tries_each_zero_stage_where_a_layout_does_not_fit_at_the_first(
    precision: str, stages: set[int]
) -> None:
    tree = llama(nodes=1, batch=64)
    tree["training"] |= {"sequence_length": 32768 if precision == "bf16" else 8192, "precision": precision}
    alone = {stage: search(space({**tree, "zero": {"stage": stage}})) for stage in ZERO_STAGES}
    found = search(space(tree))
    fits = {stage: set(_of_stages(one)) for stage, one in alone.items()}
    assert _of_stages(found).keys() == set().union(*fits.values())
    assert set(_of_stages(found).values()) == stages
    assert all(stage == 1 for work, stage in _of_stages(found).items() if work in fits[1])
    # No layout is faster at another stage: where it fits at the first, the others need not be tried. In a pipeline
    # nothing hides gradients, and stage 0 saves the gather of weights.
    for one in found.fitting:
        seconds = [timing(replace(one.candidate.work, zero_stage=stage)).step.seconds for stage in ZERO_STAGES]
        assert min(seconds) >= seconds[0] * (1 - 1e-3 * (one.candidate.work.pp > 1))
    fastest_alone = min(one.fitting[0].seconds for one in alone.values() if one.fitting)
    assert min(one.seconds for one in found.fitting) <= fastest_alone


def test_an_output_that_cannot_be_written_is_said_before_the_search(run: Run) -> None:
    Path("open.json").write_text(json.dumps(llama()), encoding="utf-8")
    for output, said in (
        ("no/chosen.json", "there is no folder no; create it first"),
        ("/dev/null", "it is no regular file"),
        (".", ". is a folder: name a file in it"),
    ):
        code, out, err = run("search", "open.json", "-o", output)
        assert (code, out) == (2, "")
        assert said in err


def test_a_spec_that_is_written_elsewhere_names_its_files_from_there(run: Run, tmp_path: Path) -> None:
    Path("deep").mkdir()
    Path("deep/config.json").write_text(json.dumps(dict(presets()["llama-3-8b"].config)), encoding="utf-8")
    machine = {"memory_gib": 80, "like": "h100-sxm"}
    Path("deep/box.json").write_text(json.dumps(machine), encoding="utf-8")
    tree = llama(tp=2)
    tree["model"] = {"hf_config": "config.json"}
    tree["cluster"]["accelerator"] = "box.json"
    for name in ("config.json", str(tmp_path / "deep" / "config.json")):
        tree["model"]["hf_config"] = name
        Path("deep/open.json").write_text(json.dumps(tree), encoding="utf-8")
        assert run("search", "deep/open.json", "-o", "chosen.json")[0] == 0
        assert run("check", "chosen.json")[0] == 0
        found = json.loads(Path("chosen.json").read_text(encoding="utf-8"))
        assert found["model"]["hf_config"] == (name if Path(name).is_absolute() else "deep/config.json")
        assert found["cluster"]["accelerator"] == "deep/box.json"
    # A link names the folder that it leads to, and an accelerator that is an object stays.
    tree["cluster"]["accelerator"] = {"memory_gib": 80}
    Path("deep/open.json").write_text(json.dumps(tree), encoding="utf-8")
    Path("link.json").symlink_to("deep/chosen.json")
    assert run("search", "deep/open.json", "-o", "link.json")[0] == 0
    found = json.loads(Path("deep/chosen.json").read_text(encoding="utf-8"))
    assert (found["model"]["hf_config"], found["cluster"]["accelerator"]) == (name, {"memory_gib": 80})
