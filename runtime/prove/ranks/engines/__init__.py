"""One module for each engine, each an adapter: FEATURES, PACKAGES, and the functions that the server calls.

supports(cell): why the engine has no such run, or None. build(model, cell): what this rank steps. step(engine, batch,
cell): one optimizer step on a global batch; its loss, and the norm of its gradients before clipping, or None.
full_parameters(engine, cell): whole, by the names of transformers, after the first step and the last. save(engine,
folder, cell): what load(model, folder, cell) goes on from. shims(cell): what of the engine is replaced.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..tracing import full


def gathered(own: Any) -> list[Any]:
    """What each rank has; every rank calls it."""
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, own)
    return everyones


def whole_parameters(model: Any) -> dict[str, Tensor]:
    """Of a model without its wrapper, whose parameters may be shards; every rank calls it."""
    return {name.removeprefix("module."): full(value).clone() for name, value in model.named_parameters()}
