"""The public Python API: what `import parcompile` offers, without torch and without loading what is not used."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import parcompile
from parcompile.model.presets import find_preset
from parcompile.plan import plan_tree
from parcompile.plan.sections import rank_groups


def llama() -> dict[str, Any]:
    return {
        "version": 1,
        "model": {"preset": "llama-3-8b"},
        "cluster": {"gpus_per_node": 8, "accelerator": "h200"},
        "training": {"sequence_length": 8192, "global_batch_size": 64},
    }


def fresh(code: str) -> str:
    """What a new interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_importing_the_package_loads_nothing_but_its_version() -> None:
    loaded = fresh("import sys, parcompile; print(*sorted(n for n in sys.modules if n.startswith('parcompile')))")
    assert loaded.split() == ["parcompile", "parcompile.version"]


def test_the_api_never_loads_torch() -> None:
    code = f"import sys, parcompile; parcompile.compile({llama()!r}).estimate(); print('torch' in sys.modules)"
    assert fresh(code) == "False"


def test_every_public_name_is_there_and_on_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
    for name in parcompile.__all__:
        assert getattr(parcompile, name) is not None
        assert name == "__version__" or name in page, name
    assert set(dir(parcompile)) >= set(parcompile.__all__)
    with pytest.raises(AttributeError, match="no attribute 'chekc'"):
        _ = parcompile.chekc  # type: ignore[attr-defined]


def test_a_path_a_text_and_a_tree_give_the_same_plan(tmp_path: Path) -> None:
    tree = llama()
    file = tmp_path / "spec.json"
    file.write_text(json.dumps(tree), encoding="utf-8")
    hashes = {parcompile.compile(one).plan_hash for one in (file, str(file), json.dumps(tree), tree)}
    assert len(hashes) == 1


def test_a_folder_that_was_compiled_is_read_as_the_same_plan(tmp_path: Path) -> None:
    plan = parcompile.compile(llama(), tmp_path / "plan", targets=["megatron"])
    assert (tmp_path / "plan" / "megatron_args.json").is_file()
    assert parcompile.load_plan(tmp_path / "plan") == plan == parcompile.compile(tmp_path / "plan")
    assert parcompile.check(tmp_path / "plan").valid


def test_findings_are_objects_with_code_place_and_fixes() -> None:
    result = parcompile.check(json.dumps({**llama(), "trainning": {}}, indent=1))
    (error,) = result.errors
    assert (error.code, error.severity) == ("K001", parcompile.Severity.ERROR)
    assert error.position is not None
    assert result.source.line(error.position.line).strip().startswith('"trainning"')
    assert not result.valid
    assert "error[K001]" in result.text()
    assert set(result.diagnostics) == {*result.errors, *result.warnings, *result.remarks}


def test_a_spec_with_errors_raises_them_and_writes_nothing(tmp_path: Path) -> None:
    tree = llama()
    tree["parallelism"] = {"tp": 3}
    with pytest.raises(parcompile.SpecError, match="T001") as caught:
        parcompile.compile(tree, tmp_path / "plan")
    assert "T001" in {one.code for one in caught.value.diagnostics}
    assert not (tmp_path / "plan").exists()


def test_what_is_no_spec_is_said_to_lack_everything_and_a_missing_file_raises() -> None:
    assert {one.code for one in parcompile.check({"version": 1}).errors} == {"K002"}
    with pytest.raises(parcompile.SourceError, match="no such file"):
        parcompile.check("missing.json")


def test_other_tools_files_are_checked_too() -> None:
    result = parcompile.check({"train_batch_size": 8, "bf16": {"enabled": True}, "fp16": {"enabled": True}})
    assert result.kind == "ds_config"
    assert "F004" in {one.code for one in result.errors}


def test_the_groups_of_a_rank_are_those_of_the_command() -> None:
    tree = llama()
    tree["parallelism"] = {"tp": 2, "cp": 2}
    plan = parcompile.compile(tree)
    for rank in range(plan.world_size):
        shown = rank_groups(plan, rank)["groups"]
        assert plan.groups(rank) == {name: tuple(group["ranks"]) for name, group in shown.items()}
    with pytest.raises(ValueError, match="rank"):
        plan.groups(plan.world_size)


def test_a_search_returns_a_spec_that_compiles_to_its_best_layout() -> None:
    tree = llama()
    tree["parallelism"] = {"cp": 1, "pp": 1}
    found = parcompile.search(tree)
    assert found.best is not None
    assert found.spec is not None
    assert found.best is found.fitting[0]
    assert found.best.reason is None
    assert all(one.reason for one in (*found.fitting[1:], *found.too_large))
    estimate = parcompile.compile(found.spec).estimate()
    assert estimate.time.step.seconds == pytest.approx(found.best.seconds)
    assert estimate.memory.peak.total_bytes == pytest.approx(found.best.peak_bytes)


def test_a_search_refuses_a_spec_that_no_layout_mends() -> None:
    with pytest.raises(parcompile.SpecError, match="K001"):
        parcompile.search({**llama(), "trainning": {}})


