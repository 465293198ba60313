"""The MLP of a layer tile by tile along the sequence: neither its gathered input nor its features exist whole.

RMSNorms around attention and MLP, and the one behind the last layer, go in tiles, too. Whole, each has five tensors of
all its tokens in float32 in backward.

Shapes: B rows, s tokens of each that this rank has between the regions, tp ranks, f features between the projections.
A tile is the same run of every rank's tokens: with sequence parallelism its input is gathered and its output scattered
for it alone. An MLP treats each token by itself, so that their order is of no matter.

What goes into the MLP [B, s, H] is all that is kept for backward. There each tile is computed again and goes backward;
the gradients of weights add up in float32. They arrive at the parameters once, so that whoever waits for gradients
(ZeRO, sums over tp) sees those of an MLP that is computed whole.

Source: ALST (arXiv 2506.13996, section 3.1); DeepSpeed's `TiledMLP` keeps the sums in the type of the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from parcompile.layout.shards import mlp_tile_length
from parcompile.model.derived_rows import dense_mlps
from parcompile.model.layer_parts import tiled_norms
from parcompile.runtime.collectives import linear_map
from parcompile.runtime.drawing import draws
from parcompile.runtime.errors import everywhere
from parcompile.runtime.micro_batch import current, working_on
from parcompile.runtime.ring_attention.kernels import spans
from parcompile.runtime.tensor_parallel import RowParallelLinear
from parcompile.runtime.tensor_parallel.cross_entropy import exact
from parcompile.runtime.tensor_parallel.partial import leave_partial, mark_summed, summing

from .mechanisms import Placed
from .regions import Call, with_mixin

_OfValues = Callable[[list[Any]], Call]
"""What a module is called with, of values in order."""


def tile_mlps(placed: Placed) -> None:
    """Makes dense MLPs of this rank's layers, and RMSNorms beside them, compute tile by tile, in place.

    Layers with experts stay as they are.

    Raises:
        RunError: an MLP draws at random.
    """
    spec, shape = placed.mesh.plan.spec, placed.shape
    norms, tiled = tiled_norms(shape), []
    for number, layer in placed.layers(dense_mlps(shape)):
        module = layer.get_submodule(placed.family.mlp)
        if draws(module):
            raise everywhere(
                f"training.tiled_mlp: {placed.stack}.{number}.{placed.family.mlp} drops out at random, by the place "
                "of each token, which a tile does not know: set the key to false, or the dropout of model and adapters "
                "to 0"
            )
        tiled += [module, *(layer.get_submodule(name) for name in norms)]
    # The norm behind the last layer is of the same class.
    kinds = {type(one) for one in tiled}
    tiled += [
        one for one in placed.model.get_submodule(placed.stack.rpartition(".")[0]).children() if type(one) in kinds
    ]
    for one in tiled:
        _Tiled(one, placed.mesh.size("tp") if spec.parallelism.sequence_parallel else 1)
        if spec.shards_weights:
            # DeepSpeed gathers all weights of a leaf around its call, and reduces their gradients behind it.
            one._z3_leaf = True
            one.__class__ = with_mixin(_Leaf, cast(Any, type(one)))


class _Leaf:
    """Mixed into the class of a leaf, whose hooks make its output a view: falcon adds to it in place."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found: Tensor = super().__call__(*args, **kwargs)  # type: ignore[misc]
        return linear_map(found, Tensor.detach, lambda gradient: gradient)


class _Tiled:
    """Takes the place of a module's forward; the hooks that it has before run for each tile."""

    def __init__(self, module: nn.Module, share: int) -> None:
        with_kwargs = module._forward_pre_hooks_with_kwargs
        self.module, self.share, self.forward = module, share, module.forward
        self.hooks = [(hook, key in with_kwargs) for key, hook in module._forward_pre_hooks.items()]
        module._forward_pre_hooks.clear()
        with_kwargs.clear()
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module gives; [B, s, …] for tensors [B, s, …]."""
        values, count, names = [*args, *kwargs.values()], len(args), list(kwargs)

        def call(values: list[Any]) -> Call:
            # It lives as long as the graph does: it holds no tensors.
            return tuple(values[:count]), dict(zip(names, values[count:], strict=True))

        tensors = [one for one in values if isinstance(one, Tensor)]
        rows, length, *_ = tensors[0].shape
        step = mlp_tile_length(tensors[0].shape[-1], rows, self.share)
        if length <= step or torch.compiler.is_compiling():
            return self.of_tile(*call(values))
        if any(one.shape[:2] != (rows, length) for one in tensors):
            shapes = ", ".join(str(tuple(one.shape)) for one in tensors)
            raise everywhere(
                f"training.tiled_mlp: an MLP is called with tensors {shapes}, which are not of the same tokens: set "
                "the key to false"
            )
        trained = [(name, one) for name, one in self.module.named_parameters() if one.requires_grad]
        work = _Tiles(self, values, call, step, [name for name, _ in trained])
        if not torch.is_grad_enabled() or not (trained or any(one.requires_grad for one in tensors)):
            return work.forward(tensors)
        weights = [
            summing(one, cast(Any, owner).group) if _sums_bias(owner, one) else one
            for one, owner in ((one, self.module.get_submodule(name.rpartition(".")[0])) for name, one in trained)
        ]
        token = cast(Any, _Begin).apply(work, len(tensors), *tensors, *weights)
        return cast(Any, _End).apply(work, token, *[one.detach() for one in tensors])

    def of_tile(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the module gives for the tokens of a tile."""
        for hook, takes_kwargs in self.hooks:
            if takes_kwargs:
                args, kwargs = hook(self.module, args, kwargs) or (args, kwargs)
            else:
                found = hook(self.module, args)
                args = args if found is None else found if isinstance(found, tuple) else (found,)
        return self.forward(*args, **kwargs)


