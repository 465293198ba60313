"""Mixtures of experts with every expert cut over the tensor-parallel ranks.

The whole block is one region: each rank routes all tokens alike, runs its slice of every expert (and of the shared
one), and the outputs are parts of a sum. Everything in the block that every rank holds, the router above all, gets a
part of its gradient on each rank.

Biases that are added to a part of a sum, which every tensor-parallel rank has: the first rank alone adds them.

The other ranks multiply them by zero, so that each rank has a gradient (zero there) and their sum is the whole one. The
first rank multiplies them by one: autograd takes nodes in the reverse order of their making and hands a leaf its
gradient behind its first use, so that ranks which use a bias in different places sum its gradient in different places
among the messages of their experts, and wait for one another for ever.

A norm of what each expert gives, where tensor parallelism cuts the experts: a rank has parts of sums only.

Behind the norm each rank keeps 1/tp of the whole, so that the block still ends with a sum of the ranks' parts. Every
rank has the same rows.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from parcompile.runtime.collectives import (
    copy_to_group,
    gather_from_sequence,
    reduce_from_group,
    reduce_scatter_to_sequence,
)
from parcompile.runtime.drawing import draws
from parcompile.runtime.expert_parallel import deal_experts, hand_tokens, loop_where_narrow, pass_on, visit_chosen
from parcompile.runtime.inject.regions import Region
from parcompile.runtime.micro_batch import current
from parcompile.runtime.model.slices import Slices
from parcompile.runtime.model.text_head import TORCH_DTYPES
from parcompile.runtime.tensor_parallel import is_sharded, mark_shard
from parcompile.runtime.tensor_parallel.partial import slice_parameter
from parcompile.runtime.transport import group_size

from .mechanism import Placed


def place_experts(placed: Placed) -> None:
    """Leaves each rank its experts whole, with the way of tokens to them and back."""
    hand_tokens(placed.model, placed.mesh)
    pass_on(placed.model, placed.mesh)
    visit_chosen(placed.model)
    deal_experts(placed.model, placed.mesh, placed.slices)


def cut_all_experts(placed: Placed) -> None:
    """Cuts the experts of every layer over tp."""
    model, slices, region, traits = placed.model, placed.slices, placed.region, placed.family.experts
    if region is None:
        return
    names = [name for name, _ in model.named_parameters() if slices.of(name).parameter.expert_dim == 0]
    for name in dict.fromkeys(name.rpartition(".experts.")[0] for name in names):
        if traits is not None and traits.beside_mlp:
            experts = f"{name}.experts"
            cut_experts_alone(experts, model.get_submodule(experts), slices, region)
        else:
            cut_experts(name, model.get_submodule(name), slices, region)


def loop_in_type(placed: Placed) -> None:
    """Lets experts whose slices are too narrow for a product of all multiply one after the other."""
    loop_where_narrow(placed.model, TORCH_DTYPES[placed.mesh.plan.spec.training.precision])


def cut_experts(name: str, block: nn.Module, slices: Slices, region: Region) -> None:
    """Cuts everything in `block`, a router with its experts, in place.

    What is added to the ranks' parts of the sum (a bias behind a cut weight) is added by the first rank.
    """
    _cut(name, block, slices, region)
    if not slices.folds_experts:  # else a rank has whole experts
        norm_whole_rows(block, region.group)
    # Jitter is multiplied into the hidden states in place.
    region.enter_block(block, writes=draws(block))

    def leave(_: nn.Module, __: Any, output: Any) -> Any:
        parts = output[0] if isinstance(output, tuple) else output
        if parts.dim() == 2 and region.sequence_parallel:
            parts = parts.unflatten(0, (current().rows or 1, -1))  # a block that flattened its tokens
        whole = region.leave(parts)
        return (whole, *output[1:]) if isinstance(output, tuple) else whole

    last = _norm_of_sum(name, block, slices)
    if last is None:
        block.register_forward_hook(leave)
    else:
        # It needs the sum, not this rank's part; what it gives leaves the block as it is.
        last.register_forward_pre_hook(lambda _, args: (region.leave(args[0]), *args[1:]))


def cut_experts_alone(name: str, experts: nn.Module, slices: Slices, region: Region) -> None:
    """Cuts the experts of a layer that itself has the router, which sees the rank's own tokens.

    Tokens [N, H], their experts [N, k] and weights [N, k] enter the region, in the order of the ranks; what leaves it
    is whole. Experts see each token by itself: their order does not matter.
    """
    _cut(name, experts, slices, region)
    group = region.group

    def enter(_: nn.Module, args: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        hidden, chosen, weights = args
        if not region.sequence_parallel:
            return copy_to_group(hidden, group), chosen, copy_to_group(weights, group)
        everyones = chosen.new_empty(group_size(group) * len(chosen), chosen.shape[1])
        dist.all_gather_into_tensor(everyones, chosen.contiguous(), group=group)
        return gather_from_sequence(hidden, 0, group), everyones, gather_from_sequence(weights, 0, group)

    def leave(_: nn.Module, __: Any, parts: Tensor) -> Tensor:
        if region.sequence_parallel:
            return reduce_scatter_to_sequence(parts, 0, group)
        return reduce_from_group(parts, group)

    experts.register_forward_pre_hook(enter)
    experts.register_forward_hook(leave)


def _cut(name: str, block: nn.Module, slices: Slices, region: Region) -> None:
    for child_name, module in block.named_modules():
        for kind, parameter in list(module.named_parameters(recurse=False)):
            whole = ".".join(part for part in (name, child_name, kind) if part)
            piece = slices.of(whole)
            if piece.ranges is None or piece.dim is None or is_sharded(parameter):
                if is_bias_of_row(whole, slices):
                    add_once(module, kind, region.group)
                continue
            local = slice_parameter(parameter, piece.dim, piece.ranges)
            vars(local).update(vars(parameter))  # experts that are dealt over ep are marked
            mark_shard(local)
            setattr(module, kind, local)
            if isinstance(module, nn.Linear) and kind == "weight":
                module.out_features, module.in_features = local.shape


def _norm_of_sum(name: str, block: nn.Module, slices: Slices) -> nn.Module | None:
    """The norm with which a block ends: unlike all else in it, it works on the sum of the ranks' parts."""
    for child, module in block.named_children():
        names = [f"{name}.{child}.{kind}" for kind, _ in module.named_parameters(recurse=False)]
        if names and all(slices.of(one).parameter.sequence_parallel for one in names):
            return module
    return None


