"""Runs cells that it reads from standard input, a JSON line each, and answers each with a JSON line.

Everything that computes is a forked process: an engine that hangs, exits or leaves something behind harms one cell.
"""

from __future__ import annotations

import copy
import ctypes
import faulthandler
import gc
import hashlib
import importlib
import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from .cells import FAMILIES, FEATURES, RESUME, Cell, OtherEngineError, draw, unsupported, without_folders, world_size
from .comparison import CANNOT, RED, judge
from .reference import STEPS, batches, families, import_models, model_of, reference
from .tracing import States, Trace, explain

ADAPTER = ("supports", "build", "step", "full_parameters")
"""Functions that an adapter has."""

_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""What a rank says whose neighbour ended first."""

_OF_INSTALLERS = ("INSTALLER", "REQUESTED", "direct_url.json")
_OURS = (__name__.split(".")[0], "adapter")
_SEEDS = (1, 2, 3)
_PERTURBED = "perturbed"
_ASKING = os.getppid()


def serve(engine: str) -> None:
    """Until standard input ends. The first line that it writes says who answers, or an `error`."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what engines print goes where their log does
    torch.set_num_threads(1)
    try:
        adapter = load_adapter(engine)
        import_models()
    except Exception as error:
        print(json.dumps({"error": without_folders(f"{type(error).__name__}: {error}")}), file=answers)
        return
    gc.freeze()  # the first collection of each forked rank would copy all of it, page by page
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    first = {"versions": versions_of(adapter), "wheels": wheels_of(adapter), "code": code_of()}
    print(json.dumps({**first, "features": features_of(adapter)}), file=answers)
    for line in sys.stdin:
        task = json.loads(line)
        if "draw" in task:
            features = {**features_of(adapter), **{name: (value,) for name, value in task["fixed"].items()}}
            asked = (task["draw"], task["seed"], task["most_ranks"])
            cells = draw(features, lambda cell: unsupported(cell) or adapter.supports(cell), *asked)
            answer: dict[str, Any] = {"cells": cells}
        else:
            answer = run_cell(adapter, task["cell"], task["timeout"], task.get("explain", False))
        print(json.dumps(answer), file=answers)


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
    resumes = all(callable(getattr(adapter, name, None)) for name in ("save", "load"))
    own = {**getattr(adapter, "FEATURES", {}), **(RESUME if resumes else {})}
    return {**FEATURES, "family": families(), **own}


def versions_of(adapter: ModuleType) -> dict[str, str]:
    """Of the packages that decide the numbers."""
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in _named(adapter)}}


def _named(adapter: ModuleType) -> tuple[str, ...]:
    return tuple(getattr(adapter, "PACKAGES", ("torch", "transformers")))


def wheels_of(adapter: ModuleType) -> dict[str, str]:
    """Of these packages a hash of what their wheels brought, as the record of the installation lists it."""
    found = dict[str, str]()
    for name in _named(adapter):
        files = [file for file in importlib.metadata.files(name) or () if file.hash and file.parts[0] != ".."]
        own = [f"{file} {file.hash.value}" for file in files if file.hash and file.name not in _OF_INSTALLERS]
        found |= {name: _digest("\n".join(sorted(own)).encode())} if own else {}
    return found


def code_of() -> str:
    """Hash of what was loaded to draw, run and judge: what all engines share, and this one's adapter."""
    loaded = {name: module.__file__ for name, module in sys.modules.items() if name.split(".")[0] in _OURS}
    paths = [(name, Path(str(file))) for name, file in sorted(loaded.items())]
    paths += [(name, own) for name, file in paths if (own := file.with_suffix(".json")).exists()]
    files = [(name, file.read_bytes()) for name, file in paths]
    return _digest(b"\0".join([*(name.encode() + b"\0" + text for name, text in files), repr(FAMILIES).encode()]))


def _digest(text: bytes) -> str:
    return f"sha256:{hashlib.sha256(text).hexdigest()}"


