"""What a run tells of its steps: metrics.jsonl, run.json, texts, the loss curve, and what TensorBoard and others get.

Each figure that `RunLog.add` gets goes to all of them, under the same name.
"""

from __future__ import annotations

import json
import math
import re
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from deepspeed.accelerator import get_accelerator

from parcompile.atomic import write_file
from parcompile.doctor.metrics import FORMAT, METRICS, RUN, read_metrics
from parcompile.plan import Plan
from parcompile.show.pictures import WIDE
from parcompile.show.pictures.curves import draw
from parcompile.show.pictures.svg import svg
from parcompile.user_files import parse_json, read_text

from .checkpoint.manifest import refuse_inside
from .errors import RunError, everywhere

SAMPLES = "samples.jsonl"
PROMETHEUS_SECONDS = 1.0
"""The file for Prometheus, which is read every few seconds, is not written more often."""


class RunLog:
    """Metrics of steps: `with RunLog(folder, first_step) as log: log.add(step, loss=…)`; its end draws `loss.svg`.

    Args:
        folder: for metrics.jsonl, the loss curve and TensorBoard's files.
        writes: whether this rank writes; the others do nothing.
        first_step: of a resumed run, the step that it resumes from: rows behind it are dropped.
        tensorboard: write event files to `folder`/tensorboard.
        wandb: the project of Weights & Biases that gets the metrics.
        config: of the run, for Weights & Biases.
        prometheus: a file in Prometheus's text format with the last value of each figure, as the textfile collector of
            its node exporter reads it: its name has to end in .prom.
        plan: of the run, which `parcompile report` compares it with; run.json names it.

    Raises:
        RunError: a package is missing, a file of an earlier run is damaged, `folder` lies in a checkpoint or cannot be
            written, or `prometheus` has another ending.
    """

    def __init__(
        self,
        folder: str | Path,
        first_step: int = 0,
        *,
        writes: bool = True,
        tensorboard: bool = False,
        wandb: str | None = None,
        config: Mapping[str, Any] | None = None,
        prometheus: str | Path | None = None,
        plan: Plan | None = None,
    ) -> None:
        self.file, self.writes = Path(folder) / METRICS, writes
        self._board = self._run = None
        self._prometheus = None if prometheus is None else Path(prometheus)
        self._last: dict[str, float] = {}
        self._written = -math.inf
        if self._prometheus is not None and self._prometheus.suffix != ".prom":
            said = f"{self._prometheus}: Prometheus's textfile collector reads files that end in .prom"
            raise everywhere(f"{said}: write {self._prometheus.with_suffix('.prom')}")
        if not writes:
            return
        refuse_inside(self.file.parent)
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            kept = [row for row in self.rows() if row["step"] <= first_step]
            write_file(self.file, "".join(map(_line, kept)))
        except OSError as error:
            raise RunError(f"{self.file} cannot be written: {error.strerror}; name another folder") from None
        self._drop_texts(first_step)
        if plan is not None:
            _name_plan(self.file.with_name(RUN), first_step, plan)
        elif not kept:
            self.file.with_name(RUN).unlink(missing_ok=True)  # that of an earlier run
        if tensorboard:
            self._board = _board(self.file.with_name("tensorboard"), first_step)
        if wandb is not None:
            self._run = _run(wandb, self.file.parent, config, is_new=not kept)

    def rows(self) -> list[dict[str, float]]:
        """All steps so far; what is not finite is NaN."""
        return read_rows(self.file) if self.file.exists() else []

    def add(self, step: int, **values: float) -> None:
        """A step's metrics: `loss`, and whatever else is measured."""
        if not self.writes:
            return
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write(_line({"step": step, **values}))
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)
        if self._run is not None:
            self._run.log(values, step=step)
        if self._prometheus is not None:
            self._last |= {"step": step, **values}
            if time.monotonic() - self._written > PROMETHEUS_SECONDS:
                self._write_prometheus()

    def say(self, step: int, texts: Mapping[str, str]) -> None:
        """Texts that the model wrote behind prompts, by prompt: they go to samples.jsonl and to TensorBoard."""
        if not self.writes or not texts:
            return
        with self.file.with_name(SAMPLES).open("a", encoding="utf-8") as stream:
            for prompt, text in texts.items():
                row = {"step": step, "prompt": prompt, "text": text}
                stream.write(json.dumps(row, ensure_ascii=False) + "\n")
        if self._board is not None:
            for prompt, text in texts.items():
                self._board.add_text(prompt, text, step)

    def _drop_texts(self, first_step: int) -> None:
        """Drops what an earlier run wrote behind the step that this one begins with, and a line that was cut off."""
        file = self.file.with_name(SAMPLES)
        if not file.exists():
            return
        lines = file.read_bytes().decode("utf-8", "replace").splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("}\n")]
        kept = [line for line in whole if json.loads(line)["step"] <= first_step]
        write_file(file, "".join(kept))

    def _write_prometheus(self) -> None:
        assert self._prometheus is not None
        try:
            self._prometheus.parent.mkdir(parents=True, exist_ok=True)
            write_file(self._prometheus, prometheus_text(self._last))
        except OSError as error:  # a run goes on without a dashboard
            warnings.warn(f"{self._prometheus} cannot be written: {error.strerror}", stacklevel=3)
        self._written = time.monotonic()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.writes:
            return
        points = [(row["step"], row["loss"]) for row in self.rows() if "loss" in row]
        lines = {"loss": ("tp", points)}
        curve = draw("Training loss", lines, WIDE, subtitle="nats per token, over steps", unit="{:.3f}".format)
        write_file(self.file.with_name("loss.svg"), svg(curve))
        if self._prometheus is not None and self._last:
            self._write_prometheus()
        if self._board is not None:
            self._board.close()
        if self._run is not None:
            self._run.finish(exit_code=int(kind is not None))


