"""Builds the model of a plan with its initial weights: the same whole weights for every layout."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from parcompile.plan import Plan
from parcompile.runtime.errors import RunError

from .configuration import planned_config
from .model_class import causal_model


def build_model(plan: Plan, seed: int | None = None) -> nn.Module:
    """The plan's Hugging Face model, whole, in fp32 on the CPU, with weights drawn from `seed` (default: the plan's).

    The random state of the caller is left as it was.

    Raises:
        RunError: transformers is missing or does not know the model type.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(plan.spec.training.seed if seed is None else seed)
        return instantiate(plan, torch.float32)


def persistent_buffers(plan: Plan) -> dict[str, Tensor]:
    """What the plan's model keeps in its files beside parameters, as it is when the model is built."""
    with parameters_without_memory():
        return persistent_of(instantiate(plan, torch.float32))


def persistent_of(model: nn.Module) -> dict[str, Tensor]:
    """The buffers of a model that its files hold."""
    stored = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in stored}


def instantiate(plan: Plan, dtype: torch.dtype) -> nn.Module:
    """The plan's Hugging Face model, whole, on the current default device.

    Raises:
        RunError: the plan is for a user module, transformers is missing, does not know the model type, or builds no
            model of its configuration.
    """
    if plan.spec.model.shape.user_module is not None:
        raise RunError(
            "the plan is for a module of your own, which only you can build: pass it to initialize as model=",
            everywhere=True,
        )
    config = planned_config(plan)
    # A cache of keys and values serves generation; in training it would only hold memory.
    config.use_cache = False
    try:
        model: nn.Module = causal_model(config, dtype=dtype)
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise RunError(
            f"transformers builds no {config.model_type} of the plan's configuration: {error}", everywhere=True
        ) from error
    return model


@contextlib.contextmanager
def parameters_without_memory() -> Iterator[None]:
    """Parameters that modules register go to the meta device; buffers stay, since no file holds them."""
    register = nn.Module.register_parameter

    def register_empty(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = register_empty  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
