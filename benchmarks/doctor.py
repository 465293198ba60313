"""Whether `parcompile doctor` finds faults that are put into runs of gloo ranks on this machine.

    python benchmarks/doctor.py --results FILE [--draws 10] [--classes skip dead] [--layouts tp2-dp2 deepspeed-3]
    python benchmarks/doctor.py --table FILE ...
    python benchmarks/doctor.py --synthetic 1024
    python benchmarks/doctor.py --overhead 40

Each run with a fault adds one line of JSON to FILE; a call with the same file goes on where the last one stopped.
`--table` prints the tables of benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from harness import cpu_spec, heads, llama, parsed, plan_of, quartiles
from harness import row as table_row

LAYOUTS = {
    "tp2-dp2": {"tp": 2},
    "tp2-cp2": {"tp": 2, "cp": 2},
    "pp2-dp2": {"pp": 2},
    "tp2-pp2": {"tp": 2, "pp": 2},
    "dp4": {},
}
_SMALL_BUCKETS = json.dumps({"zero_optimization": {"reduce_bucket_size": 1100}})
ENGINES: dict[str, dict[str, Any]] = {
    **{f"deepspeed-{stage}": {"stage": stage, "accumulation": 2, "config": _SMALL_BUCKETS} for stage in (1, 2, 3)},
    "accelerate-fsdp2": {"wrapper": "fsdp2"},
    "torchtitan-tp1": {},
    "torchtitan-tp2": {"dp": 2, "tp": 2, "sequence_parallel": True},
}
"""Layouts of other engines, as cells of `parcompile prove`."""
CLASSES = {
    "skip": ("skipped", "skipped or swapped"),
    "swap": ("swapped order", "skipped or swapped"),
    "size": ("wrong size",),
    "end": ("ended early",),
    "dead": ("dead",),
    "stopped": ("stopped",),
    "slow": ("straggler",),
    "group": ("wrong group",),
    "growth": ("growth",),
    "nan": ("not finite",),
    "versions": ("versions",),
    "network": ("network",),
}
"""Faults, and the causes that are right for each."""
PLACED = ("skip", "swap", "size", "group")
"""Faults of one message: its axis, layer and step are asked for too."""
STEPS = 8
PATIENCE = 60.0
"""Seconds for a run."""
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
MODEL = llama(hidden=32, intermediate=64, layers=4, vocabulary=64, positions=64, **HEADS)


def spec(layout: str) -> dict[str, Any]:
    """A small model in that layout on 4 ranks."""
    training = {"sequence_length": 32, "global_batch_size": 16, "micro_batch_size": 2}
    tree = cpu_spec(MODEL, 4, {**LAYOUTS[layout], "dp": "auto"}, f"faults-{layout}", **training)
    return {**tree, "zero": {"stage": 1}}


# What one rank does.


def rank_main(rank: int, port: int, folder: str, fault: dict[str, Any]) -> None:
    """Trains on this rank; its output goes to a file."""
    log = os.open(f"{folder}/rank-{rank}.log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1), os.dup2(log, 2)
    import torch

    from parcompile.runtime import report_errors
    from parcompile.runtime.local import launcher_environment

    os.environ |= launcher_environment(rank, 4, port)
    os.environ |= {"PARCOMPILE_HEARTBEAT": "1", "PARCOMPILE_SILENT_TIMEOUT": "8", "PARCOMPILE_COLLECTIVE_TIMEOUT": "12"}
    os.environ["PARCOMPILE_RECORDS"] = f"{folder}/records"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    mine = fault["class"] if rank == fault["rank"] else ""
    if "plain" in fault:
        _train_plainly(rank, folder, fault, mine)
        return
    with report_errors():
        _train(folder, fault, mine)


def _train_plainly(rank: int, folder: str, fault: dict[str, Any], mine: str) -> None:
    """Another engine; Flight Recorder's dump is written when all is over."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"
    import deepspeed
    import torch
    from torch._C import _distributed_c10d as c10d

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=6))
    torch.distributed.init_process_group = lambda *_, **__: None  # engines take this one, with its time-out

    def dump() -> None:
        _wait(2 * PATIENCE, Path(folder, "over").exists)
        # A run of NCCL writes it at the time-out of a collective.
        Path(folder, f"{rank}.new").write_bytes(c10d._dump_fr_trace())
        Path(folder, f"{rank}.new").rename(Path(folder, f"trace_{rank}"))

    watcher = threading.Thread(target=dump, daemon=True)
    watcher.start()
    train = _with_engine(fault["plain"])
    injected = Injected({}, folder, fault) if mine in (*PLACED, "dead") else None
    has_finished = False
    with contextlib.suppress(Exception):  # what an engine makes of a message that failed
        for step in range(1, STEPS + 1):
            if injected is not None:
                injected.begin(step)
            if step == fault["step"] and mine == "end":
                _tell(folder, {})
                break
            train()
        else:
            has_finished = True
            Path(folder, f"whole-{rank}").touch()
    watcher.join()
    os._exit(0 if has_finished else 3)


