"""Layers that carry a state, of Hugging Face models: their functions over pieces, and this rank's heads of them.

transformers' modules call functions of their own files for the convolution and the recurrence. In each of these files
the functions get another in front, once: called from an injected module it works on the pieces of the micro-batch,
otherwise it is transformers'.

Source of lightning attention: `MiniMaxLightningAttention` of transformers 5.23, whose results this gives in fp32. In 16
bits transformers keeps the state in 16 bits, and this in fp32.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from parcompile.layout.shards import part_ranges
from parcompile.model.blocks.lightning import Lightning
from parcompile.model.blocks.mamba1 import SELECTING, STEPPING, Mamba1, Mamba1Traits
from parcompile.model.blocks.mamba2 import Mamba2
from parcompile.model.blocks.recurrent import Recurrent
from parcompile.model.families import FAMILIES
from parcompile.runtime.collectives import copy_to_group, reduce_from_group
from parcompile.runtime.errors import everywhere
from parcompile.runtime.groups import Mesh
from parcompile.runtime.inject.heads import SpreadRMSNorm
from parcompile.runtime.inject.regions import BLOCK_TAKES_INPUT, MASKS_PADDING, SHARES_ENTRY, Call
from parcompile.runtime.inject.ring_place import StatePlace
from parcompile.runtime.micro_batch import current, padding_mask
from parcompile.runtime.recurrent import (
    convolve,
    gated_delta_rule,
    lightning_attention,
    lightning_blocks,
    selective_scan,
    state_space,
)
from parcompile.runtime.tensor_parallel import take_ranges
from parcompile.runtime.transport.backend import OnDevice

from .mechanism import Placed


def put_lightning(module: nn.Module, place: StatePlace, mesh: Mesh) -> None:
    """Replaces the forward of a whole module, which is cut afterwards.

    Its buffers of decays stay whole, as files have them; nobody reads them.

    Raises:
        RunError: the module is none that is known here.
    """
    owner: Any = module
    if not hasattr(owner, "get_slope_rate"):
        raise everywhere(f"{type(module).__name__} says no decays of heads: it cannot be injected")
    slopes = owner.get_slope_rate(device="cpu").flatten()
    heads = len(slopes) // mesh.size("tp")
    own = slopes[mesh.index("tp") * heads :][:heads]
    owner.forward = functools.partial(_forward, owner, place, OnDevice(own))


def _forward(
    module: Any,
    place: StatePlace,
    held_slopes: OnDevice,
    hidden_states: Tensor,
    *_: Any,
    past_key_values: Any = None,
    attention_mask: Tensor | None = None,
    **__: Any,
) -> tuple[Tensor, Tensor | None]:
    rows, length = hidden_states.shape[:2]
    slopes = held_slopes(hidden_states.device)
    projected = module.act_fn(module.qkv_proj(hidden_states)).unflatten(-1, (-1, 3 * module.head_dim))
    if attention_mask is not None:  # padding in front of a prompt
        projected = projected * attention_mask[:, :, None, None].to(projected.dtype)
    query, key, value = projected.split(module.head_dim, -1)
    state = None
    if place.is_alone:
        kept = None if past_key_values is None else past_key_values.get_linear_cache(module.layer_idx)
        query, key, value = (one.transpose(1, 2) for one in (query, key, value))
        out, state = lightning_blocks(query, key, value, slopes, block=module.block_size, state=kept)
        out = out.transpose(1, 2).to(value.dtype)
        if past_key_values is not None:
            past_key_values.set_linear_cache(module.layer_idx, state)
    else:
        pieces = place.pieces(rows, length)
        out = lightning_attention(pieces, place.chain, query, key, value, slopes, block=module.block_size)
    gated = F.sigmoid(module.output_gate(hidden_states)) * module.norm(out.flatten(-2))
    return module.out_proj(gated), state


_MARK = "parcompile_seam"
_MASKING = "apply_mask_to_padding_states"
_CACHES = ("cache_params", "past_key_values")


class _Here(threading.local):
    """Of the calling thread: autograd recomputes in threads of its own."""

    place: StatePlace | None = None
    masked: bool = False
    """The hidden states of the module have been masked as they entered the tensor-parallel region."""


_here = _Here()


def recurrent_modules(placed: Placed) -> list[nn.Module]:
    """Those of this rank's layers that carry a state."""
    if (states := placed.shape.part(Recurrent)) is None:
        return []
    layers = {str(layer) for layer in states.layers}
    return [module for name, module in placed.model.named_modules() if _stands_in(layers, name, states)]


