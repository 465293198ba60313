"""What a user sees at a terminal of 80 columns, as golden files.

After a change that is meant, write the files anew with `python tests/compiler/test_screens.py` and read the difference.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from parcompile.cli import _COMMANDS

pytestmark = pytest.mark.xdist_group("test_screens")  # all are made at once, in half a minute

SCREENS = Path(__file__).parents[1] / "screens"
SPEC = (SCREENS / "spec.json").read_text(encoding="utf-8")
WRONG = SPEC.replace('"tp": 2', '"tp": 5').replace('"global_batch_size": 64', '"global_batch_sise": 64')

COMMANDS = {
    "check": "check spec.json",
    "check_verbose": "check -v spec.json",
    "check_wrong": "check wrong.json",
    "compile": "spec.json -o plan",
    "compile_check": "spec.json -o plan --check",
    "compile_plan": "plan -o other --target megatron",
    "diff": "diff spec.json other.json",
    "estimate": "estimate spec.json",
    "explain": "explain B001",
    "groups": "groups plan --rank 5 --table",
    "search": "search open.json --top 4",
    "init": "init llama-3-8b --nodes 2 --sequence-length 131072",
    "init_million": "init llama-3.1-8b --nodes 4 --sequence-length 1048576 --yes",
    "init_experts": "init deepseek-v3 --nodes 64 --yes",
    "plan": "plan meta-llama/Llama-3.1-8B-Instruct 2x8xH100 32k --finetune",
    "new": "new tune --model llama-3.1-8b --nodes 2 --finetune",
    "check_large": "check large.json",
    "check_section": "check misspelt.json",
    "check_target": "check -t transformers spec.json",
    "compile_target": "compile -q -t transformers spec.json -o none",
    "check_trainer": "check hf.yaml",
    "import_trainer": "import hf.yaml --gpus-per-node 8 -o hf.json",
    "import_trainer_check": "check -t accelerate-deepspeed hf.json",
    "import_axolotl": "import axo.yml --gpus-per-node 8 --precision bf16 -o axo.json",
    "import_accelerate": "import accelerate.yaml -o accelerate.json",
    "import_fsdp": "import fsdp.yaml -o fsdp.json",
    "import_megatron": "import mixtral.sh --vocab-size 32000 -o mixtral.json --strict",
    "import_megatron_back": "compile mixtral.json --target megatron --no-estimate -o mixtral",
    "import_megatron_again": "import mixtral/megatron_args.sh --nodes 4 --gpus-per-node 8 -o m.json",
    "diff_megatron": "diff mixtral.json m.json",
    "misspelt": "chekc spec.json",
    "missing": "check nothing.json",
}
"""Screens by name, in the order in which they are made: what one writes, the next ones read."""


def made(folder: Path) -> dict[str, str]:
    """Every screen, made in a folder."""
    (folder / "spec.json").write_text(SPEC, encoding="utf-8")
    (folder / "wrong.json").write_text(WRONG, encoding="utf-8")
    (folder / "other.json").write_text(SPEC.replace('"tp": 2', '"tp": 4'), encoding="utf-8")
    for file in (SCREENS / "files").iterdir():
        shutil.copy(file, folder)
    lines = {**COMMANDS, "help": "--help"}
    return {name: screen(line, folder) for name, line in lines.items()}


def screen(line: str, folder: Path) -> str:
    """A command and all that it prints."""
    environment = {**os.environ, "COLUMNS": "80", "PYTHONIOENCODING": "utf-8", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "parcompile", *shlex.split(line)]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, encoding="utf-8", check=False
    )
    # How far a search has come is said every ten seconds: on a busy machine only.
    said = re.sub(r"(?m)^predicted [\d,]+ of [\d,]+ settings of the axes\n", "", done.stderr)
    return f"$ parcompile {line}\n{done.stdout}{said}exit code {done.returncode}\n"


@pytest.fixture(scope="module")
def screens(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return made(tmp_path_factory.mktemp("screens"))


@pytest.mark.parametrize("name", [*COMMANDS, "help"])
def test_a_screen_is_as_it_was_read(name: str, screens: dict[str, str]) -> None:
    expected = (SCREENS / f"{name}.txt").read_text(encoding="utf-8")
    assert screens[name] == expected, f"run python tests/compiler/{Path(__file__).name} and read the difference"


@pytest.mark.parametrize("name", [*COMMANDS, "help"])
def test_a_screen_fits_80_columns(name: str, screens: dict[str, str]) -> None:
    assert [line for line in screens[name].splitlines()[1:] if len(line) > 80] == []


@pytest.mark.parametrize("name", _COMMANDS)
def test_the_help_of_a_command_begins_with_a_sentence_that_fits_the_list_of_commands(name: str) -> None:
    from click.testing import CliRunner

    from parcompile.cli import cli

    runner = CliRunner(env={"COLUMNS": "80"})
    listed = runner.invoke(cli, ["--help"]).output
    (line,) = [one for one in listed.splitlines() if one.startswith(f"  {name} ")]
    assert line.endswith(".")
    assert not line.endswith("...")
    shown = runner.invoke(cli, [name, "--help"]).output
    assert line.split(maxsplit=1)[1] in shown
    assert [one for one in shown.splitlines() if len(one) > 80] == []


def test_a_shell_can_complete_commands(tmp_path: Path) -> None:
    words = {"COMP_WORDS": "parcompile est", "COMP_CWORD": "1"}
    environment = {**os.environ, "_PARCOMPILE_COMPLETE": "bash_complete", **words}
    command = [sys.executable, "-c", "from parcompile.cli import main; main()"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["plain,estimate"]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        for name, text in made(Path(place)).items():
            (SCREENS / f"{name}.txt").write_text(text, encoding="utf-8")
            sys.stdout.write(text + "\n")
