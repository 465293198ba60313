"""`examples/documents.py` on one node and on two, each with a launcher; and what a killed rank does to a run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from closeness import assert_close
from launched import run_forked
from ranks import free_port

from parcompile.backends.registry import render
from parcompile.backends.writing import write
from parcompile.pipeline import compile_file
from parcompile.plan import Plan

pytestmark = pytest.mark.ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
LAUNCHER = Path(sys.executable).with_name("deepspeed")


def compiled(spec: str | Path, folder: Path) -> Plan:
    plan, _ = compile_file(EXAMPLES / spec)
    assert plan is not None
    write(render(plan), folder)
    return plan


def start(arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    """In a session of its own, so that no rank outlives the test."""
    environment = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{LAUNCHER.parent}:{os.environ['PATH']}",
    }
    with log.open("wb") as stream:
        return subprocess.Popen(
            [str(LAUNCHER), *arguments], env=environment, stdout=stream, stderr=stream, start_new_session=True
        )


def end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def on_nodes(plan: Plan, folder: Path, *arguments: str, forked: bool) -> list[float]:
    """The held-out losses that `examples/documents.py` prints; launchers share nothing but the first one's address."""
    script = [str(EXAMPLES / "documents.py"), "--plan", str(folder / "plan"), "--output", str(folder), *arguments]
    if forked:
        return held_out(*run_forked(folder, plan.world_size, Path(script[0]), *script[1:]))
    hosts, count = folder / "hosts", plan.spec.cluster.nodes
    hosts.write_text("localhost slots=1\n127.0.0.1 slots=1\n")
    port, logs = str(free_port()), [folder / f"node-{rank}.log" for rank in range(count)]
    nodes = []
    for rank, log in enumerate(logs):
        where = ["-H", str(hosts), "--no_ssh", "--node_rank", str(rank), "--master_addr", "127.0.0.1"]
        nodes.append(start([*where, "--master_port", port, *script], log))
    try:
        codes = [node.wait(timeout=600) for node in nodes]
    finally:
        end(nodes)
    return held_out(codes, "".join(log.read_text() for log in logs))


def held_out(codes: list[int], output: str) -> list[float]:
    """The losses in what a run says that ended well."""
    assert not any(codes), output
    return [float(line.split()[4]) for line in output.splitlines() if line.startswith("step ")]


LONGER = ("--differs", "max_position_embeddings", "rope_parameters")
"""What the second spec changes of the first one's model."""


def test_pre_training_then_longer_sequences_on_two_nodes_then_lora(tmp_path: Path) -> None:
    """Each from its spec to an exported model, with which the next one starts."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    def exported(name: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(tmp_path / name / "exported", dtype=torch.float32).eval()

    sample = torch.tensor([list(b"def __init__(self, name):\n        self.name = name\n")])
    known, losses = 0.0, {}
    for name, spec, model, options in (
        ("first", "byte_llama.json", "", ["--steps", "12"]),
        ("longer", "byte_finetune.json", "first", ["--steps", "8", *LONGER]),
        ("adapted", "byte_finetune.json", "longer", ["--steps", "4", "--lora", "4"]),
    ):
        plan = compiled(spec, tmp_path / name / "plan")
        start_from = ["--model", str(tmp_path / model / "exported")] if model else []
        losses[name] = on_nodes(plan, tmp_path / name, *start_from, *options, forked=name != "longer")
        before, known = known, float(exported(name)(input_ids=sample, labels=sample).loss.detach())
        assert losses[name][-1] < losses[name][0]
        assert not model or known < before
    assert losses["first"][-1] < losses["first"][0] - 1
    assert losses["longer"][0] == pytest.approx(losses["first"][-1], abs=0.5)
    adapted = PeftModel.from_pretrained(exported("longer"), str(tmp_path / "adapted" / "adapter")).eval()
    assert_close(adapted(sample).logits, exported("adapted")(sample).logits)


def ranks_of(process: subprocess.Popen[bytes]) -> list[int]:
    """The ranks that a launcher started: processes of its session that run the example."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == process.pid:
            continue
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes()
            if os.getsid(int(entry.name)) == process.pid and b"--local_rank=" in command and b"launch" not in command:
                found.append(int(entry.name))
    return found


def test_a_killed_rank_ends_the_run_and_leaves_no_process(tmp_path: Path) -> None:
    spec = json.loads((EXAMPLES / "byte_llama.json").read_text(encoding="utf-8"))
    spec["cluster"]["gpus_per_node"], spec["parallelism"] = 2, {"tp": 2}
    (tmp_path / "spec.json").write_text(json.dumps(spec), encoding="utf-8")
    compiled(tmp_path / "spec.json", tmp_path)
    log = tmp_path / "log"
    arguments = ["--num_gpus", "2", "--master_port", str(free_port()), str(EXAMPLES / "train.py")]
    run = start([*arguments, "--plan", str(tmp_path), "--steps", "100000", "--checkpoint-every", "2"], log)
    try:
        deadline = time.monotonic() + 600
        while not (tmp_path / "checkpoints" / "latest").exists():
            assert run.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        ranks = ranks_of(run)
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGKILL)
        assert run.wait(timeout=600) != 0
        assert ranks_of(run) == []
    finally:
        end([run])
    (line,) = (one for one in log.read_text().splitlines() if "parcompile:" in one)
    assert f"(process {ranks[1]}) ended without a message" in line
    assert line.endswith(f"parcompile doctor {tmp_path / 'records'}")

    from parcompile.runtime.checkpoint import verify

    assert verify(tmp_path / "checkpoints") == []