def _stands_in(layers: Collection[str], name: str, states: Recurrent) -> bool:
    """Whether a module stands under that name in one of these layers itself. Attention may have the same name."""
    before = ["", "", *name.split(".")]
    own = before.pop()
    if before[-1] == states.inside:
        before.pop()
    return own == states.module and before[-1] in layers


def use_pieces(placed: Placed) -> None:
    """Makes every layer that carries a state work on the pieces of its micro-batch."""
    modules = recurrent_modules(placed)
    if not modules:
        return
    place = StatePlace.of(placed.mesh)
    for module in modules:
        if isinstance(placed.shape.part(Recurrent), Lightning):
            put_lightning(module, place, placed.mesh)
        else:
            _put_in_front(type(module))
            setattr(module, MASKS_PADDING, True)
        if "ssm_in_multiplier" in vars(module):  # it multiplies its hidden states before it projects them
            setattr(module, BLOCK_TAKES_INPUT, True)
        module.register_forward_pre_hook(functools.partial(_enter, place), with_kwargs=True)
        module.register_forward_hook(_leave, always_call=True)


def _enter(place: StatePlace, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    if current().alone:
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        mask = padding_mask(hidden.device)
        _here.masked = mask is not None and getattr(module, SHARES_ENTRY, False)
        return args, kwargs if mask is None else {**kwargs, "attention_mask": mask}
    if kwargs.get("attention_mask") is not None:
        raise everywhere(
            f"{type(module).__name__} is given a mask of padding, which is not split for the ranks: prepare batches "
            "with split_batch, which turns padding on the right into a document of its own"
        )
    _here.place = place
    # What transformers keeps for generation would begin the sequence anew with the state of another one.
    return args, {key: None if key in _CACHES else value for key, value in kwargs.items()}


def _leave(*_: Any) -> None:
    _here.place, _here.masked = None, False


def _put_in_front(cls: type[nn.Module]) -> None:
    """Puts our functions in front of those that a module's file calls."""
    file = sys.modules[cls.__module__]
    masking = getattr(file, _MASKING, None)
    if masking is not None and not hasattr(masking, _MARK):
        setattr(file, _MASKING, _once_masked(masking))
    found = False
    for name, seam in _SEAMS.items():
        original = getattr(file, name, None)
        if original is None:
            continue
        found = True
        if not hasattr(original, _MARK):
            setattr(file, name, _in_front(original, seam))
    if not found:
        raise everywhere(f"{cls.__name__} calls none of {', '.join(_SEAMS)}: it cannot be injected")


def _in_front(original: Callable[..., Any], seam: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        place = _here.place
        return original(*args, **kwargs) if place is None else seam(original, place, *args, **kwargs)

    setattr(called, _MARK, True)
    return called


def _once_masked(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function that masks padding; hidden states that are masked already stay the tensor that they are."""

    @functools.wraps(original)
    def called(hidden_states: Tensor, attention_mask: Tensor | None) -> Tensor:
        if _here.masked:
            _here.masked = False
            return hidden_states
        return original(hidden_states, attention_mask)

    setattr(called, _MARK, True)
    return called


_OF_PACKED = ("cu_seqlens", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""What kernels tell documents apart by: the pieces do."""


def _convolution(
    original: Callable[..., Tensor],
    place: StatePlace,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    pieces = place.pieces(hidden_states.shape[0], hidden_states.shape[2])

    def of_piece(x: Tensor) -> Tensor:
        return original(x, weight, bias, activation=activation)

    return convolve(of_piece, pieces, place.chain, hidden_states, weight.shape[-1])


def _gated_delta(
    original: Callable[..., Any],
    place: StatePlace,
    *inputs: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    **options: Any,
) -> tuple[Tensor, None]:
    assert initial_state is None, "caches are taken away"
    assert not output_final_state, "caches are taken away"
    pieces = place.pieces(*inputs[2].shape[:2])  # of the values
    known = {name: given for name, given in options.items() if name not in _OF_PACKED}
    in_fp32 = importlib.util.find_spec("fla") is None  # its kernels refuse fp32
    return gated_delta_rule(original, pieces, place.chain, *inputs, in_fp32=in_fp32, **known), None


def _mamba_scan(
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
    return out if z is None else out * F.silu(z)


_OF_SCAN = ("chunk_size", "D", "dt_bias", "dt_softplus", "dt_limit")


def _state_space_scan(
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


def _fused_layer(*_: Any, **__: Any) -> None:
    """In front of the kernel that computes convolution, scan, norm and output at once: the layer goes step by step."""


_SEAMS: Mapping[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _gated_delta,
    "chunk_kimi_delta_attention": _gated_delta,
    "mamba2_chunk_scan": _state_space_scan,
    "mamba_selective_scan": _mamba_scan,
    "mamba2_split_conv1d_scan_combined": _fused_layer,
    "mamba_inner_fn": _fused_layer,
}
"""The functions of transformers' files that work on a sequence, and what stands in front of them."""


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


def _share_selection(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Adds up over the ranks what each projects of its own channels.

    Every rank then has the step sizes' features, B and C of all channels, and uses them for its own: the gradients of
    these are parts, which are added up in backward.
    """

    def add_up(_: nn.Module, __: Any, parts: Tensor) -> Tensor:
        return copy_to_group(reduce_from_group(parts, group), group)

    module.get_submodule(SELECTING).register_forward_hook(add_up)


def _cut_multipliers(module: nn.Module, shape: Mamba2, tp: int, rank: int) -> None:
    """Leaves a module the multipliers of this rank's heads, where it has any."""
    multipliers = getattr(module, "mup_vector", None)
    if multipliers is None:
        return
    ranges, place = [], 0
    for part in shape.fused():
        start, stop = part_ranges(part, tp, rank)
        ranges.append((place + start, place + stop))
        place += part.size
    module.mup_vector = take_ranges(multipliers, multipliers.dim() - 1, ranges)


def spread_gated_norm(placed: Placed, norm: nn.Module, weight: nn.Parameter, width: int) -> nn.Module | None:
    """The gated norm of a Mamba-2 layer with a rank's slice of its weight; None where the norm is no such."""
    states, region = placed.shape.part(Mamba2), placed.region
    if states is None or "RMSNormGated" not in type(norm).__name__:
        return None
    if states.groups == 1 and region is not None:
        return SpreadGatedNorm(norm, weight, width, region.group)
    norm.weight = weight
    return norm  # over each group apart, which are whole on a rank


class SpreadGatedNorm(SpreadRMSNorm):
    """The gated RMSNorm of a Mamba-2 layer of one group, whose heads are spread over ranks."""

    def __init__(self, norm: nn.Module, weight: nn.Parameter, width: int, group: dist.ProcessGroup) -> None:
        super().__init__(weight, vars(norm)["variance_epsilon"], width, group, None)
        self.norm_before_gate: bool | None = vars(norm).get("norm_before_gate")
        """None: a norm that takes the gate first, and multiplies by its weight in the type of its input."""

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        """Computed in float32, as transformers' norms are."""
        gates = None if gate is None else F.silu(gate.float())
        wide = hidden_states.float()
        if gates is not None and not self.norm_before_gate:
            wide = wide * gates
        wide = self.normed(wide)
        if self.norm_before_gate is None:
            return self.weight * wide.to(hidden_states.dtype)
        wide = self.weight * wide
        if gates is not None and self.norm_before_gate:
            wide = wide * gates
        return wide.to(hidden_states.dtype)


def localise_states(placed: Placed) -> None:
    """Corrects the sizes of every cut layer that carries a state."""
    if placed.region is not None and (states := placed.shape.part(Recurrent)) is not None:
        for module in recurrent_modules(placed):
            localise_groups(module, states, placed.mesh)


def localise_groups(module: nn.Module, shape: Recurrent, mesh: Mesh) -> None:
    """Corrects the sizes that a cut module, and those in it, were built with: those of this rank's groups of heads."""
    tp, group = mesh.size("tp"), mesh.parallel_group("tp")
    if isinstance(shape, Mamba1):
        assert group is not None, "a module is sharded over a group"
        _share_selection(module, group)
        sizes = {"intermediate_size": (shape.values, shape.values // tp)}
    elif isinstance(shape, Mamba2):
        _cut_multipliers(module, shape, tp, mesh.index("tp"))
        groups = shape.groups_of_rank(tp)
        sizes = {
            "num_heads": (shape.heads, shape.heads // tp),
            "intermediate_size": (shape.values, shape.values // tp),
            "n_groups": (shape.groups, groups),
            "conv_dim": (shape.channels, shape.channels_of_rank(tp)),
            "groups_time_state_size": (shape.keys, groups * shape.key_dim),
        }
    else:
        heads, values, keys = shape.heads, shape.values, shape.keys
        wholes = {"num_heads": heads, "num_attention_heads": heads, "num_v_heads": heads, "num_k_heads": shape.groups}
        wholes |= {"qkv_dim": values, "value_dim": values, "key_dim": keys, "conv_dim": shape.channels}
        sizes = {name: (whole, whole // tp) for name, whole in wholes.items()}
    for part in (module, *module.children()):
        for name, (whole, local) in sizes.items():
            if vars(part).get(name) == whole:
                setattr(part, name, local)
        if isinstance(part, nn.Conv1d):
            part.in_channels = part.out_channels = part.groups = part.weight.shape[0]
        elif isinstance(part, nn.Linear):
            part.out_features, part.in_features = part.weight.shape
