"""State-space layers of Hugging Face models: their scans over pieces, and this rank's channels or heads of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parcompile.layout.shards import part_ranges
from parcompile.model.blocks.mamba1 import SELECTING, STEPPING, Mamba1, Mamba1Traits
from parcompile.model.blocks.mamba2 import Mamba2
from parcompile.model.families import FAMILIES
from parcompile.runtime.collectives import copy_to_group, reduce_from_group
from parcompile.runtime.inject.regions import BLOCK_TAKES_INPUT
from parcompile.runtime.inject.ring_place import StatePlace
from parcompile.runtime.recurrent import selective_scan, state_space
from parcompile.runtime.tensor_parallel import take_ranges

from .mechanism import Placed


def mamba_scan(
    original: Callable[..., Any],
    place: StatePlace,
    hidden_states: Tensor,
    *inputs: Tensor,
    z: Tensor | None = None,
    return_last_state: bool = False,
    **options: Any,
) -> Tensor:
    """In front of the scan of Mamba-1 layers: the gate comes behind what a received state adds."""
    assert not return_last_state, "caches are taken away"
    pieces = place.pieces(hidden_states.shape[0], hidden_states.shape[2])
    out = selective_scan(original, pieces, place.chain, hidden_states, *inputs, **options)
    return out if z is None else out * nn.functional.silu(z)


def is_inside(name: str, modules: list[str]) -> bool:
    """Whether a linear is a projection inside of one of these layers, by its name."""
    parent, _, own = name.rpartition(".")
    return own in (SELECTING, STEPPING) and parent in modules


def why_untrained(name: str, model_type: str) -> str:
    """Why adapters of a linear would not be trained, by its name and the model's type; empty where they are."""
    family = FAMILIES.get(model_type)
    if name.endswith(f".{STEPPING}") and family is not None and family.part(Mamba1Traits) is not None:
        return (
            "has adapters that nothing trains: transformers multiplies by the weight itself. Leave it out of "
            "target_modules"
        )
    return ""


def why_whole(name: str) -> str:
    """Why a weight that tp splits takes no adapters, by its name; empty where it is none of these layers."""
    return f"LoRA on {SELECTING} of a Mamba-1 layer is not injected over tp" if f".{SELECTING}." in name else ""


def localise_selective(module: nn.Module, shape: Mamba1, tp: int, group: dist.ProcessGroup) -> None:
    """Corrects what a cut module was built with, and adds up over the ranks what each projects of its own channels.

    Every rank then has the step sizes' features, B and C of all channels, and uses them for its own: the gradients of
    these are parts, which are added up in backward.

    Args:
        module: the layer's.
        shape: of the whole layer.
        tp: ranks that share its channels.
        group: these ranks.
    """

    def add_up(_: nn.Module, __: Any, parts: Tensor) -> Tensor:
        return copy_to_group(reduce_from_group(parts, group), group)

    local = shape.values // tp
    for child, linear in module.named_children():
        if child == SELECTING and isinstance(linear, nn.Linear):
            linear.in_features = local
            linear.register_forward_hook(add_up)
        elif child == STEPPING and isinstance(linear, nn.Linear):
            linear.out_features = local
        elif isinstance(linear, nn.Conv1d):
            linear.in_channels = linear.out_channels = linear.groups = local
    if vars(module).get("intermediate_size") == shape.values:
        module.intermediate_size = local  # type: ignore[assignment]


_OF_SCAN = ("chunk_size", "D", "dt_bias", "dt_softplus", "dt_limit")


