"""Who holds which slice: a plan on live ranks of this machine, one training step, and the same step in one process.

    parcompile local PLAN

starts the plan's ranks (see `local`), builds the plan's engine on each, and compares: every rank's weights with the
slices that the plan gives it, bit for bit, and loss and gradient norm with those of plain transformers and torch.
"""

from __future__ import annotations

import hashlib
import math
import os
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parcompile.cost.table import columns
from parcompile.layout.sequence import token_ranges
from parcompile.layout.shards import TensorLayout
from parcompile.model import Parameter
from parcompile.plan import Plan
from parcompile.plan.holding import Holding
from parcompile.progress import progress
from parcompile.runtime.deepspeed_patches.optimizer_state import gathered
from parcompile.runtime.drawing import trains_at_random
from parcompile.runtime.errors import everywhere
from parcompile.runtime.groups import check_executable
from parcompile.runtime.model.pretrained import build_model
from parcompile.runtime.model.slices import cut
from parcompile.runtime.router_losses import without_router_losses
from parcompile.runtime.settings import check_variables
from parcompile.spec import Precision
from parcompile.units import format_bytes

from . import MAX_RANKS, LocalWorld

_IMPORTED = ("parcompile.runtime", "torch._inductor.compile_fx")
"""What takes a rank seconds to import, once for all of them."""

TOLERANCE = {Precision.FP32: 1e-5}
"""How far loss and gradient norm may be from those of one process, relative; see `HALF_TOLERANCE`."""

HALF_TOLERANCE = 5e-2
"""The same in 16 bits, where one process computes in fp32 still."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a training step says of itself."""

    loss: float
    gradient_norm: float


@dataclass(frozen=True, slots=True)
class LocalRun:
    """A plan as it ran on this machine."""

    plan: Plan
    ranks: StepResult
    one_process: StepResult
    wrong_slices: tuple[str, ...]
    """Weights that are not what the plan says, with their rank; empty when all are."""

    @property
    def differences(self) -> tuple[float, float]:
        """Relative differences of loss and gradient norm."""
        many, one = self.ranks, self.one_process
        norm = abs(many.gradient_norm - one.gradient_norm) / abs(one.gradient_norm)
        return abs(many.loss - one.loss) / abs(one.loss), norm

    @property
    def tolerance(self) -> float:
        """What the precision of the plan allows."""
        return TOLERANCE.get(self.plan.spec.training.precision, HALF_TOLERANCE)

    @property
    def equal(self) -> bool:
        """Whether the ranks hold what the plan says and compute what one process does."""
        return not self.wrong_slices and all(difference <= self.tolerance for difference in self.differences)

    def text(self) -> str:
        """For people."""
        return "\n\n".join((_ranks_text(self.plan), slice_table(self.plan), self._weights_text(), self._step_text()))

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        loss, norm = self.differences
        return {
            "name": self.plan.spec.name,
            "plan_hash": self.plan.plan_hash,
            "world_size": self.plan.world_size,
            "equal": self.equal,
            "tolerance": self.tolerance,
            "loss": {"ranks": self.ranks.loss, "one_process": self.one_process.loss, "difference": loss},
            "gradient_norm": {
                "ranks": self.ranks.gradient_norm,
                "one_process": self.one_process.gradient_norm,
                "difference": norm,
            },
            "wrong_slices": list(self.wrong_slices),
        }

    def _weights_text(self) -> str:
        if not self.wrong_slices:
            return "weights: every rank holds these slices of the whole model's weights, bit for bit"
        return "weights that are not the planned slices:\n" + "\n".join(f"  {wrong}" for wrong in self.wrong_slices)

    def _step_text(self) -> str:
        precision = self.plan.spec.training.precision.value
        many_ranks = f"{self.plan.world_size} rank(s) ({precision})"
        rows: list[tuple[str, ...]] = [("", "one process (fp32)", many_ranks, "relative difference")]
        for name, one, many, difference in zip(
            ("loss", "gradient norm"),
            (self.one_process.loss, self.one_process.gradient_norm),
            (self.ranks.loss, self.ranks.gradient_norm),
            self.differences,
            strict=True,
        ):
            rows.append((name, f"{one:.8g}", f"{many:.8g}", f"{difference:.1e}"))
        verdict = "equal" if all(difference <= self.tolerance for difference in self.differences) else "DIFFERENT"
        router = self.plan.spec.training.router
        without = ", without the losses of routers" if router and router.has_losses else ""
        without += ", with no choice of an expert refused" if router and router.expert_capacity else ""
        lines = "\n".join(columns(rows))
        return f"one step{without}:\n{lines}\n{verdict} within {self.tolerance:g}"


