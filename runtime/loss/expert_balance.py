"""The loss that balances experts (`output_router_logits`), over all tokens though a rank sees only its own.

E · Σ fₑ Pₑ with the share f of choices that fall on each expert and its mean probability P, over all layers and tokens
of a micro-batch that are no padding (arXiv 2101.03961, equations 4-6). Choices have no gradient: their counts are
summed over cp, and each rank adds the probabilities of its own tokens. Through a pipeline both sums go with the hidden
states, stage by stage, and the gradient of the probabilities comes back with theirs: no stage knows how often the later
ones choose.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parcompile.plan.holding import Holding
from parcompile.runtime.errors import RunError
from parcompile.runtime.groups import Mesh
from parcompile.runtime.micro_batch import current, is_recomputing

from .causal import ParallelCausalLoss
from .sequence import over_sequence


def balances_experts(model: nn.Module) -> bool:
    """Whether the configuration asks for the balancing loss and the model of transformers adds one.

    DeepSeek and its like are balanced by a bias of their routers: there the key has no effect.
    """
    asked = getattr(model.config, "output_router_logits", False)
    return bool(asked) and hasattr(sys.modules[type(model).__module__], "load_balancing_loss_func")


class BalancedLoss:
    """The causal loss with the balancing loss of the forward pass before it."""

    def __init__(self, causal: ParallelCausalLoss, model: nn.Module, mesh: Mesh) -> None:
        config: Any = model.config
        self.causal, self._mesh = causal, mesh
        self._per_token, self._factor = config.num_experts_per_tok, config.router_aux_loss_coef
        self._logits: list[Tensor] = []
        self._received: Tensor | None = None
        moe = mesh.plan.spec.model.shape.moe
        routers = _routers(model)
        if moe is None or (not routers and _has_routers(mesh)):
            raise RunError(
                f"output_router_logits: {type(model).__name__} does not say which modules are routers: set it to false",
                everywhere=True,
            )
        self._experts = moe.num_experts
        model.register_forward_pre_hook(lambda *_: self._logits.clear())
        for router in routers:
            router.register_forward_hook(self._keep)
        # The model's own, over this rank's tokens and counted on every tensor-parallel rank, is switched off.
        config.output_router_logits = False

    def begin(self, received: Tensor | None) -> None:
        """A stage of a pipeline begins with what the stages before it have counted: what their last `hand_on` gave."""
        self._received = received

    def hand_on(self) -> Tensor:
        """[2, E] for the next stage: of each expert the sum of its probabilities, and how often it was chosen."""
        found = self._counted()
        found = found if self._received is None else found + self._received
        self._received = None
        return found

    def _keep(self, _: nn.Module, __: Any, output: Any) -> None:
        # What is computed again for backward was counted in its forward pass.
        if not is_recomputing():
            self._logits.append(output[0])

    def __call__(self, logits: Tensor, *_: Any, **batch: Any) -> Tensor:
        """As `ParallelCausalLoss`."""
        return over_sequence(self.causal.part(logits, **batch) + self._factor * self._balance(), self.causal.ring)

    def _counted(self) -> Tensor:
        """[2, E] of the layers of this rank."""
        logits, self._logits = self._logits, []
        if not logits:
            return torch.zeros(2, self._experts, device=self._mesh.device)
        probabilities = [torch.softmax(one, dim=-1).flatten(0, -2) for one in logits]
        every = torch.cat([one.topk(self._per_token, dim=-1).indices for one in probabilities])
        real, ones = current().real, torch.ones_like(every)
        if real is not None:
            real = real.flatten().unsqueeze(-1)
            ones *= real.repeat(len(probabilities), 1)
        # Not `bincount`: the host would wait for the largest number of an expert.
        counts = every.new_zeros(self._experts).scatter_add_(0, every.flatten(), ones.flatten())
        of_layers = [(one.float() if real is None else one.float() * real).sum(0) for one in probabilities]
        return torch.stack([torch.stack(of_layers).sum(0), counts.float()])

    def _balance(self) -> Tensor:
        """This rank's part: the sum over cp is the loss."""
        sums, counts = self.hand_on().unbind()
        counts = counts.detach().clone()
        if (group := self._mesh.parallel_group("cp")) is not None:
            dist.all_reduce(counts, group=group)
        rows = counts.sum() / self._per_token
        mean = sums / rows
        # Every tensor-parallel rank computes all of it, and the gradients of routers are summed over them.
        share = mean / self._mesh.size("tp")
        balance: Tensor = self._experts * (counts / rows * (share + (mean - share).detach())).sum()
        return balance


def _has_routers(mesh: Mesh) -> bool:
    """Whether this rank's stages have layers whose router chooses by scores."""
    shape = mesh.plan.spec.model.shape
    hashed = () if shape.moe is None else shape.moe.hashed
    return any(
        shape.routed(stage.layers) > len({*hashed} & {*stage.layers})
        for stage in Holding(mesh.plan, mesh.index("pp")).stages
    )


def _routers(model: nn.Module) -> list[nn.Module]:
    found = []
    for module in model.modules():
        recorder = getattr(module, "_can_record_outputs", None) or {}
        if "router_logits" in recorder:
            kind = recorder["router_logits"]
            kind = getattr(kind, "target_class", kind)
            found += [one for one in module.modules() if isinstance(one, kind) and one not in found]
    return found
