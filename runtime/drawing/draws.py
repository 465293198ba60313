"""Does a model draw random numbers in training? Its modules of torch and the code of its classes tell."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

_KINDS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)

_NAMES = frozenset(
    {
        *("dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"),
        *("native_dropout", "rrelu", "gumbel_softmax", "rand", "randn", "randint", "randperm", "rand_like"),
        *("randn_like", "randint_like", "normal", "poisson", "bernoulli", "multinomial", "uniform_", "normal_"),
        *("exponential_", "bernoulli_", "random_", "cauchy_", "geometric_", "log_normal_"),
    }
)
"""Functions and methods of torch that draw."""

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
