"""Compares, layer by layer, the mask that transformers builds with the window that an attention is told.

The ring masks by what its attention is told. In some models the window stands only in the mask, in others the mask
lacks the window that the attention has: there the ring and transformers' own attention compute different numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from parcompile.model.shape import ModelShape
from parcompile.runtime.errors import RunError

from .mechanisms.layer_inputs import without_tables
from .ring_place import chunk_of

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
        raise RunError(
            f"transformers masks {type(model).__name__} otherwise than its attention is told, and the ring reads only "
            f"the latter: {'; '.join(parts)}. The ring masks later tokens and tokens outside of one window: change "
            f"the configuration ({_named(model.config)}), or make a window sequence_length {sequence_length} or more",
            everywhere=True,
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
    raise RunError(f"a {type(layer).__name__} has no attention that the ring could replace", everywhere=True)


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