def read_rows(file: Path) -> list[dict[str, float]]:
    """The steps of a metrics.jsonl; what is not finite is NaN. A last line that a killed run wrote in part is none.

    Raises:
        RunError: another line is no row of metrics.
    """
    rows, damaged = read_metrics(file.read_bytes().decode("utf-8", "replace"))
    for number, said in damaged:
        raise RunError(f"{file}:{number} {said}; remove the line")
    return rows


def _name_plan(file: Path, first_step: int, plan: Plan) -> None:
    """Writes the plan behind those that ran before this step."""
    before: list[dict[str, Any]] = []
    if first_step and file.exists():
        try:
            before = [one for one in parse_json(read_text(file))["plans"] if one["after_step"] < first_step]
        except (OSError, ValueError, TypeError, KeyError):
            raise RunError(f"{file} does not name the plans of a run: remove it, or name another folder") from None
    named = {"plan": plan.plan_hash, "world_size": plan.world_size, "device": get_accelerator().device_name()}
    named["global_batch_size"] = plan.spec.training.global_batch_size
    if (ramp := plan.spec.training.rampup_batch_size) is not None:
        named["rampup_batch_size"] = asdict(ramp)
    if not before or {**before[-1], **named} != before[-1]:
        before.append({"after_step": first_step, **named})
    write_file(file, json.dumps({"format": FORMAT, "plans": before}) + "\n")


def prometheus_text(values: Mapping[str, float]) -> str:
    """Figures in Prometheus's text format; what stands behind a slash in a name is the label `part`.

    Source: https://prometheus.io/docs/instrumenting/exposition_formats/
    """
    groups: dict[str, list[str]] = {}
    for key, value in values.items():
        base, _, part = key.partition("/")
        name = "parcompile_" + re.sub(r"[^a-zA-Z0-9_]", "_", base)
        part = part.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        said = repr(float(value)) if math.isfinite(value) else "NaN" if math.isnan(value) else f"{value:+}".title()
        groups.setdefault(name, []).append(f'{name}{{part="{part}"}} {said}' if part else f"{name} {said}")
    return "".join(f"# TYPE {name} gauge\n" + "".join(f"{line}\n" for line in lines) for name, lines in groups.items())


def _line(row: Mapping[str, float]) -> str:
    """JSON has no NaN and no infinity."""
    values = {name: value if math.isfinite(value) else None for name, value in row.items()}
    return json.dumps(values, allow_nan=False) + "\n"


def _board(folder: Path, first_step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise RunError("writing for TensorBoard needs it: pip install tensorboard") from None
    return SummaryWriter(str(folder), purge_step=first_step + 1)


def _run(project: str, folder: Path, config: Mapping[str, Any] | None, *, is_new: bool) -> Any:
    """A run of Weights & Biases; a resumed one goes on under its identifier, which its folder is called by."""
    try:
        import wandb  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        raise RunError("logging to Weights & Biases needs it: pip install wandb") from None
    last = folder / "wandb" / "latest-run"
    known = None if is_new or not last.exists() else last.resolve().name.rpartition("-")[2]
    return wandb.init(project=project, dir=str(folder), config=dict(config or {}), id=known, resume="allow")
