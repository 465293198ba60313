"""Peak memory and step time of a run, written beside its plan for `parcompile calibrate`.

The training loop need not do anything, and no step is synchronized: a step's time is the host's time between two
optimizer steps. Ranks communicate only when the file is written.
"""

from __future__ import annotations

import csv
import io
import statistics
import time
import uuid
import warnings
from collections import deque
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from parcompile.atomic import write_file
from parcompile.cost.measurements import PLAIN_COLUMNS, plain_row
from parcompile.runtime.groups import Mesh
from parcompile.spec.values import workload_of
from parcompile.user_files import MAX_TABLE_BYTES, read_text

FILE = "measurements.csv"
WARM_UP = 3
"""Optimizer steps that are not timed: memory is still being allocated, files are still being read."""
FIRST_WRITE = 8
"""The row of a run is written after so many optimizer steps, and anew whenever their number has doubled."""
KEPT = 1000
"""Steps of which the median is taken: the last ones."""


class Recorder:
    """Times an engine's steps and keeps the run's row of a measurements file up to date.

    Args:
        engine: a DeepSpeed engine; its `step` is wrapped.
        mesh: the live ranks. All of them have a recorder or none.
        file: written by rank 0.
    """

    def __init__(self, engine: Any, mesh: Mesh, file: Path) -> None:
        self.file = file
        self._mesh = mesh
        self._run = uuid.uuid4().hex[:12]
        self._seconds: deque[float] = deque(maxlen=KEPT)
        self._last = 0.0
        self._steps = 0
        self._next = FIRST_WRITE
        self._engine = engine
        self._engine_step = engine.step
        engine.step = self._step
        forget_peak(mesh.device)

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        boundary, batch = self._engine.is_gradient_accumulation_boundary(), self._engine.train_batch_size()
        result = self._engine_step(*args, **kwargs)
        if boundary:
            self._tick(whole=batch == self._mesh.plan.spec.training.global_batch_size)
        return result

    def _tick(self, *, whole: bool) -> None:
        """After a step; one with less than the whole batch, which still grows, is no measurement."""
        now = time.perf_counter()
        self._steps += 1
        if self._steps > WARM_UP and whole:
            self._seconds.append(now - self._last)
        self._last = now
        if self._steps == self._next:
            self._next *= 2
            self.write()
            self._last = time.perf_counter()

    def write(self) -> None:
        """Writes the run's row. Every rank calls it at the same step; a file that cannot be written is a warning."""
        peak = torch.tensor(peak_bytes(self._mesh.device), dtype=torch.float64, device=self._mesh.device)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        if self._mesh.rank or not self._seconds:
            return
        spec = self._mesh.plan.spec
        row = plain_row(
            workload_of(spec),
            model=spec.model.source,
            hf_config=spec.model.hf_config,
            peak_bytes=int(peak),
            step_seconds=statistics.median(self._seconds),
        )
        row |= {"steps": str(self._steps), "plan_hash": self._mesh.plan.plan_hash, "run": self._run}
        try:
            put_row(self.file, row)
        except (OSError, ValueError, csv.Error) as error:
            warnings.warn(f"measurements are not written: {error}", stacklevel=2)


def put_row(file: Path, row: dict[str, str]) -> None:
    """Adds a row, or replaces that of the same run. A reader sees the file with or without it, never half of it.

    Raises:
        OSError: the file cannot be read or written.
        ValueError: the file has other columns: it is not one of measurements.
    """
    rows: list[dict[str, str]] = []
    columns = list(row)
    if file.exists():
        reader = csv.DictReader(io.StringIO(read_text(file, MAX_TABLE_BYTES), newline=""), strict=True)
        rows = [one for one in reader if one.get("run") != row["run"]]
        known = list(reader.fieldnames or columns)
        if not set(PLAIN_COLUMNS) <= set(known):
            raise ValueError(f"{file} has no columns {', '.join(sorted(set(PLAIN_COLUMNS) - set(known)))}")
        columns = [*known, *(name for name in columns if name not in known)]
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows([*rows, row])
    write_file(file, text.getvalue())


def peak_bytes(device: torch.device) -> int:
    """The most that this rank has held: what the allocator has reserved on a device; on a CPU, the process's pages."""
    if device.type != "cpu":
        return int(torch.cuda.max_memory_reserved(device))
    try:
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def forget_peak(device: torch.device) -> None:
    """Lets `peak_bytes` begin anew: building a model may take more memory than training it.

    On a CPU this needs Linux.
    """
    if device.type != "cpu":
        # What was freed while building is still reserved, and would count.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    except OSError:
        return
