"""The optimizer of ZeRO stage 0: every rank of dp · cp holds and updates all states of its parameters.

Gradients that each tensor-parallel rank has a part of are summed once in a step, in one message.

Such are those of norms with sequence parallelism, and of small weights that ranks use on their own heads. At ZeRO
stage 1 they add up until the step ends; then they are summed, and reduced behind the others. At stage 2 DeepSpeed takes
each gradient of each micro-batch as it comes, and backward sums each.

DeepSpeed 0.19.8 has three optimizers for stage 0, and none gives the numbers of one process on every layout:

- fp32 (`clip_grad_norm_` of runtime/utils.py): computes a norm only to clip, takes the mean of norms over dp where
  experts are dealt over ep, and steps with gradients that are not finite.
- bf16 and fp16 (runtime/fp16/unfused_optimizer.py and fused_optimizer.py): take a step of zero gradients when they are
  made, which counts in Adam's bias correction and decays the weights; leave experts out of the norm; count of
  tensor-parallel shards those of rank 0 only, since gradients do not carry the mark of their parameters; and
  `engine.backward` does not multiply the loss by the scale that gradients are divided by.

This one takes their place, inside DeepSpeed's engine. It is named and saved like ZeRO's with one shard: parameters are
views of one flat tensor for each group, and so are their gradients, which the engine sums over dp · cp in place. 16-bit
weights have fp32 master weights; fp32 weights are their own. Sums of 16-bit gradients in fp32, for which DeepSpeed has
no optimizer at stage 0, are possible.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor, nn

from parcompile.runtime.deepspeed_patches.engine import before_reduction, keep_until_end
from parcompile.runtime.deepspeed_patches.norm import expert_group_name, squared_norm
from parcompile.runtime.deepspeed_patches.optimizer_state import (
    accumulated_gradient,
    lies_in_shard,
    sum_in,
    summed_gradient,
)
from parcompile.runtime.groups import Mesh
from parcompile.runtime.model.text_head import TORCH_DTYPES
from parcompile.runtime.tensor_parallel.partial import leave_partial, sum_together


def sum_once(engine: Any, mesh: Mesh) -> None:
    """Lets an engine sum partial gradients at the end of a step, if it keeps them until then."""
    group = mesh.parallel_group("tp")
    if group is None or engine.zero_optimization_stage() != 1:
        return
    if parameters := leave_partial(engine.module.parameters()):
        optimizer, hand_over = engine.optimizer, keep_until_end(engine, parameters)

        def at_end() -> None:
            sum_together([accumulated_gradient(optimizer, one) for one in parameters], group)
            hand_over()

        before_reduction(engine, at_end)


class UnshardedOptimizer(ZeROOptimizer):  # type: ignore[misc]
    """Makes a step of an optimizer with whole gradients and whole states.

    Args:
        engine: DeepSpeed's, which is being made.
        optimizer: what updates weights, element by element; its parameters become one flat tensor for each group.
        mesh: the live ranks.
    """

    def __init__(self, engine: Any, optimizer: torch.optim.Optimizer, mesh: Mesh) -> None:
        super().__init__()
        self.optimizer, self._mesh, self._names = optimizer, mesh, engine.param_names
        dtype = engine.get_data_types()[0]
        sums = TORCH_DTYPES[mesh.plan.spec.training.gradient_accumulation_dtype]
        self.loss_scaler = CreateLossScaler(
            dtype, engine.loss_scale(), engine.dynamic_loss_scale(), engine.dynamic_loss_scale_args()
        )
        self.dynamic_loss_scale = bool(self.loss_scaler.dynamic)
        self.clip_grad = float(engine.gradient_clipping())
        self.custom_loss_scaler, self.external_loss_scale, self.torch_autocast_gradscaler = False, None, None
        self.overflow = False
        self._global_grad_norm: Tensor | float | None = None
        self.counted: Callable[[nn.Parameter, Tensor], Tensor] = lambda _, gradient: gradient
        """What of a parameter's gradient counts on this rank in the norm."""
        self.trained: list[list[nn.Parameter]] = []
        self.weights: list[Tensor] = []
        self.masters: list[Tensor] = []
        self._gradients: list[Tensor] = []
        for group in optimizer.param_groups:
            trained = [one for one in group["params"] if one.requires_grad and one.numel()]
            weights = _flattened(trained)
            master = weights if weights.dtype is torch.float32 else weights.detach().float()
            group["params"] = [master.requires_grad_()]
            self.trained.append(trained)
            self.weights.append(weights.detach())
            self.masters.append(master)
            self._gradients.append(torch.zeros_like(weights.detach(), dtype=sums))
        self._adds_up = sums is not dtype
        for parameter, view in self._views():
            if self._adds_up:
                sum_in(parameter, view)
                parameter.register_post_accumulate_grad_hook(_add_up)  # type: ignore[no-untyped-call]
        self.zero_grad()

    def _views(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each parameter, and the place of its gradient."""
        for trained, gradients in zip(self.trained, self._gradients, strict=True):
            for parameter, offset in _places(trained):
                yield parameter, gradients[offset : offset + parameter.numel()].view_as(parameter)

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002 -- torch's
        """Gradients are zero, where they are to add up; whatever stood in their place is let go of."""
        for gradients in self._gradients:
            gradients.zero_()
        for parameter, view in self._views():
            parameter.grad = None if self._adds_up else view

    def get_grads_for_reduction(self) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
        """What the engine sums over dp · cp, and what over the ranks that share experts, by the name of their group."""
        for parameter, view in () if self._adds_up else self._views():
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad.data_ptr() != view.data_ptr():
                view.copy_(parameter.grad)
            parameter.grad = view
        shared: list[Tensor] = []
        experts: dict[str, list[Tensor]] = {}
        for trained, gradients in zip(self.trained, self._gradients, strict=True):
            name = expert_group_name(trained[0])
            (shared if name is None else experts.setdefault(name, [])).append(gradients)
        return shared, experts

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # noqa: ARG002 -- torch's
        """Updates weights with gradients that are sums over all ranks, or skips it where they are not finite."""
        scale = float(self.loss_scaler.cur_scale)
        norm = self._norm() / scale
        length = float(norm)
        self.overflow = not math.isfinite(length)
        self.loss_scaler.update_scale(self.overflow)
        self._global_grad_norm = float("inf") if self.overflow else norm
        if not self.overflow:
            divisor = scale
            if self.clip_grad > 0:
                divisor *= max(1.0, (length + 1e-6) / self.clip_grad)
            for master, gradients in zip(self.masters, self._gradients, strict=True):
                master.grad = gradients.to(master.dtype)
                if divisor != 1.0:
                    master.grad.mul_(1.0 / divisor)
            self.optimizer.step()
            for master, weights in zip(self.masters, self.weights, strict=True):
                master.grad = None
                if weights.dtype is not master.dtype:
                    weights.copy_(master)

    def _norm(self) -> Tensor:
        """Of the gradients of the whole model, times the loss scale: a scalar, the same on all ranks."""
        pairs = ((one, self.counted(one, view)) for one, view in self._views())
        square = squared_norm(pairs, self._mesh.device, first=self._mesh.index("tp") == 0)
        if self._mesh.size("tp-pp") > 1:
            dist.all_reduce(square, group=self._mesh.group("tp-pp"))
        return square.sqrt()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Of the optimizer, with their learning rates."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        """Of the optimizer, by flat tensor."""
        return self.optimizer.state

    @property
    def cur_scale(self) -> float:
        """What the loss is multiplied by."""
        return float(self.loss_scaler.cur_scale)

    loss_scale = cur_scale

    def state_dict(self) -> dict[str, Any]:
        """As ZeRO's with one shard."""
        import deepspeed

        places = [
            OrderedDict(
                (self._names[one], fragment_address(numel=one.numel(), start=at)) for one, at in _places(trained)
            )
            for trained in self.trained
        ]
        return {
            "loss_scaler": self.loss_scaler,
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "clip_grad": self.clip_grad,
            "base_optimizer_state": self.optimizer.state_dict(),
            "single_partition_of_fp32_groups": [master.detach() for master in self.masters],
            "zero_stage": ZeroStageEnum.disabled,
            "group_paddings": [0] * len(places),
            "partition_count": [1] * len(places),
            "ds_version": deepspeed.__version__,
            "param_slice_mappings": places,
        }

    def load_state_dict(self, *_: Any, **__: Any) -> None:
        """Checkpoints are loaded by `parcompile.runtime.checkpoint.load`.

        Raises:
            TypeError: always.
        """
        raise TypeError("load a checkpoint of ZeRO stage 0 with parcompile.runtime.checkpoint.load")


def _add_up(parameter: nn.Parameter) -> None:
    """Adds the gradient of a micro-batch to the sum, which has another type."""
    assert parameter.grad is not None
    summed_gradient(parameter).add_(parameter.grad)
    parameter.grad = None


def _flattened(parameters: list[nn.Parameter]) -> Tensor:
    """One tensor of which the parameters become views."""
    flat = torch.cat([one.detach().reshape(-1) for one in parameters])
    for parameter, offset in _places(parameters):
        parameter.data = flat[offset : offset + parameter.numel()].view_as(parameter)
        lies_in_shard(parameter, 0, parameter.numel(), offset)
    return flat


def _places(parameters: list[nn.Parameter]) -> Iterator[tuple[nn.Parameter, int]]:
    """Each with the place at which it begins in a tensor of all."""
    return zip(parameters, itertools.accumulate(map(nn.Parameter.numel, parameters), initial=0), strict=False)
