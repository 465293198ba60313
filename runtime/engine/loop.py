"""How an engine goes through the micro-batches of its steps, and the loss on data that is not trained on.

The batch of an engine's steps while it grows: `training.rampup_batch_size`.

DeepSpeed's own `set_train_batch_size` counts the ranks of cp as such with other sequences. The samples that the engine
has taken decide, so that a run goes on as it was in another layout, too.

Prompts that a run continues while it trains: people read what the model has learnt.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parcompile.layout.groups import Axis
from parcompile.plan import Plan
from parcompile.runtime.data import Batch, split_batch, stack
from parcompile.runtime.data.loader import check_length
from parcompile.runtime.data.training_files import read_tokenizer
from parcompile.runtime.deepspeed_patches.engine import after_step, set_batch
from parcompile.runtime.errors import everywhere
from parcompile.runtime.groups import Mesh
from parcompile.runtime.labels import IGNORED_LABEL
from parcompile.runtime.loss import loss_of_step, own_part
from parcompile.runtime.model.lora import without_peft
from parcompile.runtime.pipeline import PipelinedLoop
from parcompile.runtime.router_losses import RouterLosses, without_router_losses


class AccumulatingLoop:
    """One micro-batch after the other through the whole model."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def together(self) -> AbstractContextManager[None]:
        """Within it all ranks go through steps together."""
        return contextlib.nullcontext()

    def train(self, batches: Iterator[Batch]) -> list[Tensor]:
        """One optimizer step; this rank's parts of the losses of the micro-batches that ended on it."""
        losses = []
        for _ in range(self._engine.gradient_accumulation_steps()):
            loss = _loss(self._engine(**next(batches)))
            self._engine.backward(loss)
            self._engine.step()
            losses.append(own_part(loss).detach())
        return losses

    def evaluate(self, batches: Iterator[Batch], count: int) -> list[Tensor]:
        """Forward passes of so many micro-batches; its parts of the losses of those that ended on it."""
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
    with engine.loop.together(), _looked_at(engine, batches, count) as known:
        return loss_of_step(engine.loop.train(known), count, engine.mesh)


def _eval_batch(engine: Any, batches: Iterator[Batch]) -> Tensor:
    """The loss of as many micro-batches as `train_batch` takes, without training.

    Args, returns and errors are those of `train_batch`.
    """
    count = engine.gradient_accumulation_steps()
    batches = _whole_step(batches, count)
    with evaluating(engine), engine.loop.together(), _looked_at(engine, batches, count) as known:
        return loss_of_step(engine.loop.evaluate(known, count), count, engine.mesh)


@contextlib.contextmanager
def _looked_at(engine: Any, batches: Iterator[Batch], count: int) -> Iterator[Iterator[Batch]]:
    """The same micro-batches, for a loss of routers that has to know the whole step before its first backward pass."""
    losses = without_peft(engine.module).loss_function
    if not (isinstance(losses, RouterLosses) and losses.looks_ahead):
        yield batches
        return
    held = list(batches)
    with losses.ahead():
        engine.loop.evaluate(iter(held), count)
    try:
        yield iter(held)
    finally:
        losses.forget()


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
        raise everywhere(
            f"a {type(batches).__name__} is not an iterator: create one before the first step, batches = iter(loader)"
        )
    return itertools.chain([next(batches)], _rest(batches, count))


def _rest(batches: Iterator[Batch], count: int) -> Iterator[Batch]:
    number = 1
    for batch in itertools.islice(batches, count - 1):
        number += 1
        yield batch
    if number < count:
        raise everywhere(f"the batches ended after {number} of the {count} micro-batches of a step")


_LABELS = ("labels", "shift_labels")
"""Entries of a batch that say which tokens are predicted."""


def evaluate(engine: Any, dataset: Sequence[Any], *, batches: int | None = None) -> float:
    """The mean loss of a data set's predicted tokens, the same on every rank: nats per token.

    Forward passes take the plan's `eval_micro_batch_size` sequences. dp shares the sequences out; the result does not
    depend on the layout. Losses of routers are not counted.

    Args:
        engine: from `initialize`.
        dataset: samples, as for `PlanLoader`.
        batches: how many batches of the plan's `eval_global_batch_size` sequences to look at; None: the whole data set.

    Raises:
        RunError: no token of them is predicted.
    """
    loss, tokens = _loss_and_tokens(engine, dataset, batches)
    if not tokens:
        raise everywhere(f"no token of the {len(dataset)} samples to evaluate is predicted")
    return loss / tokens


