"""`parcompile import` accounts for every key; `parcompile init` writes a spec that compiles."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from parcompile.backends.artefacts import effective_order
from parcompile.backends.megatron import write as megatron
from parcompile.cli import main
from parcompile.pipeline import check_any, compile_file

POSITIVE = Path(__file__).parents[1] / "specs" / "positive"


NEOX = {
    "pipe-parallel-size": 1,
    "model-parallel-size": 2,
    "num-layers": 12,
    "hidden-size": 768,
    "num-attention-heads": 12,
    "seq-length": 2048,
    "max-position-embeddings": 2048,
    "pos-emb": "rotary",
    "no-weight-tying": True,
    "norm": "layernorm",
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 6e-4, "betas": [0.9, 0.95], "eps": 1e-8}},
    "zero_optimization": {"stage": 1, "overlap_comm": True},
    "fp16": {"enabled": True, "loss_scale": 0},
    "gradient_clipping": 1.0,
    "train-iters": 320000,
    "lr-decay-style": "cosine",
    "data-path": "data/enron",
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


@pytest.mark.parametrize(
    "name",
    [
        "W001-tp-2-of-8",
        "T007-joint-factor",
        "P004-fp32-sums",
        "design-64k",
        "L006-interleaved",
        "L004-first-and-last",
        "S006-falls-after-the-warm-up",
    ],
)
def test_a_script_with_exported_arguments_comes_back_as_the_same_training(name: str, run: Any) -> None:
    plan, _ = compile_file(POSITIVE / f"{name}.json", must_fit=False)
    assert plan is not None
    text = " \\\n".join(megatron.as_list(megatron.arguments(plan)))
    nodes = plan.spec.cluster.nodes
    Path("a.sh").write_text(f"torchrun --nnodes {nodes} --nproc_per_node 8 a.py \\\n{text}", encoding="utf-8")
    code, _, err = run("import", "a.sh", "-o", "spec.json")
    assert code == 0, err
    assert "lost:" not in err
    again, checked = compile_file("spec.json", must_fit=False)
    assert again is not None, [one.message for one in checked.diagnostics if one.is_error]
    assert again.parameters.numel == plan.parameters.numel
    # Megatron-LM decays no parameter of one dim.
    optimizer = replace(plan.spec.training.optimizer, no_weight_decay="vectors")
    assert again.spec.training == replace(plan.spec.training, optimizer=optimizer)
    orders = [effective_order(one.spec.parallelism) for one in (again, plan)]
    assert orders[0] == orders[1]
    assert replace(again.spec.parallelism, order=plan.spec.parallelism.order) == plan.spec.parallelism


def test_auto_is_asked_for(run: Any) -> None:
    tree = {"train_batch_size": "auto", "bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}}
    Path("ds.json").write_text(json.dumps(tree), encoding="utf-8")
    options = ("--model", "llama-3.2-1b", "--gpus-per-node", "8", "--sequence-length", "8192", "-o", "spec.json")
    code, _, err = run("import", "ds.json", *options)
    assert code == 1
    assert 'missing:\n  training.global_batch_size (train_batch_size is "auto"' in err
    code, _, err = run("import", "ds.json", *options, "--set", "training.global_batch_size=64")
    assert code == 0
    assert check_any("spec.json").valid


def test_a_spec_is_no_file_to_import(run: Any) -> None:
    code, _, err = run("import", str(POSITIVE / "W001-tp-2-of-8.json"))
    assert code == 2
    assert "is a spec already" in err


def test_a_model_file_is_named_from_the_folder_of_the_spec(run: Any) -> None:
    for folder in ("models", "specs"):
        Path(folder).mkdir()
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 256, "n_positions": 1024}
    Path("models/config.json").write_text(json.dumps(config), encoding="utf-8")
    tree = {"train_batch_size": 8, "optimizer": {"type": "AdamW"}}
    Path("ds.json").write_text(json.dumps(tree), encoding="utf-8")
    options = ("--model", "models", "--gpus-per-node", "8", "--sequence-length", "512", "-o", "specs/spec.json")
    assert run("import", "ds.json", *options)[0] == 0
    spec = json.loads(Path("specs/spec.json").read_text(encoding="utf-8"))
    assert spec["model"] == {"hf_config": "../models/config.json"}
    assert check_any("specs/spec.json").valid


def test_unreadable_files_are_usage_errors(run: Any) -> None:
    assert run("import", "nothing.json")[0] == 2
    Path("broken.json").write_text("{", encoding="utf-8")
    assert run("import", "broken.json")[0] == 2


@pytest.mark.parametrize(("model", "nodes"), [("llama-3-8b", 1), ("llama-3-70b", 4), ("meta-llama/Llama-2-7b-hf", 1)])
def test_a_first_spec_compiles(run: Any, model: str, nodes: int) -> None:
    code, _, _ = run("init", "--model", model, "--nodes", str(nodes), "-o", "spec.json")
    assert code == 0
    plan, _ = compile_file("spec.json")
    assert plan is not None
    assert run("init", "--model", model, "-o", "spec.json")[0] == 2


def test_a_model_that_fits_nowhere_is_said(run: Any) -> None:
    code, _, err = run("init", "--model", "llama-3.1-405b")
    assert code == 2
    said = " ".join(err.split())
    assert "no layout of llama-3.1-405b fits on 1 node of 8 h100-sxm: the layout that needs least is " in said
    nodes = int(said.partition("what would fit: ")[2].partition(" nodes")[0])
    assert run("init", "--model", "llama-3.1-405b", "--nodes", str(nodes), "-o", "spec.json")[0] == 0
    assert run("check", "spec.json")[0] == 0


def test_an_unknown_model_is_named_with_the_nearest(run: Any) -> None:
    assert "did you mean llama-3-8b?" in run("init", "--model", "lama-3-8b")[2]
    assert "did you mean llama-3-8b?" in run("init", "lama-3-8b")[2]
    assert run("init", "llama-3-8b") == run("init", "--model", "llama-3-8b")
    assert "give one" in run("init", "llama-3-8b", "--model", "llama-3-8b")[2]


def test_a_neox_file_is_checked_for_its_keys_and_for_deepspeeds(run: Any) -> None:
    wrong = {**NEOX, "train_micro_batch_size_per_gpu": "four", "zero_optimization": {"stage": 7}, "rotary_pct": 0.25}
    for tree, codes in ((NEOX, ["F201"]), (wrong, ["F201", "K003", "K004"])):
        Path("neox.yml").write_text(yaml.safe_dump(tree), encoding="utf-8")
        code, out, _ = run("check", "neox.yml", "--format", "json")
        assert sorted(one["code"] for one in json.loads(out)["diagnostics"]) == codes
        assert code == (0 if codes == ["F201"] else 1)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("ds.json", '{"train_batch_size": 4,\n"gradient_clipping": [1]}', "ds.json:2: gradient_clipping is [1]"),
        (
            "deep.json",
            '{"train_batch_size": 4,\n"optimizer": {"type": "AdamW",\n"params": {"lr": "x"}}}',
            "deep.json:3: optimizer.params.lr is 'x'",
        ),
        (
            "a.yaml",
            "distributed_type: DEEPSPEED\nnum_machines: [1]\nnum_processes: 8\n",
            "a.yaml:2: num_machines is [1]",
        ),
        (
            "run.sh",
            "torchrun pretrain_gpt.py \\\n --num-layers 12 \\\n --hidden-size big \\\n --seq-length 64\n",
            "run.sh:3: --hidden-size 'big'",
        ),
    ],
)
def test_a_value_of_a_wrong_type_is_told_with_its_line(run: Any, name: str, text: str, said: str) -> None:
    Path(name).write_text(text, encoding="utf-8")
    code, out, err = run("import", name)
    assert (code, out) == (2, "")
    assert f"Error: {said}" in err
