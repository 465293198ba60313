"""The borders of the tensor-parallel region, and activation checkpointing of what lies within.

Query, key and value (and gate and up) share one entry: their input is gathered once, and the sum of their input
gradients is reduced once, each under a matmul of theirs (`column_matmul`).

Attention keeps its output because recomputing it would send keys and values around the ring a second time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from parcompile.model.layer_parts import modules_of, parts_of
from parcompile.plan import Plan
from parcompile.runtime.collectives import (
    copy_to_group,
    gather_from_sequence,
    reduce_from_group,
    reduce_scatter_to_sequence,
)
from parcompile.runtime.drawing import Redrawn
from parcompile.runtime.errors import everywhere
from parcompile.runtime.groups import Mesh
from parcompile.runtime.micro_batch import current, padding_mask, recompute_context
from parcompile.runtime.model.lora import without_peft
from parcompile.runtime.tensor_parallel import ColumnParallelLinear, RowParallelLinear, column_parallel
from parcompile.runtime.tensor_parallel.columns import column_outputs

from .host_activations import HostActivations

SEQUENCE_DIM = 1
"""Hugging Face activations are [B, S, H]."""

BLOCK_TAKES_INPUT = "parcompile_takes_input"
"""The attribute of a block that uses its hidden states beside its column layers."""

MASKS_PADDING = "parcompile_masks_padding"
"""The attribute of a block whose hidden states are zero where a prompt is padded."""
SHARES_ENTRY = "parcompile_shares_entry"
"""The attribute of a block whose column layers have been computed when it is called."""

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""What a module is called with: positional arguments, and those by name."""


class Region:
    """The tensor-parallel region of one model.

    With `sequence_parallel` the hidden states between the blocks are split over the ranks of `group`. A sequence that
    they do not divide is continued with zeros there, which nothing inside a region ever sees. Without `shares_entries`
    each column layer multiplies when it is called, as ZeRO stage 3 needs it, which gathers weights then.
    """

    def __init__(self, group: dist.ProcessGroup, *, sequence_parallel: bool, shares_entries: bool = True) -> None:
        self.group, self.sequence_parallel, self.shares_entries = group, sequence_parallel, shares_entries

    @property
    def options(self) -> dict[str, Any]:
        """How the layers of the region take and return hidden states."""
        return {
            "group": self.group,
            "sequence_parallel": self.sequence_parallel,
            # Counted from the end: some layers flatten rows and sequence, [B s, H], before their MLP.
            "sequence_dim": SEQUENCE_DIM - 3,
        }

    def enter(self, hidden: Tensor) -> Tensor:
        """[B, s, H] between the regions to [B, S, H] inside."""
        if self.sequence_parallel:
            whole = gather_from_sequence(hidden, SEQUENCE_DIM, self.group, current().sequence_length)
            return whole.contiguous()  # without its padding; blocks of experts view it as rows
        return copy_to_group(hidden, self.group)

    def leave(self, parts: Tensor) -> Tensor:
        """Parts of a sum [B, S, H] to the sum between the regions."""
        if self.sequence_parallel:
            return reduce_scatter_to_sequence(parts, SEQUENCE_DIM, self.group, pad=True)
        return reduce_from_group(parts, self.group)

    def enter_block(self, block: nn.Module, *, writes: bool = False) -> None:
        """Makes the hidden states that `block` is called with enter the region, for whatever it does with them.

        `writes`: in training it changes them in place, which autograd forbids for what a collective returns.
        """

        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
            hidden, put_back = _hidden_states(args, kwargs)
            entered = self.enter(hidden)
            return put_back(entered.clone() if writes and block.training else entered)

        block.register_forward_pre_hook(enter, with_kwargs=True)

    def enter_layer(self, layer: ColumnParallelLinear) -> None:
        """Tells a column layer that stands alone, as the head does, how long the sequence is."""
        layer.register_forward_pre_hook(
            lambda _, args, kwargs: (args, {**kwargs, "sequence_length": current().sequence_length}), with_kwargs=True
        )

    def enter_layers(self, block: nn.Module, layers: Sequence[ColumnParallelLinear]) -> None:
        """Lets the column layers of `block` take its hidden states in together.

        A block that has other weights too may use its hidden states elsewhere: it gets them whole.
        """
        takes_input = getattr(block, BLOCK_TAKES_INPUT, False) or not self.shares_entries
        if takes_input or any(_is_whole(module) for module in block.modules()):
            for layer in layers:
                layer.input_is_ready = True
            self.enter_block(block)
            return
        entry = _Entry(self, layers)
        setattr(block, SHARES_ENTRY, True)
        block.register_forward_pre_hook(entry.enter, with_kwargs=True)