def _with_engine(layout: str) -> Callable[[], object]:
    """A step of an engine of `parcompile prove`, of a small model on 4 ranks."""
    from parcompile.runtime.prove.ranks import cells, reference

    reference.STEPS = STEPS
    engine = importlib.import_module(f"parcompile.runtime.prove.ranks.engines.{layout.partition('-')[0]}_engine")
    features = {**cells.FEATURES, **engine.FEATURES, "family": ("qwen3",)}
    cell = {name: values[0] for name, values in features.items()} | {"dp": 4, "clipping": 0.5, "micro_batch": 2}
    cell |= {"tp": 1, "seed": 0, "resume": False, **ENGINES[layout]}
    run, batches = engine.build(reference.model_of(cell), cell), reference.batches(cell)
    return lambda: engine.step(run, next(batches), cell)


def _train(folder: str, fault: dict[str, Any], mine: str) -> None:
    import torch

    from parcompile.plan import load_plan
    from parcompile.runtime import groups, initialize
    from parcompile.runtime.run_log import RunLog

    if mine == "versions":
        right = groups.statement
        groups.statement = lambda plan: {**right(plan), "torch": "2.9.1"}
        _tell(folder, {})
    plan = load_plan(f"{folder}/plan")
    generator = torch.Generator().manual_seed(0)
    samples = [torch.randint(0, 64, (32,), generator=generator) for _ in range(512)]
    engine, _, loader, _ = initialize(plan=plan, training_data=samples, measurements=False, self_check=False)
    batches, kept = iter(loader), []
    injected = Injected(engine.mesh.groups, folder, fault) if mine in (*PLACED, "dead", "stopped", "network") else None
    with RunLog(folder, writes=engine.mesh.rank == 0) as run:
        for step in range(1, STEPS + 1):
            if injected is not None:
                injected.begin(step)
            if step == fault["step"] and mine == "end":
                _tell(folder, {"step": step})
                return
            if mine == "nan" and step == fault["step"]:
                named = {name: one for name, one in engine.module.named_parameters() if ".layers." in name}
                named = {name: one for name, one in named.items() if "mlp" in name}
                name = list(named)[fault["draw"] % len(named)]
                with torch.no_grad():
                    named[name].view(-1)[0] = float("nan")  # a weight of one layer of this rank
                _tell(folder, {"step": step, "layer": int(name.split(".layers.")[1].split(".")[0])})
            if mine == "growth":
                kept.append(torch.ones(fault["megabytes"] * 2**18))
            if mine == "slow":
                time.sleep(fault["seconds"])
            loss = float(engine.train_batch(batches))
            run.add(step, loss=loss, gradient_norm=float(engine.get_global_grad_norm()))
    if mine in ("slow", "growth"):
        _tell(folder, {})


