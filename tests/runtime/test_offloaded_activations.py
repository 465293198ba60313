"""Contract: with training.activation_offloading a plan trains as one process, and layers keep nothing on the device.

`.ci/pipeline_matrix.py --draws offload_activations` draws as many plans as one likes; docs/fit_larger.md says what they
found.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from adapter_runs import assert_same, train
from adapter_runs import train_plain as train_plain_adapted
from closeness import judge
from drawn_stages import compare, draw
from families import tiny_config
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from training_runs import make_plan

from parcompile.layout.shards import page_locked_pieces
from parcompile.runtime.errors import RunError
from parcompile.runtime.inject import host_activations
from parcompile.runtime.inject.host_activations import HostActivations
from parcompile.runtime.preflight import preflight
from parcompile.runtime.ring_attention import keep_attention
from parcompile.runtime.ring_attention.passes import once

WIDTH = 32


class Attention(torch.autograd.Function):
    """Stands for attention over ranks, which is not computed again; what is kept is a transposed tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        (kept,) = once(lambda: (x.sin().t().contiguous().t(),))
        ctx.save_for_backward(x, kept)
        return kept.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, kept = ctx.saved_tensors
        return gradient * x.cos() * (1 + kept)


def mixed(x: Tensor, weight: Tensor, *others: Tensor) -> Tensor:
    """A layer: something that is kept as attention is, a product, further inputs."""
    kept: Tensor = Attention.apply(x)  # type: ignore[no-untyped-call]
    return torch.tanh((kept + sum(others)) @ weight) + x


def plainly(function: Any, *args: Any) -> Tensor:
    return checkpoint(function, *args, use_reentrant=False, context_fn=keep_attention)


def weights(count: int) -> list[nn.Parameter]:
    made = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(WIDTH, WIDTH, generator=made) / 6) for _ in range(count)]


def in_a_row(again: Any, x: Tensor, layers: list[nn.Parameter]) -> Tensor:
    for one in layers:
        x = again(mixed, x, one)
    return x


def with_shared_input(again: Any, x: Tensor, layers: list[nn.Parameter]) -> Tensor:
    first = x * 2
    for one in layers:
        x = again(mixed, x, one, first)
    return x


def of_views(again: Any, x: Tensor, layers: list[nn.Parameter]) -> Tensor:
    """Inputs that are transposed, a part of a larger tensor, or expanded, and a weight's view."""
    for one in layers:
        wide = torch.cat([x, x.cos()], dim=1)
        others = wide[:, WIDTH:], wide[:1, :WIDTH].expand_as(x)
        x = again(mixed, wide[:, 1 : WIDTH + 1].t().contiguous().t(), one.t(), *others)
    return x


def tied(again: Any, x: Tensor, layers: list[nn.Parameter]) -> Tensor:
    for one in [*layers, *layers]:
        x = again(mixed, x, one)
    return x


def moving(host: HostActivations) -> Any:
    return partial(host.checkpoint, context_fn=keep_attention)


def gradients(run: Any, again: Any, micro_batches: int = 1, times: int = 1) -> list[Tensor]:
    """Of input and weights, of micro-batches that all go forward before the first goes backward."""
    layers, given = weights(3), [torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(k)) for k in range(9)]
    inputs = [one.requires_grad_() for one in given[:micro_batches]]
    outs = [run(again, one, layers).square().sum() for one in inputs]
    for out in outs:
        for left in reversed(range(times)):
            out.backward(retain_graph=left > 0)
    return [one.grad for one in (*inputs, *layers) if one.grad is not None]


