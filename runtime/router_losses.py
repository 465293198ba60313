"""The losses of routers: they balance experts (`aux_loss`) and keep logits small (`z_loss`), over all tokens.

E · Σ fₑ Pₑ with the share f of choices that fall on each expert and its mean score P (arXiv 2101.03961, equations
4-6), over the tokens that are no padding of a sequence, of a micro-batch or of a step: `aux_loss_scope`. Choices
have no gradient: their counts are summed over the ranks that share these tokens, and each rank adds the scores of its
own. Choices are the highest scores, without a bias and without groups, as in Megatron-LM
(`compute_routing_scores_for_aux_loss` of core/transformer/moe/moe_utils.py) and in arXiv 2412.19437, equations 17-20.

Over a step, the choices of all micro-batches have to be known before the first of them goes backward: where there are
several, each goes forward once before (`ahead`).

Through a pipeline the loss so far goes with the hidden states, stage by stage, and its gradient comes back with theirs.
Where all layers are one, the sums of their scores and choices go along: no stage knows how often the later ones choose.

Shapes: L routers of this rank's stage, B sequences, s tokens of each that this rank has, E experts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parcompile.model.catalogue import router_scores
from parcompile.plan import Plan
from parcompile.plan.holding import Holding
from parcompile.runtime.errors import everywhere
from parcompile.runtime.groups import Mesh
from parcompile.runtime.loss import ParallelCausalLoss, over_sequence
from parcompile.runtime.micro_batch import current, is_repeated, looking_ahead
from parcompile.runtime.model.lora import without_peft
from parcompile.spec.values import GLOBAL_BATCH, MICRO_BATCH

_SMALLEST = 1e-20
"""Added to the sum of sigmoids that their shares are divided by, as Megatron-LM does."""


@dataclass(frozen=True, slots=True)
class _Losses:
    aux_loss: float
    scope: str
    z_loss: float
    scores: Callable[[Tensor], Tensor]


def losses_of(model: nn.Module, plan: Plan) -> _Losses | None:
    """What the routers of a model add to the loss; None: nothing.

    The model's own `output_router_logits` asks for the balancing loss of its class, where that has one. DeepSeek and
    its like are balanced by a bias of their routers: there the key has no effect.
    """
    given, config = plan.spec.training.router, model.config
    asked = getattr(config, "output_router_logits", False)
    own = bool(asked) and hasattr(sys.modules[type(model).__module__], "load_balancing_loss_func")
    z_loss = 0.0 if given is None else given.z_loss
    if given is not None and given.aux_loss:
        aux_loss, scope = given.aux_loss, given.aux_loss_scope
    else:
        aux_loss, scope = (float(config.router_aux_loss_coef) if own else 0.0), MICRO_BATCH  # type: ignore[arg-type, union-attr]
    if not (own or aux_loss or z_loss):
        return None
    # As transformers' `load_balancing_loss_func`, whatever the router itself makes of its logits.
    kind = "transformers" if scope == MICRO_BATCH else router_scores(plan.spec.model.shape.model_type)
    return _Losses(aux_loss, scope, z_loss, _SCORES[kind or "softmax"])


def _shares(logits: Tensor) -> Tensor:
    sigmoids = torch.sigmoid(logits.float())
    return sigmoids / (sigmoids.sum(-1, keepdim=True) + _SMALLEST)


_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: torch.softmax(logits, -1, dtype=torch.float32),
    "sigmoid": _shares,
    "transformers": lambda logits: torch.softmax(logits, -1).float(),
}


class RouterLosses:
    """The causal loss with the losses of the routers of the forward pass before it.

    Raises:
        RunError: the model does not say which modules are its routers.
    """

    def __init__(self, causal: ParallelCausalLoss, model: nn.Module, mesh: Mesh, losses: _Losses) -> None:
        self.causal, self._mesh, self._losses = causal, mesh, losses
        moe, training = mesh.plan.spec.model.shape.moe, mesh.plan.spec.training
        routers = list(_routers(model))
        if moe is None or (not routers and _has_routers(mesh)):
            raise everywhere(
                f"losses of routers: {type(model).__name__} does not say which modules are routers: leave "
                "training.router out, and set output_router_logits of the model to false"
            )
        self._experts, self._per_token = moe.num_choices, moe.num_experts_per_token
        self._logits: list[tuple[int, Tensor]] = []
        self._received: Tensor | None = None
        self._together = losses.scope == MICRO_BATCH and losses.aux_loss > 0
        self.take_micro_batches(training.gradient_accumulation_steps)
        self._ahead: Tensor | None = None
        """[L, E] while micro-batches are looked at: how often each expert was chosen."""
        self._step: Tensor | None = None
        """The same of the whole step, when they have been."""
        self.loads = torch.zeros(len(routers), self._experts, device=mesh.device)
        """[L, E]: how often training has chosen each expert on this rank; who reads it sets it to zero."""
        names = {module: name for name, module in model.named_modules()}
        self.layers = [layer_of(names[router]) for router, _ in routers]
        """Of each router its layer."""
        model.register_forward_pre_hook(lambda *_: self._logits.clear())
        self._routers = len(routers)
        for number, (router, index) in enumerate(routers):
            router.register_forward_hook(self._keep(number, index))
        # The model's own, over this rank's tokens and counted on every tensor-parallel rank, is switched off.
        model.config.output_router_logits = False  # type: ignore[union-attr]

    def take_micro_batches(self, count: int) -> None:
        """Says how many a step has, where it begins."""
        self._passes = count * self._mesh.size("dp")
        self.looks_ahead = self._losses.scope == GLOBAL_BATCH and count > 1
        """Whether all micro-batches of a step go forward before it trains."""

    @property
    def handed_size(self) -> int:
        """Numbers that a stage hands on."""
        return 1 + 2 * self._experts * self._together

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """Within it forward passes count the choices of a step; the step that follows trains with them."""
        self._ahead = torch.zeros(self._routers, self._experts, device=self._mesh.device)
        try:
            with looking_ahead():
                yield
            dist.all_reduce(self._ahead, group=self._mesh.group("dp-cp"))
            self._step = self._ahead
        finally:
            self._ahead = None

    def forget(self) -> None:
        """The step is over."""
        self._step = None

    def begin(self, received: Tensor | None) -> None:
        """A stage of a pipeline begins with what the stage before it has handed on."""
        self._received = received

    def hand_on(self) -> Tensor:
        """For the next stage, [1 or 2 E + 1]: the loss so far; sums of scores and choices where all layers are one."""
        found = self._of_stage()
        found = found if self._received is None else found + self._received
        self._received = None
        return found

    def __call__(self, logits: Tensor, *_: Any, **batch: Any) -> Tensor:
        """As `ParallelCausalLoss`."""
        handed = self.hand_on()
        if self._ahead is not None:
            return handed[0]
        part = self.causal.part(logits, **batch) + handed[0]
        return over_sequence(part + self._of_all_layers(handed[1:]) if self._together else part, self.causal.ring)

    def _keep(self, number: int, index: int) -> Callable[..., None]:
        def keep(_: nn.Module, __: Any, output: Any) -> None:
            # What is computed again for backward was counted in its forward pass.
            if self._ahead is not None or not is_repeated():
                self._logits.append((number, output[index] if isinstance(output, tuple) else output))

        return keep

    def _of_stage(self) -> Tensor:
        """What this stage's layers add to what is handed on."""
        kept, self._logits = self._logits, []
        if not kept:
            return torch.zeros(self.handed_size, device=self._mesh.device)
        numbers, rows, real = [number for number, _ in kept], current().rows or 1, current().real
        logits = torch.stack([one.reshape(rows, -1, one.shape[-1]) for _, one in kept])  # [L, B, s, E]
        scores = self._losses.scores(logits)
        weights = scores.new_ones(logits.shape[1:3]) if real is None else real.to(scores.dtype)  # [B, s]
        chosen = scores.detach().topk(self._per_token, dim=-1).indices
        ones = weights[None, :, :, None].expand_as(chosen)
        # Not `bincount`: the host would wait for the largest number of an expert.
        counts = scores.new_zeros(*scores.shape[:2], self._experts).scatter_add_(2, chosen.flatten(2), ones.flatten(2))
        if self._ahead is not None:
            self._ahead[numbers] += counts.sum(1)
            return counts.new_zeros(self.handed_size)
        if torch.is_grad_enabled():
            self.loads[numbers] += counts.sum(1)
        sums = torch.einsum("lbse,bs->lbe", scores, weights)
        if self._together and not self._losses.z_loss:
            return torch.cat([sums.new_zeros(1), sums.sum((0, 1)), counts.sum((0, 1))])
        whole = counts
        if self.causal.ring is not None and (self._losses.z_loss or self._losses.scope != GLOBAL_BATCH):
            whole = counts.clone()
            dist.all_reduce(whole, group=self.causal.ring)
        tokens = self._tokens(whole[0])  # [B]
        loss = scores.new_zeros(())
        if self._losses.z_loss:
            squares = torch.einsum("lbs,bs->b", logits.float().logsumexp(-1).square(), weights)
            loss = loss + self._losses.z_loss * (squares / tokens).mean()
        if self._losses.aux_loss and not self._together:
            factor = self._losses.aux_loss * self._experts / self._per_token
            loss = loss + factor * self._balance(sums, counts, whole, numbers)
        loss = self._shared(loss).reshape(1)
        return torch.cat([loss, sums.sum((0, 1)), counts.sum((0, 1))]) if self._together else loss

    def _balance(self, sums: Tensor, counts: Tensor, whole: Tensor, numbers: list[int]) -> Tensor:
        """Σ fₑ Pₑ of each layer by itself, times k, added up.

        Args:
            sums: of the scores of this rank's tokens [L, B, E].
            counts: of its choices [L, B, E].
            whole: those of whole sequences [L, B, E].
            numbers: of the routers.
        """
        if self._losses.scope == GLOBAL_BATCH:
            if self._step is None and self.looks_ahead:
                raise everywhere(
                    f"aux_loss_scope global_batch with {self._passes // self._mesh.size('dp')} micro-batches: call "
                    "engine.train_batch(iterator), which counts the choices of all of them before it trains"
                )
            step = self._step
            if step is None:
                step = torch.zeros(self._routers, self._experts, device=counts.device)
                step[numbers] = counts.sum(1)
                dist.all_reduce(step, group=self._mesh.group("dp-cp"))
            # The engine takes the mean over micro-batches and dp: a step's loss is the sum of its tokens'.
            sums, whole = self._passes * sums.sum(1), step[numbers]
        elif self._losses.scope == "micro_batch_per_layer":
            sums, whole = sums.sum(1), whole.sum(1)
        else:
            sums = sums / sums.shape[1]
        tokens = self._tokens(whole).unsqueeze(-1)
        return (whole / tokens * sums / tokens).sum()

    def _tokens(self, counts: Tensor) -> Tensor:
        """How many tokens have made these choices [..., E]; at least 1."""
        return (counts.sum(-1) / self._per_token).clamp(min=1)

    def _of_all_layers(self, handed: Tensor) -> Tensor:
        """This rank's part of the loss of all layers as one: the sum over cp is the loss."""
        sums, counts = handed.view(2, -1).unbind()
        counts = counts.detach().clone()
        if self.causal.ring is not None:
            dist.all_reduce(counts, group=self.causal.ring)
        rows = self._tokens(counts)
        found: Tensor = self._experts * (counts / rows * (self._shared(sums) / rows)).sum()
        return self._losses.aux_loss * found

    def _shared(self, found: Tensor) -> Tensor:
        """The same with a share of its gradient: every rank of tp computes all, and their gradients are summed."""
        share = found / self._mesh.size("tp")
        return share + (found - share).detach()