def _tell(folder: str, truth: dict[str, Any]) -> None:
    """What the fault was, and that it has happened."""
    Path(folder, "truth.new").write_text(json.dumps(truth), encoding="utf-8")
    Path(folder, "truth.new").rename(Path(folder, "truth"))


_DONE = SimpleNamespace(wait=lambda *_: True, is_completed=lambda: True)
"""In place of a message that was not posted."""


class Injected:
    """Counts the messages of a step, and spoils one of the faulty step."""

    def __init__(self, groups: dict[str, Any], folder: str, fault: dict[str, Any]) -> None:
        import torch.distributed as dist

        from parcompile.runtime.liveness.recording import _METHODS

        self.groups, self.folder, self.fault = groups, folder, fault
        self.step, self.place, self.fits, self.last = 0, 0, list[int](), None
        self.key: Any = None
        self.late: Callable[[], Any] | None = None
        for name in _METHODS:
            if hasattr(dist.ProcessGroup, name):
                setattr(dist.ProcessGroup, name, self._wrapped(name, getattr(dist.ProcessGroup, name)))

    def begin(self, step: int) -> None:
        self.step, self.place = step, 0

    def _wrapped(self, op: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def post(group: Any, *args: Any, **options: Any) -> Any:
            if group.size() == 1:
                return method(group, *args, **options)
            self.place += 1
            if self.step == self.fault["step"] - 1:
                x = _first(args) if args and op != "barrier" else None
                key = (op, group.group_name, None if x is None else x.numel())
                if self.fault["class"] == "swap" and self.fits and self.fits[-1] == self.place - 1 and key == self.key:
                    self.fits.pop()  # nobody can see that like messages were swapped
                self.key = key
                if self._fits(op, group, args):
                    self.fits.append(self.place)
            is_due = self.step == self.fault["step"] and self.fits
            if is_due and self.place == self.fits[self.fault["draw"] % len(self.fits)]:
                return self._spoilt(op, method, group, args, options)
            work = method(group, *args, **options)
            if self.late is not None:
                late, self.late = self.late, None
                self.last = late()
            return work

        # Whoever reads frames sees the caller.
        post.__code__ = post.__code__.replace(co_filename="/torch/injected.py")
        return post

    def _fits(self, op: str, group: Any, args: tuple[Any, ...]) -> bool:
        """Whether a message can have this fault."""
        kind = self.fault["class"]
        if kind == "size":
            return op in ("allreduce", "broadcast", "send") and _first(args).numel() > 1
        if kind == "group":
            return op == "allreduce" and self._other(group) is not None
        return kind not in ("skip", "swap") or op not in ("recv", "send")

    def _other(self, group: Any) -> Any:
        """Another group of this rank with other ranks."""
        import torch.distributed as dist

        ranks = dist.get_process_group_ranks(group)
        for other in self.groups.values():
            if other.size() > 1 and dist.get_process_group_ranks(other) != ranks:
                return other
        return None

    def _spoilt(self, op: str, method: Callable[..., Any], group: Any, args: tuple[Any, ...], options: Any) -> Any:
        from parcompile.doctor.records import op_of
        from parcompile.runtime.liveness import records

        axis = records._axes.get(group.group_name, "world")
        place = records.place
        _tell(
            self.folder,
            {"step": place.step, "axis": axis, "layer": place.layer, "micro_batch": place.micro_batch, "op": op_of(op)},
        )
        kind = self.fault["class"]
        if kind == "skip":
            return _DONE
        if kind == "swap":
            self.late = lambda: method(group, *args, **options)
            self.late.__code__ = self.late.__code__.replace(co_filename="/torch/injected.py")  # type: ignore[attr-defined]
            return _DONE
        if kind == "size":
            x = _first(args)
            return method(group, [x.new_zeros(x.numel() + 8)], *args[1:], **options)
        if kind == "group":
            return method(self._other(group), *args, **options)
        if kind in ("dead", "stopped"):
            os.kill(os.getpid(), signal.SIGKILL if kind == "dead" else signal.SIGSTOP)
        if kind == "network":
            _drop(int(os.environ["MASTER_PORT"]))
        return method(group, *args, **options)


Injected._spoilt.__code__ = Injected._spoilt.__code__.replace(co_filename="/torch/injected.py")


def _first(args: tuple[Any, ...]) -> Any:
    return args[0][0] if isinstance(args[0], list | tuple) else args[0]


def _drop(store: int) -> None:
    """Closes this rank's connections to other ranks, and keeps those to the store."""
    for name in list(os.listdir("/proc/self/fd")):  # noqa: PTH208
        with contextlib.suppress(OSError):
            one = socket.socket(fileno=os.dup(int(name)))
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.getpeername()[1] != store:
                one.shutdown(socket.SHUT_RDWR)
            one.close()


# What is done to all of them.


def run_once(context: Any, layout: str, fault: dict[str, Any], folder: Path) -> bool:
    """One run with one fault, until it ends or stands still. Whether all ranks have ended as they should, or go on."""
    import torch.distributed as dist

    if "plain" not in fault:
        shutil.copytree(folder.parent / f"plan-{layout}", folder / "plan")
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    ranks = [context.Process(target=rank_main, args=(rank, store.port, str(folder), fault)) for rank in range(4)]
    for one in ranks:
        one.start()
    end = time.monotonic() + PATIENCE
    while any(one.is_alive() for one in ranks) and time.monotonic() < end:
        time.sleep(0.1)
        if all((folder / f"whole-{rank}").exists() for rank in range(4)):
            break
        if (folder / "truth").exists() and fault["class"] not in ("slow", "growth"):
            end = min(end, time.monotonic() + (9 if "plain" in fault else 18))
    (folder / "over").touch()
    file = folder / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    last = int(json.loads(lines[-1])["step"]) if lines else 0
    goes_on = all(one.is_alive() for one in ranks) and last > fault["step"] + 1
    if "plain" in fault:  # ranks that are done end a moment after their dumps
        dumps = [folder / f"trace_{rank}" for rank in range(4)]
        _wait(10, lambda: all(dump.exists() or not one.is_alive() for dump, one in zip(dumps, ranks, strict=True)))
    asked = time.time() - 1
    for one in ranks:
        with contextlib.suppress(ProcessLookupError):
            if one.is_alive():
                os.kill(one.pid, signal.SIGUSR1)
    if "plain" not in fault:
        written = sum(one.is_alive() for one in ranks) - (fault["class"] == "stopped")
        files = folder / "records"
        _wait(8, lambda: sum(one.stat().st_mtime > asked for one in files.glob("*.json")) >= written)
    for one in ranks:
        one.kill()
        one.join()
    return goes_on or all(one.exitcode == 0 for one in ranks)


def _wait(seconds: float, is_reached: Callable[[], bool]) -> None:
    end = time.monotonic() + seconds
    while not is_reached() and time.monotonic() < end:
        time.sleep(0.1)


def right(fault: dict[str, Any], truth: dict[str, Any], verdict: Any) -> dict[str, bool]:
    """What of a verdict is right."""
    kind = fault["class"]
    found = {"cause": verdict.cause in CLASSES[kind], "rank": verdict.ranks == (fault["rank"],)}
    if "plain" in fault:
        del found["cause"]  # dumps have no steps and no errors: the first collective that diverges is what they show
        found["collective"] = truth.get("op", "") in (verdict.collective or "")
    names = [name for name in ("axis", "layer", "step") if name in truth and "plain" not in fault]
    return found | {name: getattr(verdict, name) == truth[name] for name in names}


def try_one(
    context: Any, options: argparse.Namespace, root: Path, kind: str, layout: str, number: int
) -> dict[str, Any]:
    """One run, and what doctor says of it."""
    from parcompile.doctor import judge, read_all

    began, load, drawn = time.time(), os.getloadavg()[0], random.Random(f"{options.seed} {kind} {layout} {number}")
    fault = {"class": kind, "rank": drawn.randrange(4), "draw": drawn.randrange(1000), "step": drawn.randrange(3, 7)}
    fault |= {"seconds": drawn.uniform(0.2, 0.4), "megabytes": drawn.choice((8, 16))}
    fault |= {} if layout in LAYOUTS else {"plain": layout}
    folder = root / f"{kind}-{layout}-{number}"
    folder.mkdir()
    is_whole = run_once(context, layout, fault, folder)
    told = folder / "truth"
    truth = json.loads(told.read_text()) if told.exists() else None
    left = (folder / "records", folder / "metrics.jsonl", *folder.glob("trace_*"))  # without the output of ranks
    verdict = judge(read_all(one for one in left if one.exists()))
    row = {"seed": options.seed, "class": kind, "layout": layout, "draw": number, "rank": fault["rank"]}
    row |= {"load": round(load, 1), "seconds": round(time.time() - began, 1), "truth": truth, "right": None, "why": ""}
    row |= {"kind": verdict.kind, "cause": verdict.cause, "ranks": verdict.ranks, "said": verdict.summary[:300]}
    row |= {"step": verdict.step, "axis": verdict.axis, "layer": verdict.layer}
    if kind == "healthy":
        row["right"] = {"nothing": verdict.kind in ("nothing", "unknown")} if is_whole else None
        row["why"] = "" if is_whole else "it did not come to its end"
    elif truth is None:
        row["why"] = "no message of the layout can have the fault, or the run ended before it"
    elif is_whole and kind in PLACED:
        row["why"] = "the run went on"  # messages of two groups may change places
    else:
        row["right"] = right(fault, truth, verdict)
    shutil.rmtree(folder)
    return row


def read_rows(*names: str | Path) -> list[dict[str, Any]]:
    """What earlier calls have found."""
    files = [Path(name) for name in names if Path(name).exists()]
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def due(rows: list[dict[str, Any]], options: argparse.Namespace) -> list[tuple[str, str, int]]:
    """The draws that are left. For one that does not count another one is drawn, in all at most three times as many."""
    found, kinds = [], dict.fromkeys(options.classes, options.draws)
    for place, layout in enumerate(options.layouts):
        healthy = len(range(place, options.healthy, len(options.layouts)))
        for kind, wanted in {**kinds, "healthy": healthy}.items():
            mine = [row for row in rows if (row["class"], row["layout"], row["seed"]) == (kind, layout, options.seed)]
            left = wanted - sum(row["right"] is not None for row in mine)
            tried = {row["draw"] for row in mine}
            found += [(kind, layout, one) for one in range(3 * wanted) if one not in tried][:left]
    return sorted(found, key=lambda one: one[2])


def faults(options: argparse.Namespace) -> None:
    """Runs what is left of all classes in all layouts, and prints the table."""
    from parcompile.cli import run

    root = Path(tempfile.mkdtemp(prefix="doctor-"))
    for layout in filter(LAYOUTS.__contains__, options.layouts):
        (root / f"{layout}.json").write_text(json.dumps(spec(layout)), encoding="utf-8")
        sys.argv = ["parcompile", str(root / f"{layout}.json"), "-o", str(root / f"plan-{layout}"), "--quiet"]
        assert run() == 0, layout
    context = multiprocessing.get_context("forkserver")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [sys.path[0], os.environ.get("PYTHONPATH")]))
    context.set_forkserver_preload([Path(__file__).stem])
    end, rows = time.monotonic() + 60 * options.minutes, read_rows(options.results)
    with ThreadPoolExecutor(options.jobs) as pool, options.results.open("a", encoding="utf-8") as file:

        def one(job: tuple[str, str, int]) -> None:
            if time.monotonic() < end:
                row = try_one(context, options, root, *job)
                rows.append(row)
                print(json.dumps(row), file=file, flush=True)
                if row["right"] is not None and not all(row["right"].values()):
                    print(json.dumps(row), flush=True)

        while time.monotonic() < end and (jobs := due(rows, options)):
            for _ in pool.map(one, jobs):
                pass
    print_tables(rows)
    shutil.rmtree(root)


