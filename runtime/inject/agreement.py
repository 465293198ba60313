"""Checks that the tensor-parallel plan of the model itself does not contradict the compiled one.

Compares, layer by layer, the mask that transformers builds with the window that an attention is told.

The ring masks by what its attention is told. In some models the window stands only in the mask, in others the mask
lacks the window that the attention has: there the ring and transformers' own attention compute different numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from parcompile.model.blocks.experts import PASSED_ON
from parcompile.model.blocks.latent import PARTIAL_STYLES
from parcompile.model.family import types_with
from parcompile.model.shape import ModelShape
from parcompile.runtime.errors import everywhere
from parcompile.runtime.model.slices import Slices

from .mechanisms.layer_inputs import without_tables
from .ring_place import chunk_of

EXPERTS = "moe_tp_experts"
"""The entry of a module whose experts are cut, each of them, over all tp ranks."""

_OWN = "local_params"
"""The entry of a module that has parameters of its own which are cut, each by an entry of its own."""

_GATHERED = "colwise_gather_output"
_SPLIT = "rowwise_split_input"
_TABLE = "embedding_colwise"
"""The entry of a table that transformers cuts by features, and the plan by rows."""
_COLUMN = ("colwise", _GATHERED, "packed_colwise", "embedding_rowwise")
_ROW = ("rowwise", _SPLIT, "packed_rowwise")
_PARTIAL = ("replicated_with_grad_allreduce", *PARTIAL_STYLES)
# Where transformers gathers a projection or cuts its input again, the plan keeps heads and widths apart: it cuts fused
# weights part by part, and a norm over all heads sums its squares over the ranks.
_WHOLE = ("index_qk_proj", "input_mix_weight_down")
"""Projections of whole features to whole features that transformers cuts between, and the plan does not."""
_KNOWN = (*_COLUMN, *_ROW, *_PARTIAL, EXPERTS, PASSED_ON, _OWN, _TABLE)

_FROM_THE_LEFT = types_with("experts_from_the_left")
"""Types whose stacks of experts are stored [experts, in, out]."""


def entries(model: nn.Module) -> dict[str, str]:
    """What of the model its own tensor-parallel plan names, a module or a parameter, with its entry."""
    plan: dict[str, str] = getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
    prefix = getattr(model, "base_model_prefix", "")
    names = [name for name, _ in model.named_modules()] + [name for name, _ in model.named_parameters()]
    found = {}
    for name in names:
        local = name.removeprefix(f"{prefix}.")
        style = plan.get(re.sub(r"(?<=\.)\d+(?=\.)", "*", local))
        if style is not None:
            found[name] = style
    return found


def check_agreement(model: nn.Module, slices: Slices, whole: Sequence[nn.Module] = ()) -> None:
    """The model's own tensor-parallel plan, where it has one, cuts what the compiled plan cuts, along the same dim.

    In `whole` modules, which take their hidden states in together, transformers gathers each projection; the plan keeps
    their groups of heads apart, and cuts the last one along its inputs.

    Raises:
        RunError: it has an entry without a rule here, or they contradict each other.
    """
    named = entries(model)
    parameters = dict(model.named_parameters())
    apart = {id(child) for module in whole for child in module.modules()}
    for name, style in named.items():
        if style not in _KNOWN:
            raise everywhere(f"{name} is {style!r} in the model's tensor-parallel plan, which is not injected")
        if style in (EXPERTS, PASSED_ON, _OWN):
            continue
        if style == _GATHERED and id(model.get_submodule(name)) in apart:
            continue
        if style in _PARTIAL:
            kinds = [kind for kind in ("weight", "bias") if f"{name}.{kind}" in parameters]
            agrees = all(slices.of(f"{name}.{kind}").parameter.partial for kind in kinds)
            if not agrees:
                raise everywhere(f"{name} is {style} for transformers, but not for the plan")
            continue
        if style in (_GATHERED, _SPLIT) and name.rpartition(".")[2] in _WHOLE:
            continue
        weight = name if name in parameters else f"{name}.weight"
        if weight not in parameters and slices.has(weight) and not slices.holds(weight):
            continue  # on another stage, as the embedding of nemotron_h
        if weight not in parameters:
            raise everywhere(f"{name} is {style} for transformers, but has no weight")
        dims = 1 if style == _TABLE else parameters[weight].dim()  # a table's rows
        wanted = max(dims - 2, 0) if style in _COLUMN else dims - 1
        if slices.folds_experts and slices.of(weight).experts is not None:
            continue  # what transformers cuts over tp is dealt, whole
        stacked = name.endswith((".experts.gate_up_proj", ".experts.down_proj"))
        if stacked and slices.model_type in _FROM_THE_LEFT:
            # "row because not linear": [experts, in, out] is named by how it is stored.
            wanted = dims - 1 if style in _ROW else dims - 2
        if style == "rowwise_split_input" and slices.of(weight).parameter.partial:
            continue  # a projection in front of experts, or behind them: whole on every rank, of a part of a sum
        if slices.of(weight).dim != wanted:
            raise everywhere(f"{name} is {style} for transformers, but the plan splits dim {slices.of(weight).dim}")


_NAME = "parcompile_masks"
_KEYS = ("use_bidirectional_attention", "sliding_window", "attention_chunk_size", "layer_types")


@dataclass(frozen=True, slots=True)
class _Mask:
    """What stands for a mask: which keys each query sees."""

    sees: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    """From batch, head, query and key, as positions, to whether the query sees the key."""
    size: int | None
    """The window or chunk that transformers names beside it."""

    def __getitem__(self, _: Any) -> _Mask:
        """Base models cut their masks to the tokens whose logits are wanted: all of them."""
        return self


class _Returned(Tensor):
    """What stands for the output of a layer: hidden states, or a tuple that begins with them."""

    def __iter__(self) -> Iterator[Any]:
        """As a pair, whose other part is what nobody looks at."""
        return iter((self, None))

    def __getitem__(self, index: Any) -> Any:
        return self if isinstance(index, int) and index == 0 else super().__getitem__(index)


class _Reached(Exception):  # noqa: N818 -- nothing went wrong
    """An attention was called; nothing behind it needs to run."""

    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.window = window


def masked_layers(shape: ModelShape) -> set[int]:
    """The layers whose attention goes by a mask of the model."""
    return set(shape.attention_layers).difference(*(one.unmasked for one in shape.parts))


def check_masks(model: nn.Module, path: str, sequence_length: int, attending: Collection[int] | None = None) -> None:
    """Every layer's attention is told the window that its mask has, as far as sequences of this length see it.

    Nothing is computed: the model prepares two tokens, and each layer runs without values up to its attention.

    Args:
        model: a causal language model of transformers, whole.
        path: the name of its list of layers.
        sequence_length: in tokens, over all ranks.
        attending: the numbers of the layers that attend; all where nothing is said.

    Raises:
        RunError: they differ, or a mask is not a window; the message names the layers.
    """
    with _observed(model):
        found = list(_windows(model, path, sequence_length, attending))
    kinds: dict[tuple[str, str], list[int]] = {}
    for layer, masked, told in found:
        if masked != told:
            kinds.setdefault((masked, told), []).append(layer)
    if kinds:
        parts = [
            f"layers {', '.join(map(str, layers))}: the mask is {masked}, the attention is told {told}"
            for (masked, told), layers in kinds.items()
        ]
        raise everywhere(
            f"transformers masks {type(model).__name__} otherwise than its attention is told, and the ring reads only "
            f"the latter: {'; '.join(parts)}. The ring masks later tokens and tokens outside of one window: change "
            f"the configuration ({_named(model.config)}), or make a window sequence_length {sequence_length} or more"
        )


def separates_documents(model: nn.Module, path: str) -> bool:
    """Whether transformers' own masks keep the documents of a packed sequence apart, as positions tell them.

    Some models do not hand their positions to what builds the mask, others build none (their biases mask, as ALiBi).

    Args:
        model: a causal language model of transformers, whole.
        path: the name of its list of layers.
    """
    zero, first, second = (torch.tensor([row], device="cpu") for row in (0, 0, 1))
    with _observed(model):
        calls = _calls(model, path, position_ids=torch.zeros(1, 2, dtype=torch.int64, device="cpu"))
    masks = [one for args, kwargs in calls for one in (*args, *kwargs.values()) if isinstance(one, _Mask)]
    return bool(masks) and not any(bool(mask.sees(zero, zero, second, first).any()) for mask in masks)


@contextmanager
def _observed(model: nn.Module) -> Iterator[None]:
    """Within it a model's masks are `_Mask`, and its attention computes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(
        _NAME, lambda *, mask_function, local_size=None, **_: _Mask(mask_function, local_size)
    )
    before = model.config._attn_implementation  # type: ignore[union-attr]
    model.set_attn_implementation(_NAME)  # type: ignore[operator]
    try:
        yield
    finally:
        model.set_attn_implementation(before)  # type: ignore[operator]


