"""What a file is: told by keys that only one tool has. Foreign files are skipped, and said to be."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from parcompile.backends import kinds
from parcompile.backends.kinds import Certainty, recognise, recognise_text
from parcompile.cli import main

SPEC = {"version": 1, "model": {"preset": "gpt2"}, "cluster": {"gpus_per_node": 2}, "training": {"sequence_length": 64}}
TRAINER = {
    "model_name_or_path": "Qwen/Qwen3-8B",
    "output_dir": "out",
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "bf16": True,
    "deepspeed": "configs/ds_z2.json",
}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["parcompile", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        captured = capsys.readouterr()
        return int(stopped.value.code or 0), captured.out, captured.err

    return call


def write(name: str, tree: Any) -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(tree if isinstance(tree, str) else json.dumps(tree, indent=1), encoding="utf-8")
    return name


@pytest.mark.parametrize(
    ("tree", "kind", "certainty"),
    [
        (SPEC, kinds.SPEC, Certainty.CERTAIN),
        ({"version": 1, "modle": {}, "clutser": {}, "trainning": {}}, kinds.SPEC, Certainty.CERTAIN),
        ({"model": {}, "cluster": {}}, kinds.SPEC, Certainty.LIKELY),
        ({"model": {}, "train": {}, "optimizer": {}}, kinds.UNKNOWN, Certainty.UNKNOWN),
        ({"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}, kinds.DEEPSPEED, Certainty.CERTAIN),
        ({"zero_optimisation": {"stage": 2}}, kinds.DEEPSPEED, Certainty.LIKELY),
        ({"fp16": {"enabled": True}}, kinds.DEEPSPEED, Certainty.LIKELY),
        ({"train_batch_size": 8, "optimizer": {"type": "AdamW"}}, kinds.DEEPSPEED, Certainty.LIKELY),
        ({"train_batch_size": 8, "epochs": 3}, kinds.UNKNOWN, Certainty.UNKNOWN),
        ({"fp16": True, "optimizer": "adamw", "gradient_clipping": 1.0}, kinds.UNKNOWN, Certainty.UNKNOWN),
        (TRAINER, kinds.TRAINER, Certainty.CERTAIN),
        ({"base_model": "x", "datasets": [], "micro_batch_size": 1, "zero_stage": 2}, kinds.AXOLOTL, Certainty.CERTAIN),
        ({**TRAINER, "stage": "sft", "finetuning_type": "lora"}, kinds.LLAMA_FACTORY, Certainty.CERTAIN),
        (
            {"model": "m", "rlhf_type": "grpo", "lr": 5e-5, "train": {"gpus": 4}},
            kinds.MEGATRON_SWIFT,
            Certainty.CERTAIN,
        ),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": {}}, kinds.ACCELERATE, Certainty.CERTAIN),
        ({"trainer": {"devices": 8, "max_epochs": 3}, "model": {}}, kinds.LIGHTNING, Certainty.CERTAIN),
        ({"model_type": "llama", "hidden_size": 64}, kinds.MODEL, Certainty.CERTAIN),
        ({"name": "x", "version": "1.0.0", "scripts": {}}, kinds.PACKAGE, Certainty.CERTAIN),
        ({"pipe-parallel-size": 1, "num-layers": 2}, kinds.GPT_NEOX, Certainty.CERTAIN),
        ({"vocab-file": "v", "merge-file": "m", "data-path": "d"}, kinds.GPT_NEOX, Certainty.LIKELY),
        ({"MODEL_ARGS": {"--tensor-model-parallel-size": 2, "--num-layers": 4}}, kinds.MEGATRON, Certainty.CERTAIN),
        ({}, kinds.UNKNOWN, Certainty.UNKNOWN),
        ([], kinds.UNKNOWN, Certainty.UNKNOWN),
        (None, kinds.UNKNOWN, Certainty.UNKNOWN),
    ],
)
def test_kinds_are_told_by_keys(tree: object, kind: str, certainty: Certainty) -> None:
    found = recognise(tree)
    assert (found.kind, found.certainty) == (kind, certainty)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ('{"version": 1,\n "model": {"preset": "gpt2"\n "cluster": {', kinds.SPEC),
        ('{\n"zero_optimization": {"stage": 2', kinds.DEEPSPEED),
        ('{\n"pipe-parallel-size": 1,\n"num-layers": 36\n"zero_optimization"', kinds.GPT_NEOX),
        ('{\n // comments\n "compilerOptions": {', kinds.UNKNOWN),
    ],
)
def test_broken_texts_are_told_by_the_keys_that_can_be_made_out(text: str, kind: str) -> None:
    assert recognise_text(text).kind == kind


def test_a_foreign_file_is_skipped_and_said_to_be(run: Any) -> None:
    write("spec.json", SPEC)
    write("trainer.yaml", TRAINER)
    write("tsconfig.json", {"compilerOptions": {}})
    code, out, err = run("check", "spec.json", "trainer.yaml", "tsconfig.json", "--format", "json")
    assert code == 0
    assert json.loads(out)["valid"]
    assert "skipped trainer.yaml and 1 more: 1 not recognised, 1 of kind trainer" in err


def test_a_file_alone_that_is_not_recognised_is_no_success(run: Any) -> None:
    """A spec that lost its sections must not pass for checked; a pre-commit hook may be given nothing else."""
    write("package.json", {"name": "x", "scripts": {}})
    code, _, err = run("check", "package.json")
    assert code == 2
    assert err.startswith("Error: package.json is of kind package, which is neither a spec nor a configuration that ")
    assert run("check", "package.json", "--skip-unrecognised")[0] == 0


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "file.json cannot be read: line 1, column 1: the file is empty"),
        ("{}".encode("utf-16"), "file.json cannot be read: line 1, column 1: the file is UTF-16, not UTF-8"),
        (
            json.dumps({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2}).encode(),
            "file.json is the configuration of a model, not a spec: `parcompile init file.json`",
        ),
        (
            json.dumps(TRAINER).encode(),
            "file.json is of kind trainer, which `check` does not take: `parcompile import file.json`",
        ),
    ],
)
def test_a_file_alone_that_is_not_checked_is_told_why(run: Any, text: bytes, why: str) -> None:
    Path("file.json").write_bytes(text)
    code, _, err = run("check", "file.json")
    assert code == 2
    assert err.startswith(f"Error: {why}")


def test_a_text_without_sense_beside_a_good_spec_is_no_success(run: Any) -> None:
    write("spec.json", SPEC)
    Path("cut.json").write_text('{"version": 1, "name": "x', encoding="utf-8")
    code, out, err = run("check", "spec.json", "cut.json", "--format", "json")
    assert code == 2
    assert json.loads(out)["files"] == [{"file": "spec.json", "kind": "spec"}]
    assert err.startswith("Error: cut.json cannot be read: line 1, column ")
    code, _, err = run("check", "spec.json", "cut.json", "--skip-unrecognised")
    assert (code, err[:33]) == (0, "skipped: cut.json cannot be read:")


def test_a_recipe_in_python_that_import_takes_is_told_so(run: Any) -> None:
    write(
        "spec.json",
        {**SPEC, "model": {"preset": "llama-3.2-1b"}, "training": {"sequence_length": 64, "precision": "bf16"}},
    )
    assert run("compile", "spec.json", "--target", "torchtitan", "-o", "plan")[0] == 0
    code, _, err = run("check", "plan/torchtitan_config.py")
    assert code == 2
    assert "is of kind torchtitan, which `check` does not take: `parcompile import plan/torchtitan_config.py`" in err
    Path("run.py").write_text("print(1)\n", encoding="utf-8")
    assert "run.py is not recognised as a spec" in run("check", "run.py")[2]


def test_the_file_that_was_checked_in_the_place_of_another_is_named(run: Any) -> None:
    write("ds.json", {"zero_optimization": {"stage": 2}, "train_batch_size": 8, "gradient_clipping": 1.0})
    write("axolotl.yml", {"base_model": "x", "deepspeed": "ds.json"})
    _, out, err = run("check", "axolotl.yml")
    assert out == "ds.json checked: no errors, no remarks\n"
    assert "skipped: axolotl.yml is of kind axolotl" in err


def test_the_kind_can_be_said(run: Any) -> None:
    write("odd.json", {"model": {"preset": "gpt2"}})
    code, out, _ = run("check", "odd.json", "--kind", "spec", "--format", "json")
    assert code == 1
    assert {one["code"] for one in json.loads(out)["diagnostics"]} >= {"K002"}


def test_every_machine_format_names_the_kind(run: Any) -> None:
    write("ds.json", {"zero_optimization": {"stage": 1}, "train_batch_sise": 8, "bf16": {"enabled": True}})
    for form, found in (
        ("json", lambda out: json.loads(out)["files"][0]["kind"]),
        ("sarif", lambda out: json.loads(out)["runs"][0]["artifacts"][0]["properties"]["kind"]),
        ("gitlab", lambda out: json.loads(out)[0]["kind"]),
        ("junit", lambda out: out.split('name="kind" value="')[1].split('"')[0]),
    ):
        assert found(run("check", "ds.json", "--format", form)[1]) == kinds.DEEPSPEED, form


def test_what_is_only_likely_is_not_changed(run: Any) -> None:
    text = '{"fp16": {"enabled": "true"}}'
    write("maybe.json", text)
    _, _, err = run("check", "maybe.json", "--fix")
    assert Path("maybe.json").read_text(encoding="utf-8") == text
    assert "maybe.json is probably of kind ds_config, but that is not certain: not changed" in err
    run("check", "maybe.json", "--fix", "--kind", "ds_config")
    assert json.loads(Path("maybe.json").read_text(encoding="utf-8"))["fp16"]["enabled"] is True


@pytest.mark.parametrize(
    ("name", "tree"),
    [
        ("runs/sft.yaml", TRAINER),
        ("runs/axolotl.yml", {"base_model": "x", "deepspeed": "configs/ds_z2.json"}),
        (
            "runs/accelerate.yaml",
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "../configs/ds_z2.json"}},
        ),
    ],
)
def test_a_configuration_that_another_file_names_is_checked_with_it(run: Any, name: str, tree: Any) -> None:
    write("configs/ds_z2.json", {"zero_optimization": {"stage": 7}, "train_batch_size": 8, "gradient_clipping": 1.0})
    write(name, tree)
    code, out, _ = run("check", name, "--format", "json")
    assert code == 1
    found = json.loads(out)["diagnostics"]
    assert [(Path(one["file"]).name, one["path"]) for one in found] == [("ds_z2.json", "zero_optimization.stage")]


def test_a_configuration_that_accelerate_names_is_imported_in_its_own_order(run: Any) -> None:
    """No set decides in which order the spec says it: two runs write the same."""
    params = {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-7, "weight_decay": 0.1}
    optimizer = {"type": "AdamW", "params": params}
    write("ds.json", {"train_batch_size": 64, "bf16": {"enabled": True}, "optimizer": optimizer})
    write("launch.yaml", {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "ds.json"}})
    options = ["--model", "llama-3.2-1b", "--gpus-per-node", "8", "--accelerator", "h100-sxm"]
    options += ["--sequence-length", "2048"]
    specs = [json.loads(run("import", name, *options)[1]) for name in ("ds.json", "launch.yaml")]
    orders = [list(spec["training"]["optimizer"]) for spec in specs]
    assert orders[0] == orders[1]
    assert {"type", *params} <= set(orders[0])


class TestFix:
    """What --fix leaves is still reported, with its exit code."""

    def test_a_broken_text_stays_broken_after_a_fix(self, run: Any) -> None:
        tree = json.dumps({**SPEC, "cluster": {"gpus_per_node": "2"}})
        write("spec.json", tree[:-1] + ",}")
        code, out, _ = run("check", "spec.json", "--fix")
        assert code == 1
        assert "1 fixed" in out
        assert "error[J0" in out

    def test_a_key_written_twice_is_still_said_after_a_fix(self, run: Any) -> None:
        text = json.dumps({**SPEC, "cluster": {"gpus_per_node": "2"}})
        write("spec.json", text[:-1] + ', "name": "a", "name": "b"}')
        code, out, _ = run("check", "spec.json", "--fix", "--format", "json")
        assert code == 1
        assert "J009" in {one["code"] for one in json.loads(out)["diagnostics"]}

    def test_only_selected_findings_are_mended(self, run: Any) -> None:
        write("spec.json", {**SPEC, "cluster": {"gpus_per_node": "2"}})
        before = Path("spec.json").read_text(encoding="utf-8")
        run("check", "spec.json", "--fix", "--select", "W")
        assert Path("spec.json").read_text(encoding="utf-8") == before
        run("check", "spec.json", "--fix", "--select", "K003")
        assert json.loads(Path("spec.json").read_text(encoding="utf-8"))["cluster"] == {"gpus_per_node": 2}


def test_sarif_carries_the_fixes_as_changes_of_the_text(run: Any) -> None:
    write("spec.json", {**SPEC, "cluster": {"gpus_per_node": "2"}})
    (result,) = [
        one
        for one in json.loads(run("check", "spec.json", "--format", "sarif")[1])["runs"][0]["results"]
        if one["ruleId"] == "K003"
    ]
    region = result["locations"][0]["physicalLocation"]["region"]
    lines = Path("spec.json").read_text(encoding="utf-8").splitlines()
    line = lines[region["startLine"] - 1]
    assert line[region["startColumn"] - 1 : region["endColumn"] - 1] == '"2"'
    (change,) = result["fixes"][0]["artifactChanges"][0]["replacements"]
    gone, new = change["deletedRegion"], change["insertedContent"]["text"]
    lines[gone["startLine"] - 1] = line[: gone["startColumn"] - 1] + new + line[gone["endColumn"] - 1 :]
    assert json.loads("\n".join(lines))["cluster"] == {"gpus_per_node": 2}