@contextmanager
def without_router_losses(model: nn.Module) -> Iterator[None]:
    """Within it the loss of a model, injected or not, is that of its tokens alone."""
    causal: Any = without_peft(model)
    before, asked = causal.loss_function, getattr(causal.config, "output_router_logits", None)
    if isinstance(before, RouterLosses):
        causal.loss_function = before.causal
    if asked:
        causal.config.output_router_logits = False
    try:
        yield
    finally:
        if isinstance(before, RouterLosses):
            causal.loss_function = before
        if asked:
            causal.config.output_router_logits = asked


def _has_routers(mesh: Mesh) -> bool:
    """Whether this rank's stages have layers whose router chooses by scores."""
    shape = mesh.plan.spec.model.shape
    return any(
        shape.moe is not None and shape.routed(stage.layers) > shape.moe.looked_up(stage.layers)
        for stage in Holding(mesh.plan, mesh.index("pp")).stages
    )


def layer_of(name: str) -> int:
    """The number of the layer that a module of this name is in; layers keep theirs in the stages of a pipeline."""
    return int(next((part for part in name.split(".") if part.isdecimal()), 0))


def _routers(model: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """The routers of a model, and which of their outputs is the logits."""
    seen: set[nn.Module] = set()
    for module in model.modules():
        kind = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")
        if kind is not None:
            owner = getattr(kind, "target_class", kind)
            for one in module.modules():
                if isinstance(one, owner) and one not in seen:
                    seen.add(one)
                    yield one, getattr(kind, "index", 0) or 0
