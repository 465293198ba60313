"""What this rank is doing, in words for a message: the step and the phase of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from .recording import records

_engine: Any = None
_place = ""
_phase = "starting"


def now_doing() -> str:
    """Such as "at step 12, in the backward pass, on pipeline stage 1"."""
    step = "" if _engine is None else f"at step {_engine.global_steps + 1}, "
    return f"{step}{_phase}{_place}"


def is_training() -> bool:
    """Whether an engine makes steps."""
    return _engine is not None


@contextlib.contextmanager
def doing(phase: str) -> Iterator[None]:
    """Within it, this rank is in that phase."""
    global _phase
    before, _phase = _phase, phase
    try:
        yield
    finally:
        _phase = before


def set_stage(stage: int | None) -> None:
    """The pipeline stage of this rank; None: there is only one."""
    global _place
    _place = "" if stage is None else f", on pipeline stage {stage}"


def follow(engine: Any) -> None:
    """From here on the phases of an engine's steps are known. Its `backward` and `step` are wrapped."""
    global _engine, _phase
    _engine, _phase = engine, "before the forward pass"
    engine.register_forward_pre_hook(lambda *_: _enter_forward())
    engine.backward = _entering("in the backward pass", engine.backward)
    engine.step = _entering("in the optimizer step", engine.step, "between two passes")
    records.at(step=engine.global_steps + 1)


def _enter_forward() -> None:
    _enter("in the forward pass")
    if not _place:  # stages say which micro-batch they work on
        records.at(micro_batch=_engine.micro_steps % _engine.gradient_accumulation_steps())


def _enter(phase: str) -> None:
    global _phase
    _phase = phase
    records.enter(phase)


def _entering(phase: str, call: Callable[..., Any], after: str | None = None) -> Callable[..., Any]:
    def wrapped(*args: Any, **options: Any) -> Any:
        _enter(phase)
        before = _engine.global_steps
        result = call(*args, **options)
        if after is not None:
            _enter(after)
        if _engine.global_steps != before:
            records.end_step(_engine.global_steps)
        return result

    return wrapped