def test_init_offers_what_the_command_does(tmp_path: Path) -> None:
    found = parcompile.init("Qwen/Qwen2.5-7B-Instruct", sequence_length=4096)
    assert found.offers[0].word == "fastest"
    assert found.spec is not None
    assert parcompile.check(found.spec).valid
    (tmp_path / "config.json").write_text(json.dumps(dict(find_preset("llama-3-8b").config)))
    assert parcompile.init(tmp_path, nodes=2).spec["model"] == {"hf_config": (tmp_path / "config.json").as_posix()}
    nothing = parcompile.init("llama-3-70b", gpus_per_node=1)
    assert (nothing.spec, bool(nothing.reason), bool(nothing.remedies)) == (None, True, True)
    with pytest.raises(ValueError, match=r"there is no preset and no file 'lama-3-8b'; near are llama-3-8b"):
        parcompile.init("lama-3-8b")


def test_a_file_of_another_tool_becomes_a_spec_with_answers(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}))
    opened = parcompile.import_file(file)
    assert (opened.complete, opened.plan) == (False, None)
    answers = {"model": {"preset": "llama-3-8b"}, "cluster.gpus_per_node": 8, "training.sequence_length": 4096}
    answers |= {".".join(one.path): 3e-4 for one in opened.questions if one.path[-1] == "lr"}
    found = parcompile.import_file(file, answers)
    assert found.spec["model"] == {"preset": "llama-3-8b"}
    (tmp_path / "text.json").write_text("[]")
    with pytest.raises(ValueError, match=r"text.json"):
        parcompile.import_file(tmp_path / "text.json")
    with pytest.raises(ValueError, match="there is no importer 'nothing'"):
        parcompile.import_file(file, kind="nothing")


def test_a_difference_takes_plans_and_specs() -> None:
    wide = {**llama(), "parallelism": {"tp": 4}}
    found = parcompile.diff(parcompile.compile(llama()), wide)
    assert not found.same
    assert parcompile.diff(wide, wide).same


def test_what_is_shown_of_an_object_is_a_line() -> None:
    plan = parcompile.compile(llama())
    objects = [plan, plan.estimate(), parcompile.check(llama()), parcompile.diff(plan, plan)]
    objects += [parcompile.init("llama-3-8b"), *parcompile.init("llama-3-8b").offers, parcompile.search(llama())]
    checked = parcompile.check({**llama(), "nonsense": "long " * 100})
    objects += [checked, *checked.diagnostics, checked.source, plan.spec, plan.parameters]
    shown = [repr(one) for one in objects]
    assert [one for one in shown if len(one) > 200 or not one] == []


def with_points(tree: Any) -> Any:
    """A tree whose whole numbers are written with a point."""
    if isinstance(tree, dict):
        return {key: with_points(one) for key, one in tree.items()}
    if isinstance(tree, list):
        return [with_points(one) for one in tree]
    return float(tree) if type(tree) is int else tree


INLINE = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "vocab_size": 1024,
    "max_position_embeddings": 512,
}
TRAINING = {
    "sequence_length": 512,
    "global_batch_size": 64,
    "micro_batch_size": 1,
    "rampup_batch_size": {"start": 32, "increment": 32, "samples": 320},
    "optimizer": {"type": "muon", "ns_steps": 5},
    "lr_scheduler": {"type": "cosine", "warmup_steps": 10, "total_steps": 100},
    "train_steps": 200,
    "seed": 7,
}
EVERY_PLACE = {
    "version": 1,
    "model": INLINE,
    "cluster": {"nodes": 1, "gpus_per_node": 8, "accelerator": "h200"},
    "parallelism": {"tp": 2, "cp": 4, "dp": 1, "hierarchical_cp_sizes": [2, 2], "make_vocab_size_divisible_by": 64},
    "training": TRAINING,
    "zero": {"stage": 1},
}


@pytest.mark.parametrize("tree", [llama(), EVERY_PLACE], ids=["few", "many"])
def test_a_whole_number_with_a_point_is_that_number(tree: dict[str, Any]) -> None:
    pointed, plain = (plan_tree(parcompile.compile(one)) for one in (with_points(tree), tree))
    assert json.dumps(pointed) == json.dumps(plain)


def test_a_number_that_may_have_a_fraction_keeps_its_point() -> None:
    tree = {**llama(), "training": {**llama()["training"], "gradient_clipping": 1.0}}
    assert type(parcompile.compile(tree).spec.provenance["training.gradient_clipping"].value) is float


def test_a_search_and_a_first_spec_take_whole_numbers_with_a_point() -> None:
    found, pointed = parcompile.search(llama()), parcompile.search(with_points(llama()))
    assert json.dumps(pointed.spec) == json.dumps(found.spec)
    assert [one.candidate.name for one in pointed.fitting] == [one.candidate.name for one in found.fitting]
    first, of_points = (
        parcompile.init("llama-3-8b", nodes=kind(2), training={"micro_batch_size": kind(1)})  # type: ignore[arg-type]
        for kind in (int, float)
    )
    assert json.dumps(of_points.spec) == json.dumps(first.spec)