def is_bias_of_row(name: str, slices: Slices) -> bool:
    """Whether a parameter is added to what a cut weight beside it gives, a linear's or that of experts."""
    for ending in (".bias", "_bias"):
        weight = name.removesuffix(ending) + (".weight" if ending == ".bias" else "")
        if name.endswith(ending) and slices.has(weight):
            return slices.of(weight).ranges is not None
    return False


def add_once(module: nn.Module, name: str, group: dist.ProcessGroup) -> None:
    """Lets only the first rank of `group` add the bias `name`, which `module` reads in its forward.

    The bias stays a parameter of the module: its attribute is covered while the forward runs, on the first rank too,
    which makes the graph of all ranks the same.
    """
    share = 1.0 if dist.get_rank(group) == 0 else 0.0

    def cover(owner: nn.Module, _: Any) -> None:
        vars(owner)[name] = owner.get_parameter(name) * share

    def uncover(owner: nn.Module, _: Any, __: Any) -> None:
        vars(owner).pop(name, None)

    module.register_forward_pre_hook(cover)
    module.register_forward_hook(uncover, always_call=True)


EXPERT_NORM = "post_expert_norm"


def norm_whole_rows(block: nn.Module, group: dist.ProcessGroup) -> None:
    """Lets the norm of what the experts of a block give, where it has one, see sums over the ranks."""
    norm = getattr(getattr(block, "experts", None), EXPERT_NORM, None)
    if norm is None:
        return
    ranks = group_size(group)

    def enter(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        # Summed in backward too: each rank has 1/tp of the gradient.
        return copy_to_group(reduce_from_group(args[0], group), group), *args[1:]

    def leave(_: nn.Module, __: Any, whole: Tensor) -> Tensor:
        return whole / ranks

    norm.register_forward_pre_hook(enter)
    norm.register_forward_hook(leave)