def evaluate_domains(engine: Any, datasets: Mapping[str, Sequence[Any]]) -> dict[str, float]:
    """The losses and perplexities of held-out data as figures of a row of metrics, the same on every rank.

    `eval_loss` is the mean of all tokens, nats per token, and `eval_perplexity` its exponential. Of several data sets
    each has its own: `eval_loss/NAME`, `eval_perplexity/NAME`.

    Args:
        engine: from `initialize`.
        datasets: samples as for `PlanLoader`, by name.

    Raises:
        RunError: no token of a data set is predicted, or there is none.
    """
    sums = {name: _loss_and_tokens(engine, dataset) for name, dataset in datasets.items()}
    empty = [name for name, (_, tokens) in sums.items() if not tokens]
    if empty or not sums:
        said = f"no token of {', '.join(empty)} is predicted" if empty else "there is no data set"
        raise everywhere(f"{said}: nothing to evaluate")
    loss, tokens = (sum(each) for each in zip(*sums.values(), strict=True))
    means = {"": loss / tokens}
    if len(sums) > 1:
        means |= {f"/{name}": part / count for name, (part, count) in sums.items()}
    row = {f"eval_loss{name}": mean for name, mean in means.items()}
    return row | {f"eval_perplexity{name}": _exponential(mean) for name, mean in means.items()}


def _exponential(mean: float) -> float:
    return math.exp(mean) if mean < 700 else mean + math.inf  # a float goes up to exp(709); NaN stays NaN


def _loss_and_tokens(engine: Any, dataset: Sequence[Any], batches: int | None = None) -> tuple[float, float]:
    """The sum of the losses of predicted tokens, and how many they are."""
    check_length(dataset, "evaluate")
    mesh, training = engine.mesh, engine.mesh.plan.spec.training
    micro, dp = training.eval_micro_batch_size, mesh.size("dp")
    count = len(dataset) if batches is None else min(len(dataset), batches * training.eval_global_batch_size)
    firsts = range(mesh.index("dp") * micro, count, dp * micro)
    passes = len(firsts)
    if mesh.parallel_group(Axis.EP) is not None or mesh.plan.spec.shards_weights:
        # Ranks that exchange tokens or weights make equally many passes: the last ones may be of nothing that counts.
        passes = len(range(0, count, dp * micro))
    total = torch.zeros(2, dtype=torch.float64, device=mesh.device)

    def read() -> Iterator[Batch]:
        for number in range(passes):
            first = firsts[number] if number < len(firsts) else 0
            samples = [dataset[index] for index in range(first, min(first + micro, count))]
            batch = split_batch(stack(samples), mesh)
            if number >= len(firsts):
                batch = {**batch, **{name: torch.full_like(batch[name], IGNORED_LABEL) for name in _LABELS}}
            total[1] += (batch["shift_labels"] != IGNORED_LABEL).sum()
            yield {**batch, "num_items_in_batch": 1.0}

    with evaluating(engine), without_router_losses(engine.module), engine.loop.together():
        for loss in engine.loop.evaluate(read(), passes):
            total[0] += loss
        dist.all_reduce(total, group=mesh.group("dp-cp"))
        if mesh.size("pp") > 1:
            dist.broadcast(total, group=mesh.group("pp"), group_src=mesh.size("pp") - 1)
    loss, tokens = total.tolist()
    return loss, tokens


def guard_backward(engine: Any) -> None:
    """Lets a backward pass of what `engine.module(…)` has returned say what to call, where it is not the engine's.

    Gradients of a rank are its part: the engine sums and scales them, and its optimizer takes them over.
    """
    if dist.get_world_size() > 1:
        _Guard(engine)