def region_of(mesh: Mesh, group: dist.ProcessGroup) -> Region:
    """The region over the tp ranks, as the plan says."""
    spec = mesh.plan.spec
    return Region(group, sequence_parallel=spec.parallelism.sequence_parallel, shares_entries=not spec.shards_weights)


class _Entry:
    """Computes column layers as their block is called, and hands each its result when the block calls it.

    With sequence parallelism no rank needs the whole hidden states but for these matmuls: the block is handed a tensor
    of their shape that holds nothing (NaN, so that a use of it elsewhere cannot pass unseen).
    """

    def __init__(self, region: Region, layers: Sequence[ColumnParallelLinear]) -> None:
        self.region, self.layers = region, tuple(layers)
        self.token: Tensor | None = None
        self.results: dict[int, Any] = {}
        for layer in self.layers:
            layer.shared_forward = self.take

    def enter(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        hidden, put_back = _hidden_states(args, kwargs)
        if torch.compiler.is_compiling():
            # Nothing can be handed on between hooks there: the block gets its input whole, and each layer multiplies.
            return put_back(self.region.enter(hidden))
        length = current().sequence_length if self.region.sequence_parallel else None
        outs = column_parallel(hidden, self.layers, length)
        mask = padding_mask(hidden.device) if getattr(block, MASKS_PADDING, False) else None
        if mask is not None:
            outs = tuple(_of_zeros(out, mask, layer.bias) for out, layer in zip(outs, self.layers, strict=True))
        self.results = {id(layer): out for layer, out in zip(self.layers, outs, strict=True)}
        self.token = hidden
        if self.region.sequence_parallel:
            shape = (*outs[0].shape[:-1], hidden.shape[-1])
            self.token = hidden.new_full((1,), float("nan")).expand(shape)
        return put_back(self.token)

    def take(self, layer: ColumnParallelLinear, x: Tensor, _: int | None) -> Any:
        if torch.compiler.is_compiling():
            return column_outputs(x, (layer,), input_is_ready=True)[0]
        if x is not self.token or id(layer) not in self.results:
            raise everywhere(
                "a block calls one of its column-parallel layers twice, or with something else than its hidden states: "
                f"{layer} cannot be injected"
            )
        out = self.results.pop(id(layer))
        if not self.results:
            self.token = None  # nothing is kept alive beyond the last call
        return out


def _of_zeros(out: Tensor, mask: Tensor, bias: Tensor | None) -> Tensor:
    """What a linear layer gives [B, S, O] where its input is zero for padding, by a mask [B, S]."""
    return torch.where(mask[..., None] > 0, out, 0.0 if bias is None else bias)


def _is_whole(module: nn.Module) -> bool:
    """Whether a module has a matrix of its own that is not cut."""
    matrices = [one for one in module.parameters(recurse=False) if one.dim() > 1]
    # A convolution along the sequence, and a norm with weights of each head, take what column layers give.
    behind = isinstance(module, nn.Conv1d) or "Norm" in type(module).__name__
    return bool(matrices) and not (behind or isinstance(module, ColumnParallelLinear | RowParallelLinear))


def _hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Callable[[Tensor], Call]]:
    """What a block is called with, and a function that puts another tensor in its place."""
    if args:
        return args[0], lambda hidden: ((hidden, *args[1:]), kwargs)
    return kwargs["hidden_states"], lambda hidden: (args, {**kwargs, "hidden_states": hidden})


