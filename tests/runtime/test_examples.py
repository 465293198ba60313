"""`examples/finetune.py` on two nodes, each with a launcher of its own; and what a killed rank does to a run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from ranks import free_port

from parcompile.pipeline import compile_file
from parcompile.plan import Plan
from parcompile.runtime import build_model
from parcompile.targets.files import artefacts, to_text, write

pytestmark = pytest.mark.ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
LAUNCHER = Path(sys.executable).with_name("deepspeed")


def compiled(spec: str, folder: Path) -> Plan:
    plan, _ = compile_file(EXAMPLES / spec)
    assert plan is not None
    write({name: to_text(tree) for name, tree in artefacts(plan).items()}, folder)
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


def on_two_nodes(folder: Path, *arguments: str) -> str:
    """The output of both launchers, which share nothing but the address of the first node."""
    hosts = folder / "hosts"
    hosts.write_text("localhost slots=1\n127.0.0.1 slots=1\n")
    port, logs = str(free_port()), [folder / "node-0.log", folder / "node-1.log"]
    nodes = [
        start(
            [
                "-H",
                str(hosts),
                "--no_ssh",
                "--node_rank",
                str(rank),
                "--master_addr",
                "127.0.0.1",
                "--master_port",
                port,
                str(EXAMPLES / "finetune.py"),
                *arguments,
            ],
            logs[rank],
        )
        for rank in range(2)
    ]
    try:
        codes = [node.wait(timeout=200) for node in nodes]
    finally:
        end(nodes)
    output = "".join(log.read_text() for log in logs)
    assert codes == [0, 0], output
    return output


def test_a_model_is_fine_tuned_on_two_nodes_and_exported(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    plan = compiled("byte_finetune.json", tmp_path / "plan")
    build_model(plan).save_pretrained(tmp_path / "model")
    common = ("--plan", str(tmp_path / "plan"), "--model", str(tmp_path / "model"), "--output", str(tmp_path / "out"))
    output = on_two_nodes(tmp_path, *common, "--steps", "12", "--checkpoint-every", "6")
    losses = [float(line.split()[4]) for line in output.splitlines() if line.startswith("step ")]
    assert len(losses) == 3
    assert losses[-1] < losses[0] - 1
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "exported", dtype=torch.float32)
    sample = torch.tensor([list(b"def __init__(self, name):\n        self.name = name\n")])
    assert float(model(input_ids=sample, labels=sample).loss.detach()) < losses[0] - 1


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
    compiled("byte_llama.json", tmp_path)
    log = tmp_path / "log"
    arguments = ["--num_gpus", "4", "--master_port", str(free_port()), str(EXAMPLES / "train.py")]
    run = start([*arguments, "--plan", str(tmp_path), "--steps", "100000", "--checkpoint-every", "2"], log)
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "checkpoints" / "latest").exists():
            assert run.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        ranks = ranks_of(run)
        assert len(ranks) == 4
        os.kill(ranks[1], signal.SIGKILL)
        assert run.wait(timeout=90) != 0
        assert ranks_of(run) == []
    finally:
        end([run])
    text = log.read_text()
    assert "lost its connection to a rank that ended" in text

    from parcompile.runtime.checkpoint import verify

    assert verify(tmp_path / "checkpoints") == []