def run_cell(adapter: ModuleType, cell: Cell, timeout: float, explains: bool = False) -> dict[str, Any]:
    """The verdict of a cell, or where it first differs from one process; nothing of it is left behind."""
    if why := unsupported(cell) or adapter.supports(cell):
        return {"verdict": CANNOT, "why": why}
    folder = Path(tempfile.mkdtemp(prefix="prove-"))
    try:
        if why := _runs(adapter, cell, folder, timeout, explains):
            dead = f"{OtherEngineError.__name__}: " in why
            return {"verdict": RED if dead else CANNOT, "why": why, "failed": True}
        if cell.get("isolation") and not explains:
            (folder / _PERTURBED).mkdir()
            if why := _runs(adapter, {**cell, "perturbed": True}, folder / _PERTURBED, timeout, watched=False):
                return {"verdict": CANNOT, "why": f"with other tokens in front: {why}", "failed": True}
        if why := _forked([lambda: _explain(cell, folder) if explains else _judge(cell, folder)], folder, timeout):
            return {"verdict": CANNOT, "why": f"the run in one process: {why}", "failed": True}
        answer: dict[str, Any] = json.loads((folder / "verdict.json").read_text())
        replaced = () if explains else getattr(adapter, "shims", lambda _: ())(cell)
        return {**answer, "shims": list(replaced)} if replaced else answer
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _runs(adapter: ModuleType, cell: Cell, folder: Path, timeout: float, watched: bool) -> str | None:
    """The ranks of a cell, and the new ones of one that is resumed; why they failed."""
    borders = (0, STEPS - 1, STEPS) if cell.get("resume") else (0, STEPS)
    for run in itertools.pairwise(borders):
        tasks = [_rank_task(adapter, cell, rank, folder, range(*run), watched) for rank in range(world_size(cell))]
        (folder / "port").unlink(missing_ok=True)
        if why := _forked(tasks, folder, timeout, lambda: _store(folder, timeout)):
            return f"after it loaded what it saved: {why}" if run[0] else why
    return None


def _store(folder: Path, timeout: float) -> Any:
    """Where ranks meet; its port is in a file.

    A process that is forked beside the store's threads inherits locks that they hold.
    """
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, None, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout)
    )
    (folder / "port.part").write_text(str(store.port))
    (folder / "port.part").replace(folder / "port")
    return store


def _port(folder: Path) -> str:
    while not (folder / "port").exists():
        time.sleep(0.01)
    return (folder / "port").read_text()


def _rank_task(
    adapter: ModuleType, cell: Cell, rank: int, folder: Path, run: range, watched: bool
) -> Callable[[], None]:
    """The steps of a run on a rank: from the start, or from what was saved, to the end, or to what is saved."""

    def task() -> None:
        world = world_size(cell)
        os.environ |= {
            **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world)),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": _port(folder),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "GLOO_SOCKET_IFNAME": "lo",
            "CUDA_VISIBLE_DEVICES": "",
            "TMPDIR": str(folder),  # what an engine writes goes with the cell
        }
        tempfile.tempdir = None
        model, saved, states = model_of(cell), folder / "saved", States()
        if watched:
            trace = Trace(model)
            trace.watch(model)
        engine = adapter.load(model, saved, cell) if run.start else adapter.build(model, cell)
        result: dict[str, Any] = {"steps": []}
        for number, batch in list(enumerate(batches(cell)))[run.start : run.stop]:
            result["steps"].append(adapter.step(engine, batch, cell))
            if number == 0:
                result["first"] = copy.deepcopy(adapter.full_parameters(engine, cell))
        if run.stop < STEPS:
            saved.mkdir(exist_ok=True)
            adapter.save(engine, saved, cell)
        result["params"] = adapter.full_parameters(engine, cell)
        if fault := states.fault(run.start, len(run)):
            (folder / f"state-{run.stop}-{rank}").write_text(fault)
        if watched:
            torch.save(trace.data(), folder / f"trace-{run.stop}-{rank}.pt")
        if rank == 0:
            torch.save(result, folder / f"result-{run.stop}.pt")

    return task


def _loaded(folder: Path, pattern: str) -> list[Any]:
    return [torch.load(file, weights_only=False) for file in sorted(folder.glob(pattern))]


def _explain(cell: Cell, folder: Path) -> None:
    """By the first of the runs that differs: what is resumed comes after what is saved."""
    expected, answer = reference(cell, watched=True), dict[str, Any]()
    for run, result in zip(sorted(folder.glob("result-*.pt")), _loaded(folder, "result-*.pt"), strict=True):
        number = run.stem.removeprefix("result-")
        if fault := _fault(folder, f"state-{number}-*"):
            answer = {"place": "the optimizer's state", "said": f"it {fault}", "collectives": []}
            break
        traces = _loaded(folder, f"trace-{number}-*.pt")
        losses, norms = zip(*result["steps"], strict=True)
        upto = {name: expected[name][: len(losses) + answer.get("steps", 0)] for name in ("loss", "norm")}
        answer = explain(cell, traces, {"loss": losses, "norm": norms}, upto, expected["trace"])
        if answer["place"]:
            break
        answer["steps"] = len(losses)
    answer.pop("steps", None)
    (folder / "verdict.json").write_text(json.dumps(answer))


