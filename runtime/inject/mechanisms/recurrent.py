"""Layers that carry a state, of Hugging Face models: their functions over pieces, and this rank's heads of them.

transformers' modules call functions of their own files for the convolution and the recurrence. In each of these files
the functions get another in front, once: called from an injected module it works on the pieces of the micro-batch,
otherwise it is transformers'.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor, nn

from parcompile.model.blocks.lightning import Lightning
from parcompile.model.blocks.mamba1 import Mamba1
from parcompile.model.blocks.mamba2 import Mamba2
from parcompile.model.blocks.recurrent import Recurrent
from parcompile.runtime.errors import RunError
from parcompile.runtime.groups import Mesh
from parcompile.runtime.inject.regions import MASKS_PADDING, SHARES_ENTRY
from parcompile.runtime.inject.ring_place import StatePlace
from parcompile.runtime.micro_batch import current, padding_mask
from parcompile.runtime.recurrent import convolve, gated_delta_rule

from .lightning import put_lightning
from .mechanism import Placed
from .selective import localise_selective, mamba_scan
from .state_space import fused_layer, localise_state_space, prepare_state_space, state_space_scan

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


def _enter(
    place: StatePlace, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if current().alone:
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        mask = padding_mask(hidden.device)
        _here.masked = mask is not None and getattr(module, SHARES_ENTRY, False)
        return args, kwargs if mask is None else {**kwargs, "attention_mask": mask}
    if kwargs.get("attention_mask") is not None:
        raise RunError(
            f"{type(module).__name__} is given a mask of padding, which is not split for the ranks: prepare batches "
            "with split_batch, which turns padding on the right into a document of its own",
            everywhere=True,
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
        raise RunError(f"{cls.__name__} calls none of {', '.join(_SEAMS)}: it cannot be injected", everywhere=True)


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
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    **options: Any,
) -> tuple[Tensor, None]:
    assert initial_state is None, "caches are taken away"
    assert not output_final_state, "caches are taken away"
    out = gated_delta_rule(
        original,
        place.pieces(value.shape[0], value.shape[1]),
        place.chain,
        query,
        key,
        value,
        g=g,
        beta=beta,
        in_fp32=importlib.util.find_spec("fla") is None,  # its kernels refuse fp32
        **{name: given for name, given in options.items() if name not in _OF_PACKED},
    )
    return out, None


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
