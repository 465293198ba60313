"""Six first hours, from an empty folder, with the commands that a user would type.

What each prints at 80 columns is compared with `tests/scenarios/`. After a change that is meant, write the transcripts
anew with `python tests/compiler/test_scenarios.py` and read the difference.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from parcompile.cli import cli

Run = Callable[..., str]


TRANSCRIPTS = Path(__file__).parents[1] / "scenarios"
WRITES = "PARCOMPILE_WRITE_TRANSCRIPTS"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Run]:
    """Runs a line in an empty folder and returns what it prints; `code` is the exit code that is expected."""
    monkeypatch.chdir(tmp_path)
    for name, value in {"COLUMNS": "80", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    transcript = []

    def call(line: str, code: int = 0) -> str:
        done = CliRunner().invoke(cli, line.split())
        assert done.exit_code == code, f"{line}\n{done.output}"
        # How far a search has come is said every ten seconds: on a busy machine only.
        said = re.sub(r"(?m)^predicted [\d,]+ of [\d,]+ settings of the axes\n", "", done.output)
        transcript.append(f"$ parcompile {line}\n{said}exit code {code}\n")
        return " ".join(done.output.split())

    yield call
    file = TRANSCRIPTS / f"{request.node.name.removeprefix('test_')}.txt"
    if WRITES in os.environ:
        file.write_text("\n".join(transcript), encoding="utf-8")
    assert "\n".join(transcript) == file.read_text(encoding="utf-8"), f"run python tests/compiler/{Path(__file__).name}"


def write(name: str, tree: dict[str, Any]) -> None:
    Path(name).write_text(json.dumps(tree, indent=2), encoding="utf-8")


def read(name: str) -> Any:
    return json.loads(Path(name).read_text(encoding="utf-8"))


def test_8b_at_128k_on_16_h100(run: Run) -> None:
    config = {"rope_scaling": {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 8192}}
    write("config.json", {**llama_8b(), "max_position_embeddings": 131072, **config})
    write(
        "spec.json",
        {
            "version": 1,
            "model": {"hf_config": "config.json"},
            "cluster": {"nodes": 2, "gpus_per_node": 8, "accelerator": "h100-sxm"},
            "training": {"sequence_length": 131072, "global_batch_size": 8},
        },
    )
    assert "layouts:" in run("search spec.json --top 3 -o chosen.json")
    # The state of 8B parameters beside the activations of 131,072 tokens does not fit on one GPU.
    sizes = read("chosen.json")["parallelism"]
    assert sizes.get("tp", 1) * sizes.get("cp", 1) * sizes.get("pp", 1) > 1
    said = run("chosen.json -o plan")
    assert "executes this plan" in said
    assert "wrote plan/plan.json" in said
    said = run("estimate plan")
    assert "fits into" in said
    assert "does not fit" not in said
    assert "up to date" in run("chosen.json -o plan --check")


def test_a_mixture_of_experts_on_four_nodes(run: Run) -> None:
    assert "fastest" in run("init --model mixtral-8x7b --nodes 4 -o spec.json")
    run("check spec.json")
    assert read("spec.json")["parallelism"]["ep"] > 1
    said = run("spec.json -o plan --target megatron")
    assert "--expert-model-parallel-size" in Path("plan/megatron_args.sh").read_text(encoding="utf-8")
    assert "X002" in said or "executes this plan" in said


def test_heads_that_tp_does_not_divide(run: Run) -> None:
    write("config.json", {"model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24, **odd_heads()})
    write(
        "spec.json",
        {
            "version": 1,
            "model": {"hf_config": "config.json"},
            "cluster": {"gpus_per_node": 8, "accelerator": "h100-sxm"},
            "parallelism": {"tp": 4},
            "training": {"sequence_length": 2048, "global_batch_size": 64},
        },
    )
    said = run("check spec.json", code=1)
    assert "num_attention_heads 14 on tp 4: 14 / 4 is not whole" in said
    run("check spec.json --unsafe-fixes")
    assert read("spec.json")["parallelism"]["tp"] in (1, 2, 7)
    run("spec.json -o plan")


def test_four_cards_of_24_gib(run: Run) -> None:
    write("card.json", CARD)
    eight = run("init --model llama-3-8b --gpus-per-node 4 --accelerator card.json -o eight.json")
    assert "the optimizer on" in eight
    assert "weights on the host" in run("init --model llama-3-70b --gpus-per-node 4 --accelerator card.json -o 70.json")
    cluster = {"gpus_per_node": 4, "accelerator": "card.json", "host_memory_gib": 512}
    training = {"sequence_length": 8192, "global_batch_size": 512}
    write("512.json", {"version": 1, "model": {"preset": "llama-3-70b"}, "cluster": cluster, "training": training})
    said = run("search 512.json", code=1)
    assert "what would fit" in said
    assert "nodes 32" in said
    run("init --model llama-3.2-1b --gpus-per-node 4 --accelerator card.json -o spec.json")
    assert "of 21.73 GiB" in run("init --model llama-3.2-1b --gpus-per-node 4 --accelerator card.json")
    assert "wrote plan/plan.json" in run("spec.json -o plan")
    assert "with probability" in run("estimate plan")


def test_a_zero_3_offload_file_is_imported_and_every_loss_is_named(run: Run) -> None:
    offload = {"device": "cpu", "pin_memory": True}
    write(
        "ds_config.json",
        {
            "train_batch_size": 64,
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 3, "offload_optimizer": offload, "offload_param": {"device": "cpu"}},
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
        },
    )
    run("check ds_config.json")
    said = run("import ds_config.json --model llama-3-8b --gpus-per-node 8 --sequence-length 4096 -v -o spec.json")
    assert "9 carried, 0 without effect, 0 lost" in said
    run("check spec.json")
    zero = json.loads(Path("spec.json").read_text(encoding="utf-8"))["zero"]
    on_host = {**offload, "implementation": "deepspeed"}
    assert zero == {"stage": 3, "offload_optimizer": on_host, "offload_param": {"device": "cpu"}}


def test_a_laptop_without_a_gpu(run: Run) -> None:
    # tests/runtime/test_project_runs.py trains it.
    assert "next: cd project && ./run.sh --steps 20" in run("new project")
    run("check project/spec.json")
    assert "executes this plan" in run("project/spec.json -o plan")
    assert "rank 1: tp 1" in run("groups plan --rank 1 --table")
    assert "with probability" not in run("estimate plan"), "a CPU's memory is not known"


def llama_8b() -> dict[str, Any]:
    from parcompile.model.presets import presets

    return dict(presets()["llama-3-8b"].config)


def odd_heads() -> dict[str, int]:
    sizes = {"num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864}
    return {**sizes, "vocab_size": 151936, "max_position_embeddings": 4096}


CARD = {"memory_gib": 24}
"""A card that has no preset."""


if __name__ == "__main__":
    os.environ[WRITES] = "1"
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", __file__]))