def _named(config: Any) -> str:
    """The keys of a configuration that decide about masks, as they are set."""
    found = {key: getattr(config, key, None) for key in _KEYS}
    found = {key: sorted(set(value)) if isinstance(value, list) else value for key, value in found.items()}
    return ", ".join(f"{key} {value!r}" for key, value in found.items() if value) or "of its masks"


def _windows(
    model: nn.Module, path: str, length: int, attending: Collection[int] | None
) -> Iterator[tuple[int, str, str]]:
    """What the mask of each layer is, and what its attention is told, in words."""
    layers: Any = model.get_submodule(path)
    for number, (layer, (args, kwargs)) in enumerate(zip(layers, _calls(model, path), strict=True)):
        if attending is not None and number not in attending:
            continue
        mask = next((one for one in (*args, *kwargs.values()) if isinstance(one, _Mask)), None)
        told = _told(layer, args, kwargs)
        chunk = next((size for module in layer.modules() if (size := chunk_of(module)) is not None), None)
        if chunk is not None and chunk < length:
            yield number, _of_mask(mask, told, length), f"chunks of {chunk} tokens"
            continue
        yield number, _of_mask(mask, told, length), _words(told if told is not None and told < length else None)


def _calls(model: nn.Module, path: str, **further: Tensor) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """What each layer is called with, masks among it; of the other modules only those without parameters run."""
    base: Any = model.get_submodule(path.rpartition(".")[0])
    layers: Any = model.get_submodule(path)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def record(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        return hidden.as_subclass(_Returned)

    stood_in = [child for child in base.children() if child is not layers and any(True for _ in child.parameters())]
    methods = without_tables(base, 1, 2)
    vars(base).update(methods)
    for child in stood_in:
        child.forward = _pass_hidden
    for layer in layers:
        layer.forward = record
    try:
        hidden = torch.zeros(1, 2, base.config.hidden_size, device="cpu")
        base(inputs_embeds=hidden, use_cache=False, **further)
    finally:
        for module in (*stood_in, *layers):
            vars(module).pop("forward", None)
        for name in methods:
            vars(base).pop(name)
    return calls


def _pass_hidden(first: Tensor | None = None, *_: Any, inputs_embeds: Tensor | None = None, **__: Any) -> Tensor:
    """Hidden states as they are; nothing in place of the rows that a table has for positions."""
    if first is None:
        assert inputs_embeds is not None
        return inputs_embeds
    return first if first.dim() > 2 else torch.zeros((), device="cpu")


def _told(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """The window that the attention of a layer is given."""
    empty = {
        name: torch.empty_like(tensor, device="meta")
        for name, tensor in (*layer.named_parameters(), *layer.named_buffers())
    }
    args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.as_subclass(Tensor).to("meta"), (args, kwargs))
    try:
        torch.func.functional_call(layer, empty, args, kwargs)
    except _Reached as reached:
        return reached.window
    raise everywhere(f"a {type(layer).__name__} has no attention that the ring could replace")


def _attention(*_: Any, sliding_window: int | None = None, **__: Any) -> None:
    raise _Reached(sliding_window)


def _of_mask(mask: _Mask | None, told: int | None, length: int) -> str:
    """A mask as words; equal to those of the window when it is one."""
    if mask is None:
        return _words(None)
    borders = {
        edge for size in (mask.size, told) if size for edge in (size - 1, size, size + 1, 2 * size, 2 * size + 1)
    }
    widths = set()
    zero, keys = torch.zeros((), dtype=torch.int64, device="cpu"), torch.arange(length, device="cpu")
    for row in sorted({0, 1, length // 2, length - 1} | borders):
        if not 0 <= row < length:
            continue
        query = torch.tensor([row], device="cpu")
        seen = mask.sees(zero, zero, query, keys).expand(length)
        if bool((seen & (keys > row)).any()):
            return "open to later tokens"
        width = int(seen.sum())
        if not bool((seen == ((keys <= row) & (keys > row - width))).all()):
            return "no window of the last tokens"
        widths.add((row, width))
    window = max(width for _, width in widths)
    if any(width != min(row + 1, window) for row, width in widths):
        return f"chunks of {mask.size} tokens" if mask.size else "no window of the last tokens"
    return _words(window if window < length else None)


def _words(window: int | None) -> str:
    return "no window" if window is None else f"a window of {window} tokens"