def _result(folder: Path) -> dict[str, Any]:
    runs = _loaded(folder, "result-*.pt")
    losses, norms = zip(*(step for run in runs for step in run["steps"]), strict=True)
    params = {"params": runs[-1]["params"], "first": runs[0]["first"]}
    return {"loss": losses, "norm": norms, **params, "state": _fault(folder, "state-*")}


def _fault(folder: Path, pattern: str) -> str | None:
    """What a rank said against the state that its optimizer began with."""
    return next((file.read_text() for file in sorted(folder.glob(pattern))), None)


def _judge(cell: Cell, folder: Path) -> None:
    engine, expected = _result(folder), reference(cell)
    answer = judge(cell["dtype"], engine, expected, lambda: [reference(cell, seed) for seed in _SEEDS])
    if cell.get("isolation") and answer["verdict"] != RED:
        apart = judge(
            cell["dtype"], _result(folder / _PERTURBED), {**engine, "start": expected["start"]}, lambda: [engine]
        )
        if apart["verdict"] == RED:
            answer = {**apart, "why": f"other tokens in front of a document change it: {apart['why']}"}
    (folder / "verdict.json").write_text(json.dumps(answer))


def _forked(
    tasks: list[Callable[[], None]], folder: Path, timeout: float, beside: Callable[[], Any] = lambda: None
) -> str | None:
    """Runs each task in a process of its own; why one failed, of those the first cause.

    `beside` is called when all are forked, and what it gives is held while they run.

    Raises:
        SystemExit: the process that asked has ended, or ends this one.
    """
    running, late, own = dict[int, int](), dict[int, str](), os.getpid()
    try:
        for number, task in enumerate(tasks):
            (folder / f"error-{number}").unlink(missing_ok=True)
            pid = os.fork()
            if pid == 0:
                _child(task, folder / f"error-{number}", folder / f"stack-{number}", own)
            running[pid] = number
        held = beside()
        deadline, failed = time.monotonic() + timeout, {}
        while running and time.monotonic() < deadline:
            for pid in list(running):
                if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                    number, status = running.pop(pid), _ended(pid)
                    if status:
                        failed[number] = _said(folder / f"error-{number}", status)
                        deadline = min(deadline, time.monotonic() + 5.0)  # others may know the cause
            if os.getppid() != _ASKING:
                raise SystemExit("the process that asked has ended")
            time.sleep(0.02)
        late = {number: _waits(pid, folder / f"stack-{number}") for pid, number in running.items() if not failed}
        del held
    finally:
        for pid in running:
            _ended(pid)
    if failed:
        told = [f"rank {rank}: {why}" for rank, why in sorted(failed.items())]
        return next((one for one in told if not any(sign in one for sign in _LOST)), told[0])
    waits = [f"rank {rank} is in {where}" for rank, where in sorted(late.items())]
    return f"no answer within {timeout:g} s: {'; '.join(waits)}" if late else None


def _waits(pid: int, stack: Path) -> str:
    """What a rank's main thread does: its innermost call, and the line outside torch that led to it."""
    os.kill(pid, signal.SIGUSR1)
    time.sleep(0.5)
    calls = re.findall(r'File "(.+)", line (\d+) in (\S+)', stack.read_text() if stack.exists() else "")
    outside = [f"{Path(file).name}:{line}" for file, line, _ in calls if "/torch/" not in file]
    return f"{calls[0][2]}, called from {outside[0]}" if outside else "no line of Python"


def _ended(pid: int) -> int:
    """The status of a child, ended with all that it started: its number is nobody else's until it is waited for."""
    for kill in (os.killpg, os.kill):  # it may not have come to `setsid` yet
        with suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def _end_with(parent: int) -> None:
    """Ends this process when the one that forked it ends, even where it hangs and holds the interpreter's lock."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def _child(task: Callable[[], None], error: Path, stack: Path, parent: int) -> None:
    os.setsid()
    faulthandler.register(signal.SIGUSR1, stack.open("w"), all_threads=False)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _end_with(parent)
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
        return without_folders(" ".join(error.read_text().split()))[:400]
    return f"ended by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit code {os.WEXITSTATUS(status)}"