@pytest.mark.parametrize("run", [in_a_row, with_shared_input, of_views, tied])
@pytest.mark.parametrize(("micro_batches", "times"), [(1, 1), (3, 1), (1, 2)])
def test_gradients_are_the_same_bits(run: Any, micro_batches: int, times: int) -> None:
    expected = gradients(run, plainly, micro_batches, times)
    found = gradients(run, moving(HostActivations()), micro_batches, times)
    assert len(found) == micro_batches + 3
    assert all(one.equal(other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("size", [1, 2, 3, 64, 1000, 5 << 20, (3 << 30) + 7])
def test_pieces_on_the_host_waste_little_where_powers_of_two_are_taken(size: int) -> None:
    pieces = page_locked_pieces(size)
    taken = sum(1 << (one - 1).bit_length() for one in pieces)
    assert sum(pieces) == size and len(pieces) <= 5
    assert taken <= size * 17 / 16 + 1


def test_what_is_cut_into_pieces_comes_back_whole() -> None:
    assert len(page_locked_pieces(1000)) == 5
    one, other = (torch.randn(1000, requires_grad=True) for _ in range(2))
    layer = HostActivations()._begin(())
    with torch.autograd.graph.saved_tensors_hooks(layer.pack, layer.unpack):
        product = one * other.tanh()
    layer.let_go()
    assert torch.autograd.grad(product.sum(), one)[0].equal(other.tanh())


class Deferred(TorchDispatchMode):
    """Copies are made when somebody waits for them, of sources that are there then; until then the targets are NaN."""

    def __init__(self, queue: list[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.queue = queue

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is torch.ops.aten.copy_.default
        into, source = args[0], weakref.ref(args[1])
        into.fill_(float("nan"))

        def run() -> None:
            if (found := source()) is not None:
                into.copy_(found)

        self.queue.append(run)
        return into


class Late(HostActivations):
    """Its stream does nothing before it is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: list[Any] = []

    @contextmanager
    def copying(self, device: torch.device) -> Iterator[None]:
        with Deferred(self.queue):  # type: ignore[no-untyped-call]
            yield

    def copied(self, device: torch.device) -> Any:
        until = len(self.queue)

        def wait() -> None:
            with torch.no_grad():
                for place in range(until):
                    self.queue[place]()
                    self.queue[place] = lambda: None

        return wait


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_everything_is_waited_for(micro_batches: int) -> None:
    stream = SimpleNamespace(wait_event=lambda wait: wait())
    expected = gradients(in_a_row, plainly, micro_batches)
    with mock.patch.object(torch.cuda, "current_stream", lambda *_: stream):
        found = gradients(in_a_row, moving(Late()), micro_batches)
    assert all(one.equal(other) for one, other in zip(found, expected, strict=True))


def test_a_storage_is_moved_once_and_layers_let_go() -> None:
    made: list[Any] = []
    own = host_activations._Moved.__init__

    def counted(self: Any, host: HostActivations, row: Tensor, storage: Any) -> None:
        made.append(row.numel())
        own(self, host, row, storage)

    host, layers, x = HostActivations(), weights(3), torch.randn(64, WIDTH, requires_grad=True)
    with mock.patch.object(host_activations._Moved, "__init__", counted):
        out = with_shared_input(moving(host), x, layers)
    # Each layer's input and attention, and what all of them take; weights stay.
    assert made == [64 * WIDTH] * (2 * len(layers) + 1)
    moved = [one for one in gc.get_objects() if isinstance(one, host_activations._Moved)]
    here = [one for one in moved if one._here is not None]
    assert len(here) == 2, "the last layer's own"
    host.settle()
    assert all(one._here is None for one in moved)
    out.sum().backward()
    del out, here, moved
    assert [one for one in gc.get_objects() if isinstance(one, host_activations._Moved)] == []


def test_backward_has_one_layer_ahead_brought() -> None:
    host, brought = HostActivations(), list[int]()
    layers, x = weights(4), torch.randn(64, WIDTH, requires_grad=True)
    calls: list[Any] = []
    own = host_activations._Layer._bring

    def bring(self: Any) -> None:
        brought.append(calls.index(self))
        own(self)

    begin = HostActivations._begin

    def began(self: Any, args: Any) -> Any:
        calls.append(begin(self, args))
        return calls[-1]

    with (
        mock.patch.object(host_activations._Layer, "_bring", bring),
        mock.patch.object(HostActivations, "_begin", began),
    ):
        in_a_row(moving(host), x, layers).sum().backward()
    assert brought == [3, 2, 2, 1, 1, 0, 0]


def test_nothing_is_moved_without_gradients() -> None:
    with mock.patch.object(host_activations, "_Moved", side_effect=AssertionError), torch.no_grad():
        in_a_row(moving(HostActivations()), torch.randn(64, WIDTH), weights(2))


def test_what_is_written_to_behind_a_layer_is_refused() -> None:
    host, (one, *_) = HostActivations(), weights(1)
    x = torch.randn(64, WIDTH, requires_grad=True) * 1
    out = moving(host)(mixed, x, one)
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(RunError, match=r"training\.activation_offloading: a layer writes to what it"):
        moving(host)(mixed, out, one)


@pytest.mark.ranks
@pytest.mark.parametrize("number", [0, 3, 4, 40])
def test_drawn_plans_train_as_one_process(number: int) -> None:
    judge(compare(draw(number, 4, switch="activation_offloading")[0]))


ALL: dict[str, Any] = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
ON = {"activation_offloading": True, "activation_checkpointing": "full"}


@pytest.mark.ranks
def test_adapters_train_as_in_one_process(tmp_path: Path) -> None:
    parallelism = {"tp": 2, "sequence_parallel": True, "cp": 2}
    plan = make_plan(4, parallelism, training=ON, extra={"zero": {"stage": 3}})
    ranks = run_ranks(4, train, plan, ALL, str(tmp_path), False, False)
    assert_same(ranks, train_plain_adapted(plan, ALL), 2)


@pytest.mark.parametrize(
    ("parallelism", "stage", "further"),
    [
        ({"tp": 2, "cp": 2, "sequence_parallel": True}, 1, {}),
        ({"cp": 4}, 1, {"tiled_mlp": True, "linear_cross_entropy": True}),
        ({"pp": 2, "cp": 2}, 1, {}),
        ({"cp": 4}, 3, {"tiled_mlp": True, "linear_cross_entropy": True}),
    ],
    ids=str,
)
def test_preflight_counts_what_is_here_and_there(
    parallelism: dict[str, Any], stage: int, further: dict[str, Any]
) -> None:
    size = {"vocab_size": 512, "hidden_size": 512, "intermediate_size": 1792, "max_position_embeddings": 8192}
    size |= {"num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2}
    training = {"sequence_length": 8192, "micro_batch_size": 1, "precision": "bf16", **ON, **further}
    training |= {"gradient_accumulation_steps": 2, "global_batch_size": 2}
    extra = {"zero": {"stage": stage}}
    plan = make_plan(
        4, parallelism, model=tiny_config("llama", **size), whole_model=True, training=training, extra=extra
    )
    report = preflight(plan, [3])
    assert "activations on the host" in {one.subject for one in report.findings}
    assert report.agrees, report.text()