def print_tables(rows: list[dict[str, Any]]) -> None:
    """Runs by fault and layout, and what of the verdicts was right."""
    layouts = list(dict.fromkeys(row["layout"] for row in rows))
    counted: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    parts: dict[str, list[bool]] = defaultdict(list)
    for row in (row for row in rows if row["right"] is not None):
        counted[row["class"]][row["layout"]].append(all(row["right"].values()))
        for name, is_right in row["right"].items():
            parts[name].append(is_right)

    def line(title: str, cells: dict[str, list[bool]]) -> None:
        every = [cells.get(layout, []) for layout in layouts]
        every.append([*itertools.chain(*every)])
        table_row(title, *(f"{sum(one)} of {len(one)}" if one else "" for one in every))

    heads("fault", *layouts, "all")
    faulty = [kind for kind in counted if kind != "healthy"]
    for kind in faulty:
        line(kind, counted[kind])
    line("**all**", {name: [*itertools.chain(*(counted[kind][name] for kind in faulty))] for name in layouts})
    line("healthy, not accused", counted["healthy"])
    print(", ".join(f"{name} {sum(results)} of {len(results)}" for name, results in parts.items()))
    both = sum(row["cause"] == "skipped or swapped" and row["right"] is not None for row in rows)
    print(f"causes said to be one of two, skipped or swapped: {both}")
    for why, number in Counter(row["why"] for row in rows if row["why"]).items():
        print(f"not counted: {number}: {why}")
    loads = sorted(row["load"] for row in rows) or [0.0]
    print(f"load when they began: {loads[0]} to {loads[-1]}, in the middle {statistics.median(loads)}")


