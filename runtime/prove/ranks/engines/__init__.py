"""One module for each engine, each an adapter: FEATURES, PACKAGES, supports, build, step and full_parameters."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def whole_parameters(model: Any) -> dict[str, Tensor]:
    """Of a model without its wrapper, whose parameters may be shards; every rank calls it."""
    whole = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        whole[name.removeprefix("module.")] = value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
    return whole
