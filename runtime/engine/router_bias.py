"""The correction bias of routers, moved towards experts that are chosen too seldom: balance without a loss for it.

After the last backward pass of a step and before the optimizer's, whether that is skipped or not,

    bias += rate · sign(mean load − load of the expert)

with the load counted over all tokens of the whole batch: of all micro-batches, and of all ranks of dp · cp. Tokens that
are padding count. Source: arXiv 2408.15664, algorithm 1; Megatron-Core's `moe_router_bias_update_rate`, which counts
and moves in the same order (`_update_router_expert_bias` of core/distributed/finalize_model_grads.py and
`get_updated_expert_bias` of core/transformer/moe/moe_utils.py). As there, the bias is kept in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parcompile.model.blocks.experts import CORRECTION_BIASES
from parcompile.runtime.errors import everywhere
from parcompile.runtime.groups import Mesh
from parcompile.runtime.micro_batch import is_repeated
from parcompile.runtime.router_losses import layer_of

KEPT = "parcompile_router_biases"
"""The attribute of a model that holds its `RouterBiases`."""


class RouterBiases:
    """The biases of a model's routers, and how often each expert was chosen in this step.

    Args:
        model: as DeepSpeed gets it.
        mesh: the live ranks.
        rate: how far a bias moves in a step.

    Raises:
        RunError: a bias has no experts beside it, or ZeRO stage 3 shards it.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, rate: float) -> None:
        self._model, self._mesh, self._rate = model, mesh, rate
        found = list(_biases(model))
        self._names = [name for name, _ in found]
        sharded = [name for name in self._names if isinstance(_of(model, name), nn.Parameter)]
        if sharded and mesh.plan.spec.shards_weights:
            raise everywhere(
                f"router.bias_update_rate {rate} at zero.stage 3: {sharded[0]} is a parameter, which this stage "
                "shards; use zero.stage 2, or leave the rate out"
            )
        # DeepSpeed casts the model to the type of the weights, in which a small rate is lost.
        self._before = [_of(model, name).detach().float().clone() for name in self._names]
        self._loads = [torch.zeros(bias.numel(), dtype=torch.long, device=mesh.device) for bias in self._before]
        self.loads = [one.double() for one in self._loads]
        """How often training has chosen each expert on this rank; who reads them sets them to zero."""
        self.layers = list(map(layer_of, self._names))
        """Of each bias its layer."""
        for (_, experts), load in zip(found, self._loads, strict=True):
            experts.register_forward_pre_hook(_counting(load))

    def attach(self, engine: Any) -> None:
        """Lets the steps of an engine, which was made of the model, move the biases."""
        for name, before in zip(self._names, self._before, strict=True):
            bias = _of(self._model, name)
            bias.data = before.to(bias.device)
        step = engine.step

        def move_and_step(*args: Any, **options: Any) -> Any:
            if engine.is_gradient_accumulation_boundary():
                self._move()
            return step(*args, **options)

        engine.step = move_and_step

    @torch.no_grad()
    def _move(self) -> None:
        if not self._loads:
            return
        for seen, load in zip(self.loads, self._loads, strict=True):
            seen += load
        loads = torch.cat(self._loads)
        dist.all_reduce(loads, group=self._mesh.group("dp-cp"))
        if (group := self._mesh.parallel_group("tp")) is not None:
            # All of them see the same tokens, or each a part of them: the signs are those of the whole batch.
            dist.all_reduce(loads, group=group)
        for name, load in zip(self._names, torch.split(loads, [len(one) for one in self._loads]), strict=True):
            bias = _of(self._model, name)
            # In whole numbers: a load that is the mean leaves its bias where it is.
            bias += self._rate * torch.sign(load.sum() - load * len(load)).view_as(bias)
        for one in self._loads:
            one.zero_()


def keep_biases(model: nn.Module, mesh: Mesh) -> None:
    """Makes biases ready to be moved, where the plan says so, before DeepSpeed gets the model.

    Raises:
        RunError: see `RouterBiases`.
    """
    router = mesh.plan.spec.training.router
    rate = None if router is None else router.bias_update_rate
    if rate is not None and getattr(model, KEPT, None) is None:
        setattr(model, KEPT, RouterBiases(model, mesh, rate))


def attach_biases(engine: Any) -> None:
    """Lets the steps of an engine move the biases of its model, if they are to be."""
    biases: RouterBiases | None = getattr(engine.module, KEPT, None)
    if biases is not None:
        biases.attach(engine)


def _biases(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The names of all biases, and the experts that they choose among."""
    modules = dict(model.named_modules())
    for name in [*dict(model.named_parameters()), *dict(model.named_buffers())]:
        if name.rpartition(".")[2] not in CORRECTION_BIASES:
            continue
        owner = name.rpartition(".")[0]
        while owner and f"{owner}.experts" not in modules:
            owner = owner.rpartition(".")[0]
        if not owner:
            raise everywhere(f"the experts that {name} chooses among were not found")
        yield name, modules[f"{owner}.experts"]


def _counting(load: Tensor) -> Any:
    """A hook of experts, which are called with hidden states, the choices of each token and their weights."""

    def count(module: nn.Module, given: tuple[Any, ...]) -> None:
        if module.training and not is_repeated():
            chosen: Tensor = given[1].detach().reshape(-1)
            load.scatter_add_(0, chosen, torch.ones_like(chosen))

    return count


def _of(model: nn.Module, name: str) -> Tensor:
    owner, _, kind = name.rpartition(".")
    found: Tensor = getattr(model.get_submodule(owner), kind)
    return found