# Many ranks, and what recording costs.


def synthetic(size: int) -> None:
    """Seconds for the records of many ranks in groups of 8, one of which has skipped a collective."""
    from parcompile.doctor import judge, read_all
    from parcompile.doctor.records import FOLDER, FORMAT, KEPT, file_name

    layers, culprit = 32, size // 3
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, FOLDER)
        folder.mkdir()
        for rank in range(size):
            messages, last = [], KEPT - (KEPT // 3 if rank // 8 == culprit // 8 else 0)
            for place in range(KEPT):
                if rank == culprit and place == KEPT // 2:
                    continue
                number = len(messages) + 1
                step, layer = divmod(place, layers)
                row = {"number": number, "group": f"tp{rank // 8}", "op": "allreduce", "peer": None, "shape": [4096]}
                at = {"step": step, "micro_batch": 0, "phase": "in the forward pass", "layer": layer}
                state = "open" if number >= last else "done"
                messages.append({**row, "dtype": "torch.bfloat16", "time": 1e9 + place, **at, "state": state})
            members = list(range(rank // 8 * 8, rank // 8 * 8 + 8))
            head = {"format": FORMAT, "rank": rank, "world_size": size, "time": 1e9 + 2 * KEPT, "events": []}
            groups = {f"tp{rank // 8}": {"axis": "tp", "ranks": members}}
            tree = {**head, "groups": groups, "messages": messages, "steps": []}
            (folder / file_name(rank)).write_text(json.dumps(tree), encoding="utf-8")
        started = time.perf_counter()
        verdict = judge(read_all([folder]))
        print(f"{size} ranks: {time.perf_counter() - started:.1f} s: {verdict.summary}")
        assert verdict.ranks == (culprit,), verdict


def overhead(pairs_asked: int) -> None:
    """What a step takes with the recorder and without it, in turn, on each of two ranks."""
    from parcompile.runtime.local import run_local

    for rank, pairs in enumerate(run_local(2, partial(_measure, pairs=pairs_asked), timeout=3600)):
        without = statistics.median(one[False] for one in pairs)
        more = [(one[True] - one[False]) / without for one in pairs]
        low, middle, high = quartiles(more)
        said = f"{middle:+.2%} with the recorder (middle half of {len(more)} pairs {low:+.2%} to {high:+.2%})"
        print(f"rank {rank}: {without * 1e3:.0f} ms of processor time a step, {said}; load {os.getloadavg()[0]:.1f}")


def _measure(_: int, pairs: int) -> list[dict[bool, float]]:
    """Seconds of this rank's processor for a step with the recorder and without it, in pairs."""
    import torch
    from torch import distributed as dist

    from parcompile.runtime import initialize
    from parcompile.runtime.liveness import records
    from parcompile.runtime.liveness.recording import _METHODS

    classes = {**{name: dist.ProcessGroup for name in _METHODS if hasattr(dist.ProcessGroup, name)}, "wait": dist.Work}
    plain = {name: inspect.getattr_static(one, name) for name, one in classes.items()}
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 4}
    model = {**MODEL, **sizes, "max_position_embeddings": 512}
    training = {"sequence_length": 512, "global_batch_size": 2, "micro_batch_size": 2}
    plan = plan_of({**cpu_spec(model, 2, {"tp": 2, "dp": 1}, **training), "zero": {"stage": 1}})
    with tempfile.TemporaryDirectory() as folder:
        records.folder = Path(folder)
        samples = [torch.randint(0, 64, (512,)) for _ in range(64)]
        engine, _, loader, _ = initialize(plan=plan, training_data=samples, measurements=False, self_check=False)
        recorded = {name: inspect.getattr_static(one, name) for name, one in classes.items()}
        assert recorded["allreduce"] is not plain["allreduce"]
        # The recorder's hooks of layers, and its wrappers of the engine's passes.
        hooks = [one for m in engine.module.modules() for one in (m._forward_pre_hooks, m._forward_hooks)]
        hooks = [one for one in hooks if any("follow_layers" in call.__qualname__ for call in one.values())]
        kept = [dict(one) for one in hooks]
        passes = {name: getattr(engine, name) for name in ("backward", "step")}
        inner = {name: inspect.getclosurevars(call).nonlocals["call"] for name, call in passes.items()}
        assert len(hooks) == 2 * MODEL["num_hidden_layers"]

        def switch(*, on: bool) -> None:
            for name, one in classes.items():
                setattr(one, name, (recorded if on else plain)[name])
            for one, calls in zip(hooks, kept, strict=True):
                one.clear()
                one.update(calls if on else {})
            for name in passes:
                setattr(engine, name, (passes if on else inner)[name])

        def step(*, on: bool) -> float:
            switch(on=on)
            started = time.thread_time()
            engine.train_batch(batches)
            return time.thread_time() - started

        batches = iter(loader)
        found = [{on: step(on=on) for on in (turn % 2 == 0, turn % 2 == 1)} for turn in range(pairs + 2)]
        switch(on=True)
        return found[2:]


def main() -> None:
    options = parsed(
        __doc__,
        results=(Path, "put faults into runs, and add what became of each to this file"),
        minutes=(600.0, "after which no run begins"),
        draws=10,
        classes=([*CLASSES], None, [*CLASSES]),
        layouts=([*LAYOUTS][:4], None, [*LAYOUTS, *ENGINES]),
        healthy=100,
        seed=0,
        jobs=3,
        table=([], "print the table of these files"),
        synthetic=(int, "judge the records of so many ranks"),
        overhead=(int, "time so many pairs of steps with the recorder and without it"),
    )
    if options.results:
        faults(options)
    if options.table:
        print_tables(read_rows(*options.table))
    if options.synthetic:
        synthetic(options.synthetic)
    if options.overhead:
        overhead(options.overhead)


if __name__ == "__main__":
    main()
elif __name__ == "doctor":  # the process that ranks are forked from has what each of them would load and ask for
    import deepspeed.runtime.zero.muon.muon_optimizer
    import transformers.models.llama.modeling_llama  # noqa: F401

    import parcompile.runtime  # noqa: F401

    deepspeed.ops.__compatible_ops__  # noqa: B018
