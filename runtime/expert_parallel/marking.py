"""Experts that are dealt over ep, as DeepSpeed knows them.

Its optimizers then sum their gradients over the expert-dp ranks alone, shard their states over these, and divide by dp
as all other gradients are divided.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from parcompile.layout.grid import Axis
from parcompile.layout.groups import EXPERT_DP
from parcompile.runtime.deepspeed_patches.experts import expert_settings, is_expert, mark_expert, with_expert_layers
from parcompile.runtime.deepspeed_patches.norm import norm_at_once
from parcompile.runtime.deepspeed_patches.process_groups import register_expert_groups
from parcompile.runtime.groups import Mesh

mark_dealt = mark_expert
is_dealt = is_expert


@contextmanager
def for_deepspeed(mesh: Mesh, model: nn.Module, **options: Any) -> Iterator[dict[str, Any]]:
    """Within it `deepspeed.initialize` makes an engine that knows which parameters are experts.

    Args:
        mesh: the live ranks.
        model: the injected model.
        options: what `deepspeed.initialize` is called with; `model_parameters`, and the groups of an optimizer that is
            there already, are taken apart into experts and others.

    Yields:
        The options, with the model, that DeepSpeed is to get.
    """
    options["model"] = model
    with ExitStack() as entered:
        if mesh.parallel_group(Axis.EP) is not None:
            register_expert_groups(mesh.group(Axis.EP), mesh.group(EXPERT_DP))
            optimizer = options.get("optimizer")
            given = options.get("model_parameters")
            ep = mesh.size(Axis.EP)
            groups = [] if given is None else apart(given, ep)
            if isinstance(optimizer, torch.optim.Optimizer):
                optimizer.param_groups[:] = groups = apart(optimizer.param_groups, ep)
            elif given is not None:
                options["model_parameters"] = groups
            if any(is_dealt(parameter) for group in groups for parameter in group["params"]):
                entered.enter_context(with_expert_layers(model))
        yield options


def take_over_norm(engine: Any, mesh: Mesh) -> None:
    """Makes the norm of an engine that of all experts. Every rank, since stages without experts take part in it."""
    if mesh.parallel_group(Axis.EP) is not None:
        norm_at_once(engine.optimizer)


def apart(given: Iterable[Any], ep: int) -> list[dict[str, Any]]:
    """Parameters, or groups of them, as groups of experts and groups of others; each with the settings that it had."""
    entries = list(given)
    groups = entries if entries and isinstance(entries[0], dict) else [{"params": entries}]
    found = []
    for group in groups:
        parameters = list(group["params"])
        others = [one for one in parameters if not is_dealt(one)]
        experts = [one for one in parameters if is_dealt(one)]
        if others:
            found.append({**group, "params": others})
        if experts:
            found.append({**expert_settings(group, ep), "params": experts})
    return found
