"""Does a model draw random numbers in training, and where do its tensors lie in the whole batch?

Its modules of torch and the code of its classes tell whether it draws. Each token of the whole batch has a key.

Shapes: B rows, S tokens of a row on this cp rank, s its share of them under sequence parallelism.
"""

from __future__ import annotations

import functools
import inspect
import math
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parcompile.layout.sequence import CpLayout, token_ranges
from parcompile.runtime.errors import everywhere
from parcompile.runtime.groups import Mesh
from parcompile.runtime.micro_batch import FIRST_SAMPLE, MicroBatch, current
from parcompile.runtime.ring_attention.kernels.kernel import combined

_KINDS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)

DRAWING = frozenset(
    {
        *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, F.rrelu),
        *(F.gumbel_softmax, torch.dropout, torch.dropout_, torch.alpha_dropout, torch.native_dropout),
        *(torch.rand, torch.randn, torch.randint, torch.randperm, torch.rand_like, torch.randn_like),
        *(torch.randint_like, torch.normal, torch.poisson, torch.bernoulli, torch.multinomial),
        *(Tensor.bernoulli, Tensor.multinomial, Tensor.uniform_, Tensor.normal_, Tensor.exponential_),
        *(Tensor.bernoulli_, Tensor.random_, Tensor.cauchy_, Tensor.geometric_, Tensor.log_normal_),
    }
)
"""Functions and methods of torch that draw."""
_NAMES = frozenset(one.__name__ for one in DRAWING)

_BY_CHANCE = frozenset({"dropout", "uniform_"})
"""What models of transformers call only where an attribute of the module, a chance or a width, is above 0."""

_REPLACED = "eager_attention_forward"
"""Of transformers: the ring runs in its place."""


def draws(model: nn.Module) -> bool:
    """Whether a forward pass in training may draw; attention dropout, which the ring draws, does not count."""
    return any(_draws(module) for module in model.modules())


def trains_at_random(model: nn.Module) -> bool:
    """Whether training and evaluating differ: something is drawn, attention dropout included."""
    config: Any = getattr(model, "config", None)
    values = config.to_dict() if hasattr(config, "to_dict") else {}
    chances = [value for key, value in values.items() if "drop" in key and isinstance(value, int | float)]
    return any(chances) or draws(model)


def _draws(module: nn.Module) -> bool:
    if isinstance(module, _KINDS):
        return module.p > 0
    if isinstance(module, nn.RReLU):
        return True
    kind: Any = type(module)
    found = _named(kind)
    if not found or not kind.__module__.startswith("transformers."):
        return bool(found)
    chances = [
        value
        for name, value in vars(module).items()
        if isinstance(value, int | float) and any(word in name for word in ("drop", "jitter"))
    ]
    return not (found <= _BY_CHANCE and not any(chances))


@functools.cache
def _named(kind: Any) -> frozenset[str]:
    """The functions that draw which the forward pass of a class names, in itself or in what it calls."""
    if kind.__module__.startswith(("torch.", "parcompile.runtime.")):
        return frozenset()
    forward = kind.forward
    if not isinstance(forward, types.FunctionType):
        return frozenset()
    found: set[str] = set()
    seen: set[types.CodeType] = set()
    waiting = [forward]
    while waiting:
        function = inspect.unwrap(waiting.pop())
        if function.__code__ in seen:
            continue
        seen.add(function.__code__)
        names = set(_names(function.__code__))
        found |= names & _NAMES
        for name in names - {_REPLACED}:
            called: Any = getattr(kind, name, None) or function.__globals__.get(name)
            if isinstance(called, types.FunctionType) and called.__module__ == kind.__module__:
                waiting.append(called)
    return frozenset(found)


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


_ROWS, _POSITIONS = 0x1F123BB5, 0x6A09E667


@dataclass(frozen=True, slots=True)
class Place:
    """This rank's part of each sequence."""

    seed: int
    """The plan's."""
    layout: CpLayout
    cp: int
    cp_index: int
    tp: int
    tp_index: int
    sequence_parallel: bool

    @classmethod
    def of(cls, mesh: Mesh) -> Place:
        """As the plan says."""
        spec = mesh.plan.spec
        return cls(
            spec.training.seed,
            spec.parallelism.cp_layout,
            mesh.size("cp"),
            mesh.index("cp"),
            mesh.size("tp"),
            mesh.index("tp"),
            spec.parallelism.sequence_parallel,
        )

    def width(self, shape: Sequence[int], what: str) -> int:
        """Elements of a tensor for each of its tokens.

        Raises:
            RunError: its shape does not tell where its tokens are; `what` names who draws.
        """
        return math.prod(shape[self._token_dims(shape, what)[0] :])

    def keys(self, shape: Sequence[int], word: int, device: torch.device, what: str) -> Tensor:
        """A word for each token of a tensor of this shape, from `word` and the token's place: int64 [tokens].

        Raises:
            RunError: as for `width`, or the number of the first row is not known.
        """
        _, share = self._token_dims(shape, what)
        micro_batch = current()
        if micro_batch.token_places is not None:
            places = micro_batch.token_places[0].to(device)
            samples, positions = self._shared(places, share).unbind(1)
            return combined(combined(word, samples, _ROWS), positions, _POSITIONS)
        if micro_batch.first_sample is None:
            raise everywhere(
                f"{what}: call the model with {FIRST_SAMPLE}, the number of the batch's first sequence in the data, as "
                "the engine's loader does, or switch the drawing off in the model's configuration"
            )
        rows, length = _sizes(micro_batch, what)
        first = micro_batch.first_sample
        by_row = combined(word, torch.arange(first, first + rows, device=device), _ROWS)
        layout = self.layout if self.cp > 1 else CpLayout.CONTIGUOUS
        ranges = token_ranges(layout, self.cp, self.cp_index, length * self.cp)
        positions = torch.cat([torch.arange(one.start, one.stop, one.step, device=device) for one in ranges])
        return combined(by_row.unsqueeze(1), self._shared(positions, share), _POSITIONS).flatten()

    def _shared(self, tokens: Tensor, share: int | None) -> Tensor:
        """The share of a tensor-parallel rank; what continues the sequence to a multiple is nobody's token."""
        if share is None:
            return tokens
        padding = tokens.new_zeros(share * self.tp - tokens.shape[0], *tokens.shape[1:])
        return torch.cat([tokens, padding]).narrow(0, share * self.tp_index, share)

    def _token_dims(self, shape: Sequence[int], what: str) -> tuple[int, int | None]:
        """How many of the first dims are tokens, and the share of each row that they are (None: all of it)."""
        rows, length = _sizes(current(), what)
        lengths: list[tuple[int, int | None]] = [(length, None)]
        if self.sequence_parallel and self.tp > 1:
            share = -(-length // self.tp)
            lengths.append((share, share))
        for tokens, part in lengths:
            if tuple(shape[:2]) == (rows, tokens):
                return 2, part
            if shape and shape[0] == rows * tokens:
                return 1, part
        raise everywhere(
            f"{what}, of shape {list(shape)}: only numbers for the tokens of a micro-batch, here "
            f"[{rows}, {length}, …], are drawn alike in every layout"
        )


def _sizes(micro_batch: MicroBatch, what: str) -> tuple[int, int]:
    if micro_batch.rows is None or micro_batch.sequence_length is None:
        raise everywhere(f"{what}: call the model with input_ids, whose shape says where a token is")
    return micro_batch.rows, micro_batch.sequence_length