def run_and_compare(plan: Plan, timeout: float = 300.0) -> LocalRun:
    """Run one step of `plan` on all its ranks on this machine, and in this process alone.

    Raises:
        RunError: The plan is not executable, or is too large for this machine.
        RankError: A rank failed, or `timeout` seconds passed.
    """
    _refuse(plan)
    check_variables()
    plan = plan.with_whole_batch
    with (
        progress(f"running a step on {plan.world_size} ranks"),
        LocalWorld(plan.world_size, start_method="forkserver", preload=_IMPORTED) as world,
    ):
        answers = world.run(_step_of_rank, plan, timeout=timeout, what=f"a step of plan {plan.spec.name!r}")
    model = build_model(plan)
    wrong = [
        f"rank {rank}: {name} {shape}"
        for rank, answer in enumerate(answers)
        for name, shape in _differing(plan, rank, answer["held"], model)
    ]
    ranks = StepResult(answers[0]["loss"], answers[0]["gradient_norm"])
    with progress("running the same step in one process"):
        alone = _step_of_one_process(plan, model)
    return LocalRun(plan, ranks, alone, tuple(wrong))


def slice_table(plan: Plan) -> str:
    """Every parameter with its full shape, the dim that tp cuts, and the range that each tp rank holds."""
    tp = plan.spec.parallelism.tp
    rows: list[tuple[str, ...]] = [("parameter", "full shape", "dim", *(f"tp {index}" for index in range(tp)))]
    for parameter, layout in plan.tensors().values():
        shape = " × ".join(map(str, parameter.shape))
        if layout.full_shape != parameter.shape:
            shape += f", padded to {' × '.join(map(str, layout.full_shape))}"
        held = (_ranges_text(layout, index) for index in range(tp))
        name = parameter.name + (f"  (× {parameter.count})" if parameter.count > 1 else "")
        rows.append((name, shape, "–" if layout.dim is None else str(layout.dim), *held))
    return "\n".join(["a..b: from a up to, not including, b", *columns(rows)])


def _step_of_rank(rank: int, plan: Plan) -> dict[str, Any]:  # noqa: ARG001 -- the world's signature
    from deepspeed.utils import logger

    from parcompile.runtime.engine import initialize

    logger.setLevel("ERROR")
    # DeepSpeed calls collectives by names that newer torch deprecates; that is not the user's business.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    engine, _, loader, _ = initialize(plan=plan, training_data=list(_samples(plan)))
    assert loader is not None
    # What is drawn at random, one process of plain torch draws otherwise; what experts refuse, it does not.
    router = plan.spec.training.router
    engine.train(not (trains_at_random(engine.module) or (router is not None and router.expert_capacity)))
    held = {}
    for name, parameter in engine.module.named_parameters():
        with gathered(parameter):
            held[name] = _digest(parameter)
    with without_router_losses(engine.module) if router else nullcontext():
        loss = float(engine.train_batch(iter(loader)))
    return {"loss": loss, "gradient_norm": float(engine.get_global_grad_norm()), "held": held}


def _samples(plan: Plan) -> Iterator[Tensor]:
    """One global batch of tokens [S], drawn from the plan's seed."""
    training, generator = plan.spec.training, torch.Generator().manual_seed(plan.spec.training.seed)
    for _ in range(training.global_batch_size):
        yield torch.randint(plan.spec.model.shape.vocab_size, (training.sequence_length,), generator=generator)


def _digest(tensor: Tensor) -> tuple[tuple[int, ...], str, str]:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return tuple(tensor.shape), str(tensor.dtype), hashlib.blake2b(data.numpy().tobytes(), digest_size=8).hexdigest()


