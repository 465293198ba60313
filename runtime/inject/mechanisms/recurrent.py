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

import torch.nn.functional as F
from torch import Tensor, nn

from parcompile.model.blocks.lightning import Lightning
from parcompile.model.blocks.mamba1 import Mamba1
from parcompile.model.blocks.mamba2 import Mamba2
from parcompile.model.blocks.recurrent import Recurrent
from parcompile.runtime.errors import everywhere
from parcompile.runtime.groups import Mesh
from parcompile.runtime.inject.regions import MASKS_PADDING, SHARES_ENTRY, Call
from parcompile.runtime.inject.ring_place import StatePlace
from parcompile.runtime.micro_batch import current, padding_mask
from parcompile.runtime.recurrent import convolve, gated_delta_rule, lightning_attention, lightning_blocks
from parcompile.runtime.transport.backend import OnDevice

from .mechanism import Placed
from .state_space import (
    fused_layer,
    localise_selective,
    localise_state_space,
    mamba_scan,
    prepare_state_space,
    state_space_scan,
)


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
        prepare_state_space(module)
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


_SEAMS: Mapping[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _gated_delta,
    "chunk_kimi_delta_attention": _gated_delta,
    "mamba2_chunk_scan": state_space_scan,
    "mamba_selective_scan": mamba_scan,
    "mamba2_split_conv1d_scan_combined": fused_layer,
    "mamba_inner_fn": fused_layer,
}
"""The functions of transformers' files that work on a sequence, and what stands in front of them."""


def localise_states(placed: Placed) -> None:
    """Corrects the sizes of every cut layer that carries a state."""
    if placed.region is not None and (states := placed.shape.part(Recurrent)) is not None:
        for module in recurrent_modules(placed):
            localise_groups(module, states, placed.mesh)


def localise_groups(module: nn.Module, shape: Recurrent, mesh: Mesh) -> None:
    """Corrects the sizes that a cut module, and those in it, were built with: those of this rank's groups of heads."""
    tp, rank, group = mesh.size("tp"), mesh.index("tp"), mesh.parallel_group("tp")
    if isinstance(shape, Mamba1):
        assert group is not None, "a module is sharded over a group"
        localise_selective(module, shape, tp, group)
        return
    if isinstance(shape, Mamba2):
        localise_state_space(module, shape, tp, rank)
        return
    sizes = {
        "num_heads": shape.heads,
        "num_attention_heads": shape.heads,
        "qkv_dim": shape.values,
        "num_v_heads": shape.heads,
        "num_k_heads": shape.groups,
        "key_dim": shape.keys,
        "value_dim": shape.values,
        "conv_dim": shape.channels,
    }
    for part in (module, *module.children()):
        for name, whole in sizes.items():
            if vars(part).get(name) == whole:
                setattr(part, name, whole // tp)
    for child in module.children():
        if isinstance(child, nn.Conv1d):
            child.in_channels = child.out_channels = child.groups = child.weight.shape[0]