class _Guard:
    def __init__(self, engine: Any) -> None:
        self._forwards, self._backwards = 0, 0
        engine.forward = self._counting("_forwards", engine.forward)
        engine.backward = self._counting("_backwards", engine.backward)
        engine.module.register_forward_hook(self._leave)

    def _counting(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def counted(*args: Any, **options: Any) -> Any:
            setattr(self, name, getattr(self, name) + 1)
            try:
                return call(*args, **options)
            finally:
                setattr(self, name, getattr(self, name) - 1)

        return counted

    def _leave(self, _: nn.Module, __: Any, output: Any) -> None:
        if self._forwards or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        found = (output, getattr(output, "loss", None), getattr(output, "logits", None))
        for tensor in found:
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(self._check)  # type: ignore[no-untyped-call]

    def _check(self, _: Tensor) -> None:
        if not self._backwards:
            raise everywhere(
                "backward() of what engine.module(…) has returned would leave each rank its part of the gradients, "
                "which no optimizer step takes: write loss = engine(**batch).loss and engine.backward(loss), or "
                "engine.train_batch(iterator). To evaluate, call engine.module(…) under torch.no_grad()"
            )


class GrowingBatch:
    """Gives each step of an engine its batch, and its learning rate by the samples that came before.

    Args:
        engine: of a plan whose batch grows; its `step` is wrapped.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        after_step(engine, self.follow)
        self.follow()

    def follow(self) -> None:
        """Sets what the next step has, where it begins. Also after `global_samples` of the engine were set."""
        engine, training = self._engine, self._engine.mesh.plan.spec.training
        batch = training.batch(engine.global_samples)
        count = batch // (training.micro_batch_size * engine.mesh.size("dp"))
        set_batch(engine, batch, count)
        losses = without_peft(engine.module).loss_function
        if isinstance(losses, RouterLosses):
            losses.take_micro_batches(count)
        if hasattr(engine.lr_scheduler, "follow"):  # a user's own counts as it likes
            engine.lr_scheduler.follow(engine.global_samples)


def let_batch_grow(engine: Any) -> None:
    """Gives an engine the batches of its plan, where they grow."""
    grows = engine.mesh.plan.spec.training.rampup_batch_size is not None
    engine.parcompile_batch = GrowingBatch(engine) if grows else None


def refuse_ramp(plan: Plan, loop: str) -> None:
    """Refuses a plan whose batch grows.

    Args:
        plan: the plan.
        loop: who takes the steps.

    Raises:
        RunError: it grows.
    """
    if (ramp := plan.spec.training.rampup_batch_size) is not None:
        raise everywhere(
            f"training.rampup_batch_size grows the batch from {ramp.start} to {plan.spec.training.global_batch_size}, "
            f"and {loop} takes the same number of micro-batches in every step: remove the key and compile again, or "
            "train with parcompile.runtime.initialize and engine.train_batch"
        )


def own_deals(key: str, values: Mapping[str, Any]) -> list[str]:
    """What the argument `key`, settings of accelerate, says of batches that a plan deals otherwise."""
    asked = [name for name in ("split_batches", "dispatch_batches") if getattr(values.get(key), name, None)]
    return [f"{key}.{name} is True: the plan deals batches to dp ranks" for name in asked]


class Prompts:
    """Texts, and how the model goes on from them: the most likely token each time, the same in every layout.

    Args:
        texts: the prompts.
        plan: the plan of the run.
        tokenizer: a folder with a Hugging Face tokenizer. None: a token is a byte.
        new_tokens: the most tokens that a prompt is continued by; there are fewer where the model ends its text, or
            where prompt and text fill a sequence of the plan.

    Raises:
        RunError: the layers are in stages, or which prompt cannot be continued, and why.
    """

    def __init__(
        self, texts: Sequence[str], plan: Plan, tokenizer: str | Path | None = None, new_tokens: int = 64
    ) -> None:
        self.texts, self._words = tuple(texts), read_tokenizer(tokenizer)
        room, vocabulary = plan.spec.training.sequence_length, plan.spec.model.shape.vocab_size
        if texts and (pp := plan.spec.parallelism.pp) > 1:
            raise everywhere(
                f"a plan with pp {pp} continues no prompts while it trains, since each stage has a part of the layers: "
                "leave the prompts out, and generate with the exported model"
            )
        self._tokens = [self._encoded(text) for text in self.texts]
        for text, tokens in zip(self.texts, self._tokens, strict=True):
            wrong = ""
            if not tokens:
                wrong = "has no token: write some text"
            elif len(tokens) >= room:
                wrong = f"has {len(tokens)} tokens, and sequence_length is {room}: no token can follow"
            elif max(tokens) >= vocabulary:
                wrong = (
                    f"has the token {max(tokens)}, and the model's vocabulary {vocabulary}: name the model's tokenizer"
                )
            if wrong:
                raise everywhere(f"the prompt {text[:40]!r} {wrong}")
        self._new = [min(new_tokens, room - len(tokens)) for tokens in self._tokens]

    def continued(self, engine: Any) -> dict[str, str]:
        """What the model adds to each prompt. Every rank calls it, and gets the same."""
        found = {}
        for text, tokens, new in zip(self.texts, self._tokens, self._new, strict=True):
            given = torch.tensor([tokens], device=engine.device)
            whole = engine.module.generate(
                given,
                attention_mask=torch.ones_like(given),
                max_new_tokens=new,
                do_sample=False,
                use_cache=True,
                pad_token_id=0,
            )
            found[text] = self._decoded(whole[0, len(tokens) :].tolist())
        return found

    def _encoded(self, text: str) -> list[int]:
        return list(text.encode()) if self._words is None else list(self._words.encode(text))

    def _decoded(self, tokens: list[int]) -> str:
        if self._words is not None:
            return str(self._words.decode(tokens, skip_special_tokens=True))
        return bytes(one for one in tokens if one < 256).decode("utf-8", "replace")
