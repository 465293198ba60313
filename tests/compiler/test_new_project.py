"""`parcompile init` and `parcompile new`: first specs that compile, and projects whose files fit together."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import parcompile
from parcompile.cli import cli
from parcompile.model.presets import preset_alike
from parcompile.searching.first import TOKENS, batch_of, first_spec
from parcompile.searching.ranking import search
from parcompile.searching.space import open_space
from parcompile.spec.resolve import Resolution

CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151936,
    "max_position_embeddings": 4096,
}
Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    return lambda *arguments, **options: CliRunner().invoke(cli, arguments, **options)


@pytest.mark.parametrize("named", ["models/config.json", "models"])
def test_init_takes_a_configuration_by_its_file_or_folder(run: Run, named: str) -> None:
    Path("models").mkdir()
    Path("models/config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    Path("specs").mkdir()
    done = run("init", "--hf-config", named, "-o", "specs/spec.json")
    assert run("init", "--model", named).stdout == run("init", named).stdout == run("init", "--hf-config", named).stdout
    assert done.exit_code == 0, done.output
    assert "fastest" in done.output
    assert "tokens/s/GPU" in " ".join(done.output.split())
    spec = json.loads(Path("specs/spec.json").read_text(encoding="utf-8"))
    assert spec["model"] == {"hf_config": "../models/config.json"}
    assert spec["training"]["sequence_length"] == 4096
    assert parcompile.compile("specs/spec.json").world_size == 8


def test_init_offers_layouts_with_a_line_of_reasons_each(run: Run) -> None:
    done = run("init", "--model", "llama-3-70b", "--nodes", "4", "-o", "spec.json")
    assert max(map(len, done.output.splitlines())) <= 80
    words = [line.split()[0] for line in done.output.splitlines() if line[:1].isalpha()]
    assert words[0] == "fastest"
    assert len(words) == len(set(words)) >= 3  # the last one says what was written
    tree = json.loads(Path("spec.json").read_text(encoding="utf-8"))
    assert f"tp {tree['parallelism']['tp']}" in done.output
    estimate = parcompile.compile("spec.json").estimate()
    assert f"{estimate.memory.peak.total_bytes / 2**30:.2f} GiB" in done.output


LONG = ("llama-3.1-8b", {"nodes": 4, "gpus_per_node": 8, "accelerator": "h100-sxm"}, 2**20)
EXPERTS = ("mixtral-8x7b", {"nodes": 4, "gpus_per_node": 8, "accelerator": "h100-sxm"}, 8192)
SMALL = ("qwen3-8b", {"nodes": 1, "gpus_per_node": 4, "accelerator": "a100-80gb"}, 4096)
UNEVEN = ("llama-3-70b", {"nodes": 3, "gpus_per_node": 8, "accelerator": "h200"}, 32768)


@pytest.mark.parametrize(("model", "cluster", "length"), [LONG, EXPERTS, SMALL, UNEVEN])
def test_init_is_as_fast_as_a_search_over_every_layout(
    model: str, cluster: dict[str, Any], length: int, tmp_path: Path
) -> None:
    found = first_spec("run", {"preset": model}, cluster, length, tmp_path)
    assert found.spec is not None, found.reason
    tree = {**found.spec, "parallelism": {}}
    for key in ("micro_batch_size", "activation_checkpointing"):
        tree["training"] = {name: value for name, value in tree["training"].items() if name != key}
    best = search(open_space(Resolution(tree, (), tmp_path), executable=True)).best
    assert best is not None
    seconds = parcompile.compile(found.spec).estimate().time.step.seconds
    assert seconds <= 1.1 * best.seconds


@pytest.mark.parametrize(("world", "length"), [(8, 8192), (512, 8192), (24, 4096), (32, 2**20), (7, 2**22), (1, 128)])
def test_the_batch_is_shared_by_every_number_of_copies(world: int, length: int) -> None:
    batch = batch_of(world, length)
    assert batch >= 1
    odd = world
    while odd % 2 == 0:
        odd //= 2
    assert batch % odd == 0
    assert batch == odd or batch * length <= 2 * TOKENS


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("google/gemma-3-4b-it", "gemma-3-4b"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
        ("mistralai/Mistral-7B-Instruct-v0.2", None),  # no windows, and another base of its rotary embedding
        ("Qwen/Qwen3-4B-Instruct-2507", None),  # another base of its rotary embedding
    ],
)
def test_names_of_the_hub_are_presets_where_their_shape_is(name: str, preset: str | None) -> None:
    found = preset_alike(name)
    assert (found and found.name) == preset


def test_a_plan_in_one_line(run: Run) -> None:
    done = run("plan", "meta-llama/Llama-3.1-8B-Instruct", "2x8xH100", "128k", "--finetune", "-o", "long")
    assert done.exit_code == 0, done.output
    said = " ".join(done.output.split())
    assert "is read as the preset llama-3.1-8b" in said
    assert "fine-tuning: lr 1e-05, cosine to 1e-06 over 1000 steps with 30 of warm-up, 4 sequences" in said
    tree = json.loads(Path("long.json").read_text(encoding="utf-8"))
    assert tree["training"]["sequence_length"] == 131072
    assert tree["cluster"] == {"nodes": 2, "gpus_per_node": 8, "accelerator": "h100-sxm"}
    assert parcompile.check("long.json").valid
    assert Path("long/plan.json").exists()
    assert "exists already" in run("plan", "llama-3.1-8b", "8xH100", "-o", "long").output


def test_a_folder_called_plan_is_compiled_and_a_cluster_makes_it_the_command(run: Run) -> None:
    assert run("plan", "gpt2", "1x8xH100").exit_code == 0
    Path("gpt2").rename("plan")
    assert "nothing written: add -o DIR" in run("plan").output
    assert run("plan", "--target", "megatron", "-o", "other").exit_code == 0
    assert run("plan", "gpt2", "1x8xH100").exit_code != 0  # gpt2.json is there
    assert "MODEL CLUSTER" in run("plan", "--help").output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("8H100", "128k"), "is no cluster: write nodes x GPUs of a node x accelerator, as 2x8xH100"),
        (("8xH1000", "128k"), "there is no accelerator 'H1000'; there are: a100-40gb"),
        (("8xa100-", "128k"), "there are: a100-40gb, a100-80gb, a100-pcie-40gb, a100-pcie-80gb"),
        (("8xH100", "long"), "is no number of tokens: write 4096, 128k or 1M"),
        (("0x8xH100", "1k"), "is an empty cluster"),
    ],
)
def test_what_plan_cannot_read_is_said(run: Run, arguments: tuple[str, ...], message: str) -> None:
    done = run("plan", "llama-3.1-8b", *arguments)
    assert done.exit_code
    assert message in " ".join(done.output.split())


def test_accelerators_and_tokens_are_given_as_people_write_them(run: Run) -> None:
    Path("ds.json").write_text('{"train_batch_size": 64, "zero_optimization": {"stage": 1}}', encoding="utf-8")
    commands = [
        ("init", "llama-3.1-8b", "-o", "first.json"),
        ("new", "project", "--model", "llama-3.1-8b"),
        ("import", "ds.json", "-o", "imported.json", "--gpus-per-node", "8", "--model", "llama-3.1-8b"),
    ]
    for command in commands:
        wrong = run(*command, "--accelerator", "H10")
        assert wrong.exit_code
        assert "there is no accelerator 'H10'; there are: h100-sxm, h100-pcie, h100-nvl" in wrong.output
        assert not any(map(Path.exists, map(Path, ("first.json", "project", "imported.json"))))
    for command in commands:
        wrong = run(*command, "--sequence-length", "1G")
        assert wrong.exit_code
        assert "'1G' is no number of tokens: write 4096, 128k or 1M" in wrong.output
    for command, file in zip(commands, ("first.json", "project/spec.json", "imported.json"), strict=True):
        run(*command, "--accelerator", "H100", "--sequence-length", "2k")
        tree = json.loads(Path(file).read_text(encoding="utf-8"))
        assert (tree["cluster"]["accelerator"], tree["training"]["sequence_length"]) == ("h100-sxm", 2048)


def test_more_gpus_than_a_node_usually_has_are_remarked_on(run: Run) -> None:
    said = " ".join(run("plan", "llama-3.1-8b", "16xH100", "8k").output.split())
    assert "16xH100 is one node of 16 GPUs; for nodes of 8 write 2x8xh100-sxm" in said
    assert "is one node" not in run("plan", "llama-3.1-8b", "8xH100", "8k", "-o", "eight").output


def test_init_asks_for_a_model_only_in_a_terminal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "name the model, as in parcompile init llama-3-8b" in run("init").output
    terminal = {"stdin": type("", (), {"isatty": lambda: True}), "stderr": sys.stderr}
    monkeypatch.setattr("parcompile.cli.init.sys", type("Terminal", (), terminal))
    answers = "llama-3.2-1b\n2\n4\nh200\n\n"
    done = run("init", "-o", "spec.json", input=answers)
    assert done.exit_code == 0, done.output
    spec = json.loads(Path("spec.json").read_text(encoding="utf-8"))
    assert spec["cluster"] == {"nodes": 2, "gpus_per_node": 4, "accelerator": "h200"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "lama-3-8b"), "did you mean llama-3-8b?"),
        (("--model", "someone/their-model"), "download its config.json and name that file"),
        (("--model", "llama-3-8b", "--hf-config", "x.json"), "give one of --model and --hf-config"),
        (("--hf-config", "x.json"), "x.json cannot be read"),
        (("--model", "llama-3.1-405b"), "no layout of llama-3.1-405b fits"),
    ],
)
def test_what_init_cannot_use_is_said(run: Run, arguments: tuple[str, ...], message: str) -> None:
    done = run("init", *arguments)
    assert done.exit_code != 0
    assert message in " ".join(done.output.split())


@pytest.mark.parametrize("options", [(), ("--model", "llama-3-8b"), ("--hf-config", "config.json", "--nodes", "2")])
def test_a_new_project_checks_and_compiles(run: Run, options: tuple[str, ...]) -> None:
    Path("config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    done = run("new", "project", *options)
    assert done.exit_code == 0, done.output
    Path("config.json").unlink()
    project = Path("project")
    assert parcompile.check(project / "spec.json").valid
    assert parcompile.compile(project / "spec.json", project / "plan").world_size >= 2
    texts = {file.name: file.read_text(encoding="utf-8") for file in project.rglob("*") if file.is_file()}
    assert "@NAME@" not in "".join(texts.values())
    assert "# project" in texts["README.md"]
    compile(texts["train.py"], "train.py", "exec")
    for name in ("run.sh", "submit.sh"):
        assert os.access(project / name, os.X_OK)
        assert (project / name).stat().st_mode & stat.S_IXUSR
    for file in ("plan/launch/deepspeed.sh", "plan/launch/slurm.sbatch"):
        assert file in texts["run.sh"] + texts["submit.sh"]
        assert (project / file).is_file()


def test_weights_are_the_model_of_a_new_project_and_bring_their_tokenizer(run: Run) -> None:
    Path("weights").mkdir()
    Path("weights/config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    Path("weights/tokenizer.json").write_text("{}", encoding="utf-8")
    Path("chats.jsonl").write_text("", encoding="utf-8")
    options = ("--weights", "weights", "--data", "chats.jsonl", "--finetune", "--lr", "2e-5", "--batch", "16")
    done = run("new", "project", *options)
    assert done.exit_code == 0, done.output
    lines = Path("project/train.args").read_text(encoding="utf-8").splitlines()
    named = {"data": "chats.jsonl", "weights": "weights", "tokenizer": "weights"}
    assert lines == [f"--{key}={Path(value).resolve()}" for key, value in named.items()]
    training = json.loads(Path("project/spec.json").read_text(encoding="utf-8"))["training"]
    assert (training["global_batch_size"], training["optimizer"]["lr"]) == (16, 2e-5)
    assert training["lr_scheduler"]["min_lr"] == pytest.approx(2e-6)
    assert not Path("project/data").exists()
    assert "go with a model" in run("new", "other", "--finetune").output


CHAT = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'


@pytest.mark.parametrize(
    ("row", "refused"),
    [
        ('{"prompt": "a", "completion": "b"}', True),
        ('\n{"instruction": "a", "output": "b", "text": "c"}', True),
        (CHAT, True),
        ('{"text": "a"}', False),
        ('{"prompt": "a", "completion": "b", "input_ids": [1, 2]}', False),
        ('{"prompt": "a"}', False),
        ("", False),
    ],
)
def test_answers_without_a_tokenizer_are_refused_before_anything_is_written(run: Run, row: str, refused: bool) -> None:
    """Training fails on them: it has no chat template."""
    Path("data").mkdir()
    Path("data/rows.jsonl").write_text(row, encoding="utf-8")
    for data in ("data", "data/rows.jsonl"):
        done = run("new", "project", "--data", data)
        assert done.exit_code == (2 if refused else 0), done.output
        if refused:
            assert f"data/rows.jsonl:{1 + row.count(chr(10))} holds prompts and answers" in done.output
            assert "--tokenizer" in done.output
        assert Path("project").exists() is not refused
        shutil.rmtree("project", ignore_errors=True)
    Path("words").mkdir()
    assert run("new", "project", "--data", "data", "--tokenizer", "words").exit_code == 0


def test_data_are_looked_into_as_training_reads_them(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for name, row in {"chat": json.loads(CHAT), "text": {"text": "a"}}.items():
        Path(f"{name}.json").write_text(json.dumps([row, row], indent=1), encoding="utf-8")
        Path(name).mkdir()
        parquet.write_table(pyarrow.Table.from_pylist([row]), f"{name}/rows.parquet")
    for data in ("chat.json", "chat"):
        done = run("new", "project", "--data", data)
        where = "chat.json row 0" if data.endswith("json") else f"{Path('chat/rows.parquet')} row 0"
        assert (done.exit_code, f"{where} holds prompts and answers" in done.output) == (2, True), done.output
    for data, said in {
        "broken.jsonl": "broken.jsonl:1 is not JSON",
        "broken.json": "the file is one list of objects",
        "broken.parquet": "broken.parquet is no parquet file",
        "table.csv": "table.csv: training data ends in .txt, .jsonl, .parquet, .idx, .json or .bin",
    }.items():
        Path(data).write_text("[1", encoding="utf-8")
        done = run("new", "project", "--data", data)
        assert (done.exit_code, said in done.output) == (1, True), done.output
    assert not Path("project").exists()
    for data in ("text.json", "text"):
        assert run("new", "project", "--data", data).exit_code == 0
        shutil.rmtree("project")
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # training may run on another machine
    done = run("new", "project", "--data", "text")
    assert done.exit_code == 0
    assert "text is not looked into: reading text/rows.parquet needs pyarrow: pip install pyarrow" in done.output


@pytest.mark.parametrize("command", [("init", "llama-3-8b"), ("plan", "llama-3-8b", "1x8xH100")])
def test_an_output_that_cannot_be_written_is_said_before_the_search(
    run: Run, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setattr("parcompile.cli.init.offered", None)
    there = Path("there")
    there.touch() if command[0] == "init" else there.mkdir()
    Path("dangling").symlink_to("nothing")
    for output, said in (
        ("there", "there exists already: name another with -o"),
        ("dangling", "dangling exists already"),
        ("no/folder", "no/folder cannot be written: there is no folder no; create it first"),
    ):
        done = run(*command, "-o", output)
        assert (done.exit_code, done.output) == (1, done.output)
        assert said in " ".join(done.output.split())


def test_a_spec_in_a_folder_that_is_a_link_names_its_model_from_where_it_lies(run: Run) -> None:
    Path("config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    Path("deep/er").mkdir(parents=True)
    Path("link").symlink_to("deep/er")
    assert run("init", "config.json", "-o", "link/spec.json").exit_code == 0
    assert parcompile.compile("link/spec.json").world_size == parcompile.compile("deep/er/spec.json").world_size == 8


def test_the_readme_of_a_new_project_names_every_flag(run: Run) -> None:
    assert run("new", "project").exit_code == 0
    flags = set(re.findall(r'add_argument\("(--[\w-]+)"', Path("project/train.py").read_text(encoding="utf-8")))
    named = set(re.findall(r"`(--[\w-]+)", Path("project/README.md").read_text(encoding="utf-8")))
    assert flags - {"--plan", "--local_rank"} <= named  # the launcher gives the second


def test_the_workflow_of_a_new_project_runs_commands_that_pass(run: Run) -> None:
    import yaml

    assert run("new", "project").exit_code == 0
    tree = yaml.safe_load(Path("project/.github/workflows/check.yml").read_text(encoding="utf-8"))
    commands = [step["run"] for step in tree["jobs"]["check"]["steps"] if step.get("run", "").startswith("parcompile ")]
    assert len(commands) == 2
    os.chdir("project")
    for line in commands:
        assert run(*line.split()[1:]).exit_code == 0, line


def test_a_folder_that_holds_something_is_left_alone(run: Run) -> None:
    Path("project").mkdir()
    Path("project/mine.txt").write_text("mine", encoding="utf-8")
    done = run("new", "project")
    assert done.exit_code == 1
    assert "is not an empty folder" in done.output
    assert [file.name for file in Path("project").iterdir()] == ["mine.txt"]


@pytest.mark.skipif(sys.platform == "win32", reason="permissions of POSIX")
def test_nothing_is_left_of_a_project_that_cannot_be_written(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, *_: object, **__: object) -> int:
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_text", full)
    done = run("new", "project")
    assert done.exit_code == 1
    assert "No space left on device" in done.output
    assert not Path("project").exists()


def test_a_spec_that_a_full_disk_cuts_off_is_not_left(tmp_path: Path) -> None:
    script = (
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "from parcompile.cli import main\n"
        "main()\n"
    )
    command = [sys.executable, "-c", script, "init", "gpt2", "-o", "spec.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 2
    assert done.stderr.endswith("Error: spec.json cannot be written: File too large\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("rate", "said"),
    [
        ("nan", "nan is not a finite number above 0"),
        ("1e99", "training.optimizer.lr: 1e+99 is too large: write at most 1000"),
    ],
)
def test_a_rate_that_is_none_is_refused(run: Run, rate: str, said: str) -> None:
    done = run("new", "project", "--model", "gpt2", "--lr", rate)
    assert (done.exit_code, said in done.output) == (2, True)
    assert not Path("project").exists()
