"""The one place where an injected model is called: what people give it becomes what its layers work on."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from parcompile.runtime.data.inputs import ready_inputs
from parcompile.runtime.groups import Mesh

_Call = tuple[tuple[Any, ...], dict[str, Any]]


def name_arguments(model: nn.Module) -> None:
    """Lets every hook of a model find what it is called with by its name."""
    parameters = inspect.signature(type(model).forward).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
    names = [one.name for one in parameters if one.kind in kinds][1:]

    def name(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        return args[len(names) :], {**dict(zip(names, args, strict=False)), **kwargs}

    model.register_forward_pre_hook(name, with_kwargs=True)


def take_inputs(model: nn.Module, mesh: Mesh, *, first: bool = False) -> None:
    """Makes every call of a model ready for its layers; `first`: before the hooks that it has."""

    def take(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        if args and "input_ids" not in kwargs:
            args, kwargs = args[1:], {"input_ids": args[0], **kwargs}
        return args, ready_inputs(kwargs, mesh)

    model.register_forward_pre_hook(take, with_kwargs=True, prepend=first)