class _Tiles:
    """One call of an MLP: what its backward pass has to know of it, beside tensors."""

    gradient: Tensor | None = None
    """Of the output, from the end of the call on its way to the beginning."""

    def __init__(self, mlp: _Tiled, values: list[Any], call: _OfValues, step: int, names: list[str]) -> None:
        self.mlp, self.call, self.step, self.names = mlp, call, step, names
        self.values = [None if isinstance(one, Tensor) else one for one in values]
        self.places = [place for place, one in enumerate(values) if isinstance(one, Tensor)]
        self.micro_batch = current()
        self.device = next(one for one in values if isinstance(one, Tensor)).device.type
        on = self.device != "meta" and torch.is_autocast_enabled(self.device)
        self.autocast = torch.get_autocast_dtype(self.device) if on else None

    def forward(self, tensors: list[Tensor]) -> Tensor:
        """The output, of which one tile is computed at a time."""
        rows, length, *_ = tensors[0].shape
        out: Tensor | None = None
        for own in spans(0, length, self.step):
            with self._on_tile(own):
                part = self.mlp.of_tile(*self._of_tile([one[:, own].contiguous() for one in tensors]))
            if not isinstance(part, Tensor):
                raise everywhere(
                    f"training.tiled_mlp: an MLP gives {type(part).__name__}, no tensor: set the key to false"
                )
            if out is None:
                out = part.new_empty(rows, length, *part.shape[2:])
            out[:, own] = part
        assert out is not None
        return out

    def backward(self, tensors: list[Tensor], needed: tuple[bool, ...]) -> list[Tensor | None]:
        """The gradients of the tensors and of the trained weights."""
        gradient, self.gradient = self.gradient, None
        assert gradient is not None
        owners = [self.mlp.module.get_submodule(name.rpartition(".")[0]) for name in self.names]
        keys = [name.rpartition(".")[2] for name in self.names]
        weights = [cast(Tensor, owner._parameters[key]) for owner, key in zip(owners, keys, strict=True)]
        found: list[Tensor | None] = [
            torch.empty_like(one, memory_format=torch.contiguous_format) if need else None
            for one, need in zip(tensors, needed, strict=False)
        ]
        sums = [torch.zeros(one.shape, dtype=exact(one.dtype), device=one.device) for one in weights]
        # Others hook into the gradients of parameters, which are not theirs yet.
        leaves = [nn.Parameter(one.detach()) for one in weights]
        for owner, weight, leaf in zip(owners, weights, leaves, strict=True):
            if _sums_bias(owner, weight):
                mark_summed(leaf, cast(Any, owner).group)
        leave_partial(leaves)
        try:
            for owner, key, leaf in zip(owners, keys, leaves, strict=True):
                owner._parameters[key] = leaf
            for own in spans(0, tensors[0].shape[1], self.step):
                with torch.enable_grad(), self._on_tile(own), self._as_cast():
                    taken = [
                        one[:, own].detach().contiguous().requires_grad_(need)
                        for one, need in zip(tensors, needed, strict=False)
                    ]
                    part = self.mlp.of_tile(*self._of_tile(taken))
                inputs = [one for one in taken if one.requires_grad]
                parts = torch.autograd.grad(part, [*inputs, *leaves], gradient[:, own], allow_unused=True)
                del part, taken
                for whole, one in zip((one for one in found if one is not None), parts, strict=False):
                    whole[:, own] = 0 if one is None else one
                for total, one in zip(sums, parts[len(inputs) :], strict=True):
                    if one is not None:
                        total += one
                del parts
        finally:
            for owner, key, weight in zip(owners, keys, weights, strict=True):
                owner._parameters[key] = cast(nn.Parameter, weight)
        while sums:
            found.append(sums.pop(0).to(weights[len(found) - len(tensors)].dtype))
        return found

    def _of_tile(self, tensors: list[Tensor]) -> Call:
        values = list(self.values)
        for place, one in zip(self.places, tensors, strict=True):
            values[place] = one
        return self.call(values)

    def _on_tile(self, own: slice) -> Any:
        """Within it the sequence is the tile, of all ranks."""
        tokens = (own.stop - own.start) * self.mlp.share
        return working_on(replace(self.micro_batch, sequence_length=tokens))

    def _as_cast(self) -> AbstractContextManager[Any]:
        if self.device == "meta":
            return nullcontext()
        return torch.autocast(self.device, dtype=self.autocast, enabled=self.autocast is not None)


def _sums_bias(owner: Any, parameter: Tensor) -> bool:
    """Whether a row-parallel linear sums the gradient of its bias itself: once for all tiles, not in each."""
    return isinstance(owner, RowParallelLinear) and owner.sequence_parallel and parameter is owner.bias


class _Begin(torch.autograd.Function):
    """Keeps the input, and gives its gradient.

    It saves before anything is computed: a layer that is recomputed for its backward pass stops here, where nothing
    behind the MLP is needed again.
    """

    @staticmethod
    def forward(ctx: Any, work: _Tiles, count: int, *tensors: Tensor) -> Tensor:
        ctx.work = work
        ctx.save_for_backward(*tensors[:count])
        return tensors[0].new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        tensors = list(ctx.saved_tensors)
        return None, None, *ctx.work.backward(tensors, ctx.needs_input_grad[2 : 2 + len(tensors)])


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, work: _Tiles, _: Tensor, *tensors: Tensor) -> Tensor:
        ctx.work = work
        return work.forward(list(tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.work.gradient = grads[0]
        return None, grads[0].new_zeros(()), *[None] * (len(ctx.needs_input_grad) - 2)
