"""Runs cells that it reads from standard input, a JSON line each, and answers each with a JSON line.

Everything that computes is a forked process: an engine that hangs, exits or leaves something behind harms one cell.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

import torch
import torch.distributed as dist

from .cells import FEATURES, Cell, draw, unsupported, world_size
from .comparison import CANNOT, judge
from .reference import batches, import_models, model_of, reference

ADAPTER = ("supports", "build", "step", "full_parameters")
"""Functions that an adapter has."""

_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""What a rank says whose neighbour ended first."""

_SEEDS = (1, 2)


def serve(engine: str) -> None:
    """Until standard input ends. The first line that it writes has versions and features, or an `error`."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what engines print goes where their log does
    torch.set_num_threads(1)
    try:
        adapter = load_adapter(engine)
        import_models()
    except Exception as error:
        _say(answers, {"error": f"{type(error).__name__}: {error}"})
        return
    _say(answers, {"versions": versions_of(adapter), "features": features_of(adapter)})
    for line in sys.stdin:
        task = json.loads(line)
        if "draw" in task:
            cells = draw(
                features_of(adapter),
                lambda cell: unsupported(cell) or adapter.supports(cell),
                task["draw"],
                task["seed"],
                task["most_ranks"],
            )
            _say(answers, {"cells": cells})
        else:
            _say(answers, run_cell(adapter, task["cell"], task["timeout"]))


def load_adapter(engine: str) -> ModuleType:
    """A built-in one by its name, or a file's.

    Raises:
        ImportError: the engine, or the file, cannot be imported.
        AttributeError: the file lacks a function of an adapter.
    """
    if engine.endswith(".py"):
        spec = importlib.util.spec_from_file_location("adapter", engine)
        if spec is None or spec.loader is None:
            raise ImportError(f"{engine} cannot be imported")
        module = importlib.util.module_from_spec(spec)
        sys.modules["adapter"] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(f".engines.{engine}_engine", __package__)
    if missing := [name for name in ADAPTER if not callable(getattr(module, name, None))]:
        raise AttributeError(f"{engine} lacks the function {missing[0]}; an adapter has {', '.join(ADAPTER)}")
    return module


def features_of(adapter: ModuleType) -> dict[str, tuple[Any, ...]]:
    """Of all engines, with those that this one adds or narrows."""
    return {**FEATURES, **getattr(adapter, "FEATURES", {})}


def versions_of(adapter: ModuleType) -> dict[str, str]:
    """Of the packages that decide the numbers."""
    found = {"python": platform.python_version()}
    for name in getattr(adapter, "PACKAGES", ("torch", "transformers")):
        found[name] = importlib.metadata.version(name)
    return found


def run_cell(adapter: ModuleType, cell: Cell, timeout: float) -> dict[str, Any]:
    """The verdict of a cell; nothing of it is left behind."""
    if why := unsupported(cell) or adapter.supports(cell):
        return {"verdict": CANNOT, "why": why}
    folder = Path(tempfile.mkdtemp(prefix="prove-"))
    try:
        world = world_size(cell)
        store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, None, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout)
        )
        tasks = [_rank_task(adapter, cell, rank, store.port, folder) for rank in range(world)]
        if why := _forked(tasks, folder, timeout):
            return {"verdict": CANNOT, "why": why, "failed": True}
        if why := _forked([lambda: _judge(cell, folder)], folder, timeout):
            return {"verdict": CANNOT, "why": f"the run in one process: {why}", "failed": True}
        answer: dict[str, Any] = json.loads((folder / "verdict.json").read_text())
        return answer
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _rank_task(adapter: ModuleType, cell: Cell, rank: int, port: int, folder: Path) -> Callable[[], None]:
    def task() -> None:
        world = world_size(cell)
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "GLOO_SOCKET_IFNAME": "lo",
            "CUDA_VISIBLE_DEVICES": "",
            "TMPDIR": str(folder),  # what an engine writes goes with the cell
        }
        tempfile.tempdir = None
        engine = adapter.build(model_of(cell), cell)
        steps = [adapter.step(engine, batch, cell) for batch in batches(cell)]
        params = adapter.full_parameters(engine, cell)
        if rank == 0:
            losses, norms = zip(*steps, strict=True)
            torch.save({"loss": losses, "norm": norms, "params": params}, folder / "found.pt")

    return task


def _judge(cell: Cell, folder: Path) -> None:
    found, expected = torch.load(folder / "found.pt", weights_only=False), reference(cell)
    low = cell["dtype"] == "bf16"

    def noises() -> list[Any]:
        return [reference(cell, low=True)] if low else [reference(cell, seed) for seed in _SEEDS]

    answer = judge(cell["dtype"], found, expected, noises)
    (folder / "verdict.json").write_text(json.dumps(answer))


def _forked(tasks: list[Callable[[], None]], folder: Path, timeout: float) -> str | None:
    """Runs each task in a process of its own; why one failed, of those the first cause."""
    running: dict[int, int] = {}
    for number, task in enumerate(tasks):
        (folder / f"error-{number}").unlink(missing_ok=True)
        pid = os.fork()
        if pid == 0:
            _child(task, folder / f"error-{number}")
        running[pid] = number
    deadline, failed = time.monotonic() + timeout, {}
    while running and time.monotonic() < deadline:
        for pid in list(running):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                number = running.pop(pid)
                if status:
                    failed[number] = _said(folder / f"error-{number}", status)
                    deadline = min(deadline, time.monotonic() + 5.0)  # others may know the cause
        time.sleep(0.02)
    for pid in running:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if failed:
        causes = [f"rank {one}: {why}" for one, why in sorted(failed.items()) if not any(sign in why for sign in _LOST)]
        return (causes or [f"rank {one}: {why}" for one, why in sorted(failed.items())])[0]
    return f"no answer from rank {min(running.values())} within {timeout:g} s" if running else None


def _child(task: Callable[[], None], error: Path) -> None:
    os.setsid()
    code = 1
    try:
        task()
        code = 0
    except BaseException as cause:  # an engine may call sys.exit
        error.write_text(f"{type(cause).__name__}: {cause}")
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _said(error: Path, status: int) -> str:
    if error.exists():
        return " ".join(error.read_text().split())[:400]
    return f"ended by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit code {os.WEXITSTATUS(status)}"


def _say(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