def state_space_scan(
    original: Callable[..., Any],
    place: StatePlace,
    hidden_states: Tensor,
    *inputs: Tensor,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    z: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """In front of the scan of Mamba-2 layers; what else kernels tell documents apart by is left out."""
    assert initial_states is None, "caches are taken away"
    assert not return_final_states, "caches are taken away"
    assert z is None, "transformers applies the gate by itself"
    pieces = place.pieces(hidden_states.shape[0], hidden_states.shape[1])
    known = {name: given for name, given in options.items() if name in _OF_SCAN}
    return state_space(original, pieces, place.chain, hidden_states, *inputs, **known)


def fused_layer(*_: Any, **__: Any) -> None:
    """In front of the kernel that computes convolution, scan, norm and output at once: the layer goes step by step."""


def prepare_state_space(module: nn.Module) -> None:
    """Says of a module that multiplies its hidden states before it projects them that it takes them in itself."""
    if "ssm_in_multiplier" in vars(module):
        setattr(module, BLOCK_TAKES_INPUT, True)


def localise_state_space(module: nn.Module, shape: Mamba2, tp: int, rank: int) -> None:
    """Corrects what a cut module was built with: its sizes are those of this rank's heads, and so are its multipliers.

    Args:
        module: the layer's.
        shape: of the whole layer.
        tp: ranks that share its heads.
        rank: among them.
    """
    multipliers = getattr(module, "mup_vector", None)
    if multipliers is not None:
        ranges, place = [], 0
        for part in shape.fused():
            start, stop = part_ranges(part, tp, rank)
            ranges.append((place + start, place + stop))
            place += part.size
        module.mup_vector = take_ranges(multipliers, multipliers.dim() - 1, ranges)
    groups = shape.groups_of_rank(tp)
    sizes = {
        "num_heads": (shape.heads, shape.heads // tp),
        "intermediate_size": (shape.values, shape.values // tp),
        "n_groups": (shape.groups, groups),
        "conv_dim": (shape.channels, shape.channels_of_rank(tp)),
        "groups_time_state_size": (shape.keys, groups * shape.key_dim),
    }
    norm = getattr(module, "norm", None)
    for one in (module, norm):
        for name, (whole, local) in sizes.items():
            if one is not None and vars(one).get(name) == whole:
                setattr(one, name, local)
    for child in module.children():
        if isinstance(child, nn.Conv1d):
            child.in_channels = child.out_channels = child.groups = child.weight.shape[0]


def spread_gated_norm(placed: Placed, norm: nn.Module, weight: nn.Parameter, width: int) -> nn.Module | None:
    """The gated norm of a Mamba-2 layer with a rank's slice of its weight; None where the norm is no such."""
    states, region = placed.shape.part(Mamba2), placed.region
    if states is None or "RMSNormGated" not in type(norm).__name__:
        return None
    if states.groups == 1 and region is not None:
        return SpreadGatedNorm(norm, weight, width, region.group)
    norm.weight = weight
    return norm  # over each group apart, which are whole on a rank


class SpreadGatedNorm(nn.Module):
    """The gated RMSNorm of a Mamba-2 layer of one group, whose heads are spread over ranks: [.., W/tp] to [.., W/tp].

    The squares are summed over the ranks, and in backward what each rank's slice contributes to their gradient.
    """

    def __init__(self, norm: nn.Module, weight: nn.Parameter, width: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.weight, self.width, self.group = weight, width, group
        self.variance_epsilon: float = vars(norm)["variance_epsilon"]
        self.norm_before_gate: bool | None = vars(norm).get("norm_before_gate")
        """None: a norm that takes the gate first, and multiplies by its weight in the type of its input."""

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        """Computed in float32, as transformers' norms are."""
        gates = None if gate is None else nn.functional.silu(gate.float())
        wide = hidden_states.float()
        if gates is not None and not self.norm_before_gate:
            wide = wide * gates
        squares = copy_to_group(reduce_from_group(wide.square().sum(-1, keepdim=True), self.group), self.group)
        wide = wide * torch.rsqrt(squares / self.width + self.variance_epsilon)
        if self.norm_before_gate is None:
            return self.weight * wide.to(hidden_states.dtype)
        wide = self.weight * wide
        if gates is not None and self.norm_before_gate:
            wide = wide * gates
        return wide.to(hidden_states.dtype)

    def extra_repr(self) -> str:
        """The whole width, and the slice."""
        return f"{self.width}, held={self.weight.numel()}, eps={self.variance_epsilon}"
