"""What a run tells of its steps: a line for each, metrics.jsonl, the loss curve, TensorBoard, and Weights & Biases."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from parcompile.atomic import write_file

from .errors import RunError

_WIDTH, _HEIGHT, _LEFT, _BELOW = 640, 360, 60, 40


class RunLog:
    """Metrics of steps: `with RunLog(folder, first_step) as log: log.add(step, loss=…)`; its end draws `loss.svg`.

    Args:
        folder: for metrics.jsonl, the loss curve and TensorBoard's files.
        writes: whether this rank writes; the others do nothing.
        first_step: of a resumed run, the step that it resumes from: rows behind it are dropped.
        tensorboard: write event files to `folder`/tensorboard.
        wandb: the project of Weights & Biases that gets the metrics.
        config: of the run, for Weights & Biases.

    Raises:
        RunError: a package is missing.
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
    ) -> None:
        self.file, self.writes = Path(folder) / "metrics.jsonl", writes
        self._board = self._run = None
        if not writes:
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        kept = [row for row in self.rows() if row["step"] <= first_step]
        write_file(self.file, "".join(map(_line, kept)))
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

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.writes:
            return
        curve = loss_curve([(row["step"], row["loss"]) for row in self.rows() if "loss" in row])
        write_file(self.file.with_name("loss.svg"), curve)
        if self._board is not None:
            self._board.close()
        if self._run is not None:
            self._run.finish(exit_code=int(kind is not None))


def read_rows(file: Path) -> list[dict[str, float]]:
    """The steps of a metrics.jsonl; what is not finite is NaN. A last line that a killed run wrote in part is none.

    Raises:
        RunError: another line is no row of metrics.
    """
    lines = enumerate(file.read_bytes().split(b"\n")[:-1], 1)
    return [_row(line, f"{file}:{number}") for number, line in lines]


def _row(line: bytes, where: str) -> dict[str, float]:
    try:
        row = {name: math.nan if value is None else float(value) for name, value in json.loads(line).items()}
        return {**row, "step": int(row["step"])}
    except (ValueError, TypeError, AttributeError, KeyError):
        text = line[:60].decode(errors="replace")
        raise RunError(f"{where} is no row of metrics with a step: {text!r}; remove the line") from None


def loss_curve(points: list[tuple[float, float]]) -> str:
    """An SVG of (step, loss); what is not finite is left out."""
    points = [(step, loss) for step, loss in points if math.isfinite(loss)]
    steps, losses = [step for step, _ in points] or [0], [loss for _, loss in points] or [0.0]
    low, high, wide = min(losses), max(losses), max(steps) - min(steps) or 1
    tall = high - low or 1

    def place(step: float, loss: float) -> tuple[float, float]:
        x = _LEFT + (step - min(steps)) / wide * (_WIDTH - _LEFT - 20)
        return x, _HEIGHT - _BELOW - (loss - low) / tall * (_HEIGHT - _BELOW - 30)

    marks = []
    for part in range(5):
        loss, step = low + tall * part / 4, min(steps) + wide * part / 4
        (x, _), (_, y) = place(step, low), place(min(steps), loss)
        marks.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - 20}" y2="{y:.1f}" stroke="#ccc"/>')
        marks.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{loss:.3g}</text>')
        marks.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BELOW + 18}" text-anchor="middle">{step:.0f}</text>')
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><title>Training loss</title><rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>'
        f'{"".join(marks)}<polyline points="{line}" fill="none" stroke="#3f51b5" stroke-width="2"/>'
        f'<text x="{_WIDTH / 2:.0f}" y="{_HEIGHT - 6}" text-anchor="middle">step</text>'
        f'<text x="{_LEFT}" y="16">loss (nats per token)</text></svg>\n'
    )


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
