"""Two AdamW steps of every family, injected on live ranks and plain in one process."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from closeness import nudge
from families import tiny_config
from torch import Tensor, nn
from training_runs import fill_tables

from parcompile.plan import Plan, compile_plan
from parcompile.rules import check
from parcompile.spec.resolve import Resolution

STEPS = 2
CLIPPING = 0.5


def family_plan(family: str, world_size: int, parallelism: dict[str, Any], **changes: Any) -> Plan:
    """The plan of a family's `config.json`, as users compile it."""
    return config_plan(family, tiny_config(family, **changes), world_size, parallelism)


def config_plan(
    name: str, config: dict[str, Any], world_size: int, parallelism: dict[str, Any], **training: Any
) -> Plan:
    """The plan of a `config.json`."""
    tree = {
        "version": 1,
        "name": name,
        "model": {"hf_config": "config.json"},
        "cluster": {"gpus_per_node": world_size, "accelerator": "cpu"},
        "parallelism": {"make_vocab_size_divisible_by": 8, **parallelism},
        "training": {
            "sequence_length": 16,
            "global_batch_size": 2,
            "micro_batch_size": 2 // parallelism.get("dp", 1),
            "precision": "fp32",
            **training,
        },
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        resolution = Resolution(tree, folder=Path(folder))
        diagnostics = check(resolution)
        assert not [found for found in diagnostics if found.is_error], diagnostics
        plan = compile_plan(resolution.spec(), tree, diagnostics)
    assert not plan.refusals, plan.refusals
    return plan


def drawn_model(plan: Plan, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The plan's model with every norm, bias and scalar drawn too: ones and zeros hide mistakes."""
    from parcompile.runtime import build_model

    model = build_model(plan).to(dtype)
    generator = torch.Generator().manual_seed(11)
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 or name.endswith(("bias", "compress_ape")) or not bool(parameter.any()):
            parameter.data.add_(torch.randn(parameter.shape, generator=generator).to(dtype), alpha=0.2)
    fill_tables(model, plan, generator)
    # Phi-MoE draws its experts at random in training: every layout alike, but not as plain torch does.
    return model.eval() if plan.spec.model.shape.model_type == "phimoe" else model.train()


def batch_of(plan: Plan) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    shape = (2, plan.spec.training.sequence_length)
    ids = torch.randint(0, plan.spec.model.shape.vocab_size, shape, generator=generator)
    labels = ids.clone()
    labels[:, :5] = -100
    return {"input_ids": ids, "labels": labels}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    # A gradient that is zero but for rounding must not become a step: hence the large epsilon.
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.1)


def train_plain(
    plan: Plan,
    steps: int = STEPS,
    dtype: torch.dtype = torch.float32,
    seed: int | None = None,
    batch: dict[str, Tensor] | None = None,
) -> dict[str, Any]:
    """Steps of transformers and torch alone; `seed` nudges each weight by about its last bit."""
    model = drawn_model(plan, dtype)
    nudge(model, seed)
    optimizer, losses, norms = optimizer_of(model), [], []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(**(batch or batch_of(plan))).loss
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)))
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "norms": norms, "parameters": named(model)}


def named(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def train_injected(rank: int, plans: list[Plan], batch: dict[str, Tensor] | None = None) -> list[dict[str, Any]]:
    """Every plan's family in one world: the plans have the same layout, so that the groups of one serve all.

    Only those with tied embeddings make a group of the first and the last stage.
    """
    from parcompile.runtime import join

    mesh = join(max(plans, key=lambda plan: len(plan.groups.names)))
    found = []
    for plan in plans:
        try:
            found.append({"rank": rank, **train_on(plan, of_plan(mesh, plan), whole=batch)[1]})
        except Exception as error:
            found.append({"rank": rank, "error": f"{type(error).__name__}: {error}"})
    return found


def of_plan(mesh: Any, plan: Plan) -> Any:
    """The same ranks for another plan of the same layout, with the groups that it has of theirs."""
    groups = {name: group for name, group in mesh.groups.items() if name in plan.groups.names}
    return replace(mesh, plan=plan, groups=groups)


def train_on(
    plan: Plan,
    mesh: Any,
    steps: int = STEPS,
    dtype: torch.dtype = torch.float32,
    whole: dict[str, Tensor] | None = None,
    split: Callable[[dict[str, Tensor], Any], dict[str, Any]] | None = None,
) -> tuple[nn.Module, dict[str, Any]]:
    """The injected model after its steps, and what they gave; of `batch_of` or of another whole batch.

    `split`: what makes a dp rank's whole batch that which the model is called with; `split_batch` by default.
    """
    from parcompile.runtime import split_batch
    from parcompile.runtime.inject import inject
    from parcompile.runtime.loss import loss_of_step
    from parcompile.runtime.pipeline import forward_and_backward

    drawn: Any = drawn_model(plan, dtype)
    drawn.config.use_cache = True  # as from_pretrained gives it
    model = inject(drawn, mesh)
    optimizer, losses, norms = optimizer_of(model), [], []
    batch = (split or split_batch)(_of_dp_rank(whole or batch_of(plan), mesh), mesh)
    for _ in range(steps):
        optimizer.zero_grad()
        if mesh.size("pp") > 1:
            ended = forward_and_backward(model, mesh, {**batch, "use_cache": True})
        else:
            ended = [model(**batch).loss]
            ended[0].backward()
        norms.append(clip(model, mesh))
        optimizer.step()
        losses.append(float(loss_of_step([loss.detach() for loss in ended], 1, mesh)))
    return model, {"losses": losses, "norms": norms, "parameters": named(model)}


def _of_dp_rank(batch: dict[str, Tensor], mesh: Any) -> dict[str, Tensor]:
    rows = 2 // mesh.size("dp")
    return {key: value.narrow(0, mesh.index("dp") * rows, rows) for key, value in batch.items()}


def clip(model: nn.Module, mesh: Any) -> float:
    """What DeepSpeed does with gradients: a sum over cp, a mean over dp, and a norm that counts shards on every rank
    and the rest once. Of experts that are dealt over ep only ranks with the same ones add gradients up.

    A tied embedding that another stage counts is left out, by DeepSpeed's name for it.
    """
    from parcompile.layout.groups import EXPERT_DP
    from parcompile.runtime.expert_parallel import is_dealt
    from parcompile.runtime.inject.heads import counted

    squares = torch.zeros(2, dtype=torch.float64)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=mesh.group(EXPERT_DP if is_dealt(parameter) else "dp-cp"))
        parameter.grad /= mesh.size("dp")
        if getattr(parameter, "ds_pipe_replicated", False):
            continue
        if getattr(parameter, "tensor_model_parallel", mesh.index("tp") == 0):
            squares[int(is_dealt(parameter))] += counted(parameter, parameter.grad).square().sum()
    if mesh.parallel_group("ep") is not None:
        dist.all_reduce(squares[1:], group=mesh.group("ep"))
    dist.all_reduce(squares, group=mesh.group("tp-pp"))
    norm = float(squares.sum().sqrt())
    for parameter in trained:
        assert parameter.grad is not None
        parameter.grad.mul_(min(1.0, CLIPPING / (norm + 1e-6)))
    return norm
