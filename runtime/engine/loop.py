"""How an engine goes through the micro-batches of its steps: `engine.train_batch` and `engine.eval_batch`."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from parcompile.runtime.data import Batch
from parcompile.runtime.errors import RunError
from parcompile.runtime.groups import Mesh
from parcompile.runtime.loss import loss_of_step, own_part
from parcompile.runtime.pipeline import PipelinedLoop


class Loop(Protocol):
    """The micro-batches of a step on one rank. Steps run within `together`."""

    def together(self) -> AbstractContextManager[None]:
        """Within it all ranks go through steps together."""

    def train(self, batches: Iterator[Batch]) -> list[Tensor]:
        """One optimizer step; this rank's parts of the losses of the micro-batches that ended on it."""

    def evaluate(self, batches: Iterator[Batch], count: int) -> list[Tensor]:
        """Forward passes of so many micro-batches; its parts of the losses of those that ended on it."""


class AccumulatingLoop:
    """One micro-batch after the other through the whole model."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def together(self) -> AbstractContextManager[None]:
        """As in `Loop`."""
        return contextlib.nullcontext()

    def train(self, batches: Iterator[Batch]) -> list[Tensor]:
        """As in `Loop`."""
        losses = []
        for _ in range(self._engine.gradient_accumulation_steps()):
            loss = _loss(self._engine(**next(batches)))
            self._engine.backward(loss)
            self._engine.step()
            losses.append(own_part(loss).detach())
        return losses

    def evaluate(self, batches: Iterator[Batch], count: int) -> list[Tensor]:
        """As in `Loop`."""
        with torch.no_grad():
            return [own_part(_loss(self._engine(**next(batches)))) for _ in range(count)]


def _loss(output: Any) -> Tensor:
    """Of a model's output; a module of one's own may return it alone."""
    loss: Tensor = output if isinstance(output, Tensor) else output.loss
    return loss


def attach_loop(engine: Any, mesh: Mesh) -> None:
    """Gives an engine its loop, and the two calls that DeepSpeed's pipeline engine has, for every plan."""
    engine.loop = PipelinedLoop(engine, mesh) if mesh.size("pp") > 1 else AccumulatingLoop(engine)
    engine.train_batch = functools.partial(_train_batch, engine)
    engine.eval_batch = functools.partial(_eval_batch, engine)


def _train_batch(engine: Any, batches: Iterator[Batch]) -> Tensor:
    """One optimizer step on the next micro-batches: as many as the plan accumulates, on every rank.

    Args:
        engine: from `initialize`.
        batches: an iterator over this rank's micro-batches, `iter(loader)`, made once.

    Returns:
        The loss of the whole batch, the same on all ranks: a scalar on this rank's device.

    Raises:
        StopIteration: there are no more.
        RunError: they end in the middle of a step.
    """
    count = engine.gradient_accumulation_steps()
    batches = _whole_step(batches, count)
    with engine.loop.together():
        return loss_of_step(engine.loop.train(batches), count, engine.mesh)


def _eval_batch(engine: Any, batches: Iterator[Batch]) -> Tensor:
    """The loss of as many micro-batches as `train_batch` takes, without training.

    Args, returns and errors are those of `train_batch`.
    """
    count = engine.gradient_accumulation_steps()
    batches = _whole_step(batches, count)
    with evaluating(engine), engine.loop.together():
        return loss_of_step(engine.loop.evaluate(batches, count), count, engine.mesh)


@contextlib.contextmanager
def evaluating(engine: Any) -> Iterator[None]:
    """Within it the engine's model is in evaluation mode."""
    was_training = engine.module.training
    engine.eval()
    try:
        yield
    finally:
        engine.train(was_training)


def _whole_step(batches: Iterator[Batch], count: int) -> Iterator[Batch]:
    """The micro-batches of a step. The first is taken here: data that ends between two steps ends as iterators do."""
    if not hasattr(batches, "__next__"):
        raise RunError(
            f"a {type(batches).__name__} is not an iterator: create one before the first step, batches = iter(loader)",
            everywhere=True,
        )
    first = next(batches)
    return itertools.chain([first], _rest(batches, count))


def _rest(batches: Iterator[Batch], count: int) -> Iterator[Batch]:
    number = 1
    for batch in itertools.islice(batches, count - 1):
        number += 1
        yield batch
    if number < count:
        raise RunError(f"the batches ended after {number} of the {count} micro-batches of a step", everywhere=True)