def recompute_as_planned(model: nn.Module, plan: Plan, rank: int) -> None:
    """Makes the layers of a rank, or named parts of them, recompute in backward as `activation_checkpointing` says."""
    kind = plan.spec.training.activation_checkpointing
    if not isinstance(kind, str):
        kind = kind[plan.groups.grid.coordinates(rank)["pp"]]
    stack = plan.parameters.layer[0].name.partition(".{layer}")[0]
    if parts := parts_of(kind):
        parted = {name for part in parts for name in modules_of(plan.spec.model.shape, part)}
        for layer in without_peft(model).get_submodule(stack).children():
            for module in (module for name, module in layer.named_modules() if name in parted):
                module.__class__ = with_mixin(_Recomputed, module.__class__)
        return
    if kind != "full":
        return
    again = _AGAIN
    if plan.spec.training.activation_offloading:
        host = HostActivations()
        again = partial(host.checkpoint, context_fn=_contexts)
        if plan.spec.parallelism.pp > 1:
            # Others go forward before this one goes backward.
            model.register_forward_hook(lambda *_: host.settle())
    if (rules := plan.spec.model.shape.user_module) is not None:
        _recompute_layers(model, rules.prefix.rstrip("."), again)
        return
    if not getattr(model, "supports_gradient_checkpointing", False):
        _recompute_layers(model, stack, again)
        return
    # transformers 5 warns of the older name.
    base: Any = without_peft(model)
    recompute_by_call(base, again)
    names = ("_activation_checkpointing_enable", "gradient_checkpointing_enable")
    next(getattr(base, name) for name in names if hasattr(base, name))()


def recompute_by_call(model: nn.Module, again: Callable[..., Any] | None = None) -> None:
    """Lets layers that a caller has recomputed, by a method of transformers, work on the micro-batch of their forward.

    Args:
        model: of transformers; others stay as they are.
        again: what recomputes, in the place of the method's own.
    """
    for module in model.modules():
        if hasattr(module, _SWITCH):
            setattr(module, _SWITCH, partial(_switch, getattr(type(module), _SWITCH), module, again or _AGAIN))


_SWITCH = "_set_gradient_checkpointing"
"""What all methods of transformers end in that switch recomputation on or off."""


def _switch(
    original: Callable[..., None],
    module: nn.Module,
    again: Callable[..., Any],
    enable: bool = True,
    gradient_checkpointing_func: Any = checkpoint,
    **options: Any,
) -> None:
    if getattr(gradient_checkpointing_func, "func", checkpoint) is not checkpoint:
        raise everywhere(
            "activation_checkpointing_enable(offload=True) on an injected model: leave offload out, and set "
            "training.activation_offloading of the plan"
        )
    original(module, enable, again, **options)


def _contexts(**moves: Any) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The `context_fn` of activation checkpointing: the micro-batch and the random numbers of the forward pass."""
    return recompute_context(Redrawn(), **moves)


_AGAIN: Callable[..., Any] = partial(checkpoint, use_reentrant=False, context_fn=_contexts)


@functools.cache
def with_mixin(mixin: Any, kind: Any) -> Any:
    """The class of a module with another one in front of it, under its own name."""
    return type(kind.__name__, (mixin, kind), {"__module__": kind.__module__})  # others look functions up there


class _Recomputed:
    """Mixed into the class of a module that is recomputed on its own, with its hooks: what they gather is not kept."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call: Any = super().__call__  # type: ignore[misc]
        if not cast(nn.Module, self).training or not torch.is_grad_enabled():
            return call(*args, **kwargs)
        return _AGAIN(call, *args, **kwargs)


def _recompute_layers(module: nn.Module, path: str, again: Callable[..., Any]) -> None:
    """Of a module that cannot do so by itself; `path` is the name of its list of layers."""
    for layer in module.get_submodule(path).children():
        forward = layer.forward

        def recomputed(*args: Any, forward: Any = forward, **kwargs: Any) -> Any:
            return again(forward, *args, **kwargs)

        layer.forward = recomputed