def _step_of_one_process(plan: Plan, model: Any) -> StepResult:
    """Transformers and torch alone."""
    training = plan.spec.training
    samples = torch.stack(list(_samples(plan)))
    pieces, total = torch.split(samples, training.micro_batch_size), 0.0
    model.train(not trains_at_random(model))
    for ids in pieces:
        with without_router_losses(model) if training.router else nullcontext():
            loss = model(input_ids=ids, labels=ids).loss / len(pieces)
        loss.backward()
        total += float(loss.detach())
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf)
    return StepResult(total, float(norm))


def _differing(plan: Plan, rank: int, held: dict[str, Any], model: Any) -> Iterator[tuple[str, str]]:
    """Parameters of a rank that are not its slice of the whole model's."""
    layouts: dict[Parameter, tuple[Parameter, TensorLayout]] = plan.tensors()
    whole = dict(model.named_parameters())
    place = plan.groups.grid.coordinates(rank)
    holding, index = Holding(plan, place["pp"]), place["tp"]
    ep_rank = plan.groups.of_rank("ep", rank).index(rank) if plan.groups.ep > 1 else 0
    for name, parameter in plan.parameters.expanded():
        if name not in holding:
            continue
        if name not in held:
            yield name, "is missing"
            continue
        layout, full = layouts[parameter][1], whole[name].detach()
        full = cut(full, layout, None if layout.ranges is None else layout.ranges[index], layout.experts(ep_rank))
        shape, dtype, digest = held[name]
        if (shape, digest) != _digest(full.to(getattr(torch, dtype.removeprefix("torch."))))[::2]:
            yield name, f"{list(shape)}, planned is {_ranges_text(layout, index)} of {list(layout.full_shape)}"


def _refuse(plan: Plan) -> None:
    check_executable(plan)
    if plan.world_size > MAX_RANKS:
        raise everywhere(
            f"plan {plan.spec.name!r} has {plan.world_size} ranks; at most {MAX_RANKS} are started on one machine: "
            f"compile a small model for {MAX_RANKS} ranks or fewer"
        )
    # A rank of dp alone holds the whole model in fp32; this process holds it with gradients.
    whole_bytes = 4 * plan.parameters.numel
    needed_bytes = (plan.world_size + 2) * whole_bytes
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed_bytes > memory_bytes:
        raise everywhere(
            f"({plan.world_size} ranks + 2) · {format_bytes(whole_bytes)} of weights = {format_bytes(needed_bytes)}, "
            f"this machine has {format_bytes(memory_bytes)}: a rank may hold all weights; use a smaller model"
        )


def _ranks_text(plan: Plan) -> str:
    parallelism, training = plan.spec.parallelism, plan.spec.training
    staged = parallelism.pp > 1
    axes = ("tp", "cp", "pp", "dp") if staged else ("tp", "cp", "dp")
    sizes = " × ".join(f"{axis} {getattr(parallelism, axis)}" for axis in axes)
    rows: list[tuple[str, ...]] = [("rank", *axes, "tokens of a sequence", *(("layers",) if staged else ()))]
    for rank in range(plan.world_size):
        place = plan.groups.grid.coordinates(rank)
        tokens = token_ranges(parallelism.cp_layout, parallelism.cp, place["cp"], training.sequence_length)
        layers = [_tokens_text(stage.layers) for stage in plan.spec.virtual_stages[place["pp"]]]
        cells = [*(str(place[axis]) for axis in axes), ", ".join(map(_tokens_text, tokens))]
        rows.append((str(rank), *cells, *((", ".join(layers),) if staged else ())))
    first = f"plan {plan.spec.name}: {plan.world_size} rank(s) on this machine, {sizes}"
    return "\n".join([first, *columns(rows)])


def _tokens_text(tokens: range) -> str:
    step = "" if tokens.step == 1 else f" in steps of {tokens.step}"
    return f"{tokens.start}..{tokens.stop}{step}"


def _ranges_text(layout: TensorLayout, index: int) -> str:
    if layout.ranges is None:
        return "whole"
    return " + ".join(f"{start}..{stop}" for start, stop in layout.ranges[index])
