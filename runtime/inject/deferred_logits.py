"""Logits that are not computed until somebody looks at them: the loss takes the head's input in their place.

The head returns a tensor of their shape that holds nothing. What a model then does to each logit by itself (a scale, a
cap, another type) is remembered; the loss applies it to a chunk of tokens at a time (`linear_cross_entropy`). Any other
use of the tensor computes the logits whole, as the head would have, so that no other program has to know of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from parcompile.layout.shards import loss_chunk_tokens
from parcompile.runtime.errors import everywhere
from parcompile.runtime.labels import IGNORED_LABEL
from parcompile.runtime.micro_batch import MicroBatch, current, working_on
from parcompile.runtime.tensor_parallel import ColumnParallelLinear, linear_cross_entropy

from .regions import with_mixin

_Function = Callable[[Tensor], Tensor]


class DeferredLogits(Tensor):
    """What a head would give [B, S, v] for hidden states [B, S, H], or [B, S/tp, H] with sequence parallelism."""

    is_deferred = True
    head: Any
    hidden: Tensor
    functions: tuple[_Function, ...]
    """Of each logit by itself, in order."""
    micro_batch: MicroBatch
    _computed: Tensor | None

    @staticmethod
    def of(
        head: Any,
        hidden: Tensor,
        micro_batch: MicroBatch,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        functions: tuple[_Function, ...] = (),
    ) -> DeferredLogits:
        """Those of `head` for `hidden`, with `functions` of them."""
        logits: DeferredLogits = Tensor._make_wrapper_subclass(
            DeferredLogits, shape, dtype=dtype, device=hidden.device, requires_grad=torch.is_grad_enabled()
        )
        logits.head, logits.hidden, logits.functions, logits.micro_batch = head, hidden, functions, micro_batch
        logits._computed = None
        return logits

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answers what needs no logits, remembers what happens to each of them, and computes them for all else."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _OF_SHAPE:
                return func(*args, **kwargs)
            if isinstance(args[0] if args else None, DeferredLogits) and _is_of_each(func, args[1:], kwargs):
                return args[0]._followed_by(lambda logits: func(logits, *args[1:], **kwargs))
            return func(*_with_logits(args), **_with_logits(kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Of what does not pass by Python's functions of torch."""
        return func(*_with_logits(args), **_with_logits(kwargs or {}))

    def _followed_by(self, function: _Function) -> DeferredLogits:
        example = function(torch.empty(1, self.shape[-1], dtype=self.dtype, device="meta"))
        shape = (*self.shape[:-1], example.shape[-1])
        return self.of(self.head, self.hidden, self.micro_batch, shape, example.dtype, (*self.functions, function))

    def of_tokens(self, logits: Tensor) -> Tensor:
        """What the model makes of what its head gives for some tokens [t, v]."""
        return functools.reduce(lambda values, function: function(values), self.functions, logits)

    def whole(self) -> Tensor:
        """The logits, computed once."""
        if self._computed is None:
            with working_on(self.micro_batch):
                self._computed = self.of_tokens(self.head.logits_of(self.hidden))
        return self._computed

    def summed_loss(self, labels: Tensor, z_loss: float) -> Tensor:
        """The sum of the losses of all tokens, a scalar, the same on all ranks of tp; `labels` [B, S]."""
        with torch._C.DisableTorchFunctionSubclass(), working_on(self.micro_batch):
            return cast(Tensor, self.head.loss_of(self, labels, z_loss))


def defer_logits(head: nn.Module, vocab_size: int) -> None:
    """Makes a model's head return `DeferredLogits`, in place.

    Raises:
        RunError: the head is something else than a linear layer.
    """
    if type(head) not in (nn.Linear, ColumnParallelLinear):
        kind = type(head).__name__
        raise everywhere(
            f"training.linear_cross_entropy: the head is a layer of the class {kind}, not a plain linear one: set the "
            "key to false"
        )
    head.__class__ = with_mixin(_DeferringHead, cast(Any, type(head)))
    head.vocab_size = vocab_size  # type: ignore[assignment]


class _DeferringHead:
    """Mixed into the class of a head: its hooks run when logits or the loss are computed, not when it is called."""

    vocab_size: int
    weight: Tensor
    bias: Tensor | None

    def __call__(self, hidden: Tensor) -> Any:
        if torch.compiler.is_compiling() or hidden.dim() != 3:
            return self.logits_of(hidden)
        length = hidden.shape[1]
        if self._shares_sequence:
            length = current().sequence_length or length
        return DeferredLogits.of(self, hidden, current(), (len(hidden), length, self._columns), self.weight.dtype)

    def logits_of(self, hidden: Tensor) -> Tensor:
        """What the head gives."""
        return cast(Tensor, super().__call__(hidden))  # type: ignore[misc]

    def loss_of(self, logits: DeferredLogits, labels: Tensor, z_loss: float) -> Tensor:
        """The sum of the tokens' losses."""
        return cast(Tensor, super().__call__(logits.hidden, loss=(logits, labels, z_loss)))  # type: ignore[misc]

    def forward(self, hidden: Tensor, loss: tuple[DeferredLogits, Tensor, float] | None = None, **options: Any) -> Any:
        """The logits, or the sum of the losses of `labels`."""
        if loss is None:
            return super().forward(hidden, **options)  # type: ignore[misc]
        logits, labels, z_loss = loss
        return linear_cross_entropy(
            hidden,
            self.weight,
            self.bias,
            labels,
            group=getattr(self, "group", None),
            sequence_parallel=self._shares_sequence,
            chunk_tokens=loss_chunk_tokens(self._columns),
            vocab_size=self.vocab_size,
            ignore_index=IGNORED_LABEL,
            z_loss=z_loss,
            elementwise=logits.of_tokens if logits.functions else None,
        )

    @property
    def _shares_sequence(self) -> bool:
        return bool(getattr(self, "sequence_parallel", False))

    @property
    def _columns(self) -> int:
        """Of this rank, also where ZeRO stage 3 holds a shard of the weight."""
        return int(getattr(self, "local_size", None) or self.out_features)  # type: ignore[attr-defined]


_OF_SHAPE = frozenset(
    {
        *(Tensor.dim, Tensor.size, Tensor.numel, Tensor.is_floating_point),
        *(
            getattr(Tensor, name).__get__
            for name in (
                *("shape", "dtype", "device", "is_meta", "layout", "ndim", "is_cpu", "is_cuda"),
                *("requires_grad", "grad_fn", "is_leaf"),
            )
        ),
    }
)
"""What needs no logits. DeepSpeed asks each output for its grad_fn, to know when backward is done: these have none."""

_OF_EACH = frozenset(
    {
        *(torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__),
        *(torch.div, Tensor.div, Tensor.__truediv__),
        *(torch.tanh, Tensor.tanh, F.tanh),
        *(Tensor.float, Tensor.to, Tensor.contiguous),
    }
)
"""Functions of each logit by itself, with a number or a type as further arguments."""


def _is_of_each(func: Any, others: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function treats the logits of each token alike: numbers and types alone, or words `[..., :n]`."""
    if func is Tensor.__getitem__:
        (where,) = others
        return isinstance(where, tuple) and len(where) == 2 and where[0] is ... and isinstance(where[1], slice)
    return func in _OF_EACH and all(isinstance(one, int | float | torch.dtype) for one in (*others, *kwargs.values()))


def _with_logits(given: Any) -> Any:
    """The same with tensors that hold logits."""
    return tree_map_only(DeferredLogits, DeferredLogits.whole, given)
