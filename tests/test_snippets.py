"""Every Python program in README and docs runs as it stands, imports included."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = {page.stem: page for page in (*(ROOT / "docs").glob("*.md"), ROOT / "README.md")}
COMPILER = ("api", "plugins", "report")
"""Pages whose programs need no torch."""
ELSEWHERE = {
    "training": "test_readme.py",
    "finetune": "test_project_runs.py",
    "quickstart": "test_docs.py",
    "migration": "test_docs.py",
}
RUNTIME = (
    *("adapter", "batches", "data", "generating", "lora", "trainer"),
    *("preflight", "recipes", "ring_attention", "tensor_parallel"),
)

SPEC = {
    "version": 1,
    "model": {"hf_config": "model/config.json"},
    "cluster": {"gpus_per_node": 1, "accelerator": "cpu"},
    "training": {"sequence_length": 32, "global_batch_size": 2, "micro_batch_size": 1, "precision": "fp32"},
}
DRIVER = """
import os, runpy, subprocess, sys

import deepspeed, peft, tokenizers, torch, transformers  # once for all: a child starts with them
import torch.utils.checkpoint
import parcompile.runtime
import parcompile.runtime.trainer

torch.set_num_threads(1)
if not os.path.exists("model"):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=256, max_position_embeddings=128,
    )
    transformers.LlamaForCausalLM(config).save_pretrained("model")
    vocabulary = {chr(number): number for number in range(256)}
    tokens = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokens)
    tokenizer.chat_template = (
        "{% for one in messages %}{{ one.role[0] }}: {{ one.content }};{% endfor %}"
        "{% if add_generation_prompt %}a: {% endif %}"
    )
    tokenizer.save_pretrained("model")
    import parcompile
    parcompile.compile("spec.json", "plan")
finder, *files = sys.argv[1:]
for file in files:
    child = os.fork()
    if not child:
        code = 1
        try:
            # A port that is free now; those behind one that was need not be.
            os.environ["MASTER_PORT"] = subprocess.check_output([sys.executable, finder], text=True).strip()
            runpy.run_path(file, run_name="__main__")
            code = 0
        except BaseException as error:
            import traceback
            traceback.print_exc()
        finally:
            sys.stdout.flush(); sys.stderr.flush()
            os._exit(code)
    print(file, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def programs(name: str) -> list[tuple[str, str | None]]:
    """The programs of a page, each with what the page says it prints (None where it says nothing)."""
    text = PAGES[name].read_text(encoding="utf-8")
    found = re.findall(r"```python(?: title=\"[^\"]+\")?\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", text, re.DOTALL)
    return [(program, output or None) for program, output in found]


def test_every_page_with_a_program_is_run() -> None:
    assert {name for name in PAGES if programs(name)} == {*COMPILER, *RUNTIME, *ELSEWHERE}


@pytest.mark.parametrize("name", COMPILER)
def test_a_program_runs_and_prints_what_is_shown(name: str, tmp_path: Path) -> None:
    spec = {"version": 1, "model": {"preset": "llama-3.2-1b"}, "cluster": {"gpus_per_node": 8}}
    spec |= {"parallelism": {"tp": 2, "cp": 4}, "training": {"sequence_length": 8192, "global_batch_size": 8}}
    (tmp_path / "spec.json").write_text(json.dumps(spec), encoding="utf-8")
    subprocess.run([sys.executable, "-m", "parcompile", "spec.json", "-o", "plan", "-q"], cwd=tmp_path, check=True)
    for program, output in programs(name):
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, encoding="utf-8", check=False
        )
        assert done.returncode == 0, done.stderr
        assert output is None or done.stdout == output


@pytest.mark.ranks
def test_the_programs_of_the_runtime_run_in_one_process_each(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="the programs need the extra [runtime]")
    pytest.importorskip("peft", reason="one program needs peft")
    (tmp_path / "spec.json").write_text(json.dumps(SPEC), encoding="utf-8")
    files = []
    for name in RUNTIME:
        for number, (program, _) in enumerate(programs(name)):
            files.append(f"{name}_{number}.py")
            (tmp_path / files[-1]).write_text(program, encoding="utf-8")
    environment = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    environment |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(ROOT / "examples" / "free_port.py"), *files],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    ended = re.findall(r"^(\w+_\d+\.py) (-?\d+)$", done.stdout, re.MULTILINE)
    assert ended == [(file, "0") for file in files], done.stdout[-4000:] + done.stderr[-6000:]
