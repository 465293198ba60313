"""What a model draws at random: a function of the place in the whole batch, the same in every layout.

Takes the place of torch's random functions within a model's forward pass.

Which numbers are drawn depends on the plan's seed, the module and how many times it has drawn in this pass, the sample,
the position and the feature. Nothing depends on a generator's state: a recomputation draws the same again.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from parcompile.runtime.errors import RunError, everywhere
from parcompile.runtime.groups import Mesh
from parcompile.runtime.ring_attention.kernels.kernel import WORD, combined, mixed, of_seed

from .draws import DRAWING, Place, draws, trains_at_random

Ranges = Sequence[tuple[int, int]]


@dataclass(slots=True)
class Site:
    """A module that draws, in one forward pass."""

    name: str
    place: Place
    widths: dict[tuple[str, int], int] | None
    """Of each draw of the whole model, its elements for each token; None where every rank holds all features."""
    training: bool
    count: int = field(default=0)

    def next(self, how: str) -> tuple[tuple[str, int], str]:
        """A draw: its key, and words for it."""
        self.count += 1
        return (self.name, self.count), f"{self.name or 'the model'} draws at random ({how})"


class _Here(threading.local):
    """Of the calling thread: autograd recomputes in threads of its own."""

    site: Site | None = None
    features: Ranges | None = None
    recorded: dict[tuple[str, int], int] | None = None


_here = _Here()


def draw_by_place(model: nn.Module, mesh: Mesh, names: Sequence[str]) -> dict[tuple[str, int], int]:
    """Makes these modules of a model draw by place: layers that are recomputed as one, and what is around them.

    Returns:
        Widths of draws, empty: filled by `record_widths` where features are cut. An empty one says that none are.
    """
    place, widths = Place.of(mesh), dict[tuple[str, int], int]()
    for name in names:
        _wrap(model.get_submodule(name), name, place, widths)
    return widths


def _wrap(module: nn.Module, name: str, place: Place, widths: dict[tuple[str, int], int]) -> None:
    forward = module.forward

    def drawing(*args: Any, **kwargs: Any) -> Any:
        before, _here.site = _here.site, Site(name, place, widths or None, module.training)
        try:
            if before is not None:
                return forward(*args, **kwargs)
            with _ByPlace():
                return forward(*args, **kwargs)
        finally:
            _here.site = before

    module.forward = drawing


class Redrawn:
    """Within it a recomputation draws what its forward pass drew from here on."""

    def __init__(self) -> None:
        self._site = None if _here.site is None else replace(_here.site)
        self._stack = ExitStack()

    def __enter__(self) -> None:
        self._before = _here.site
        if self._site is not None:
            _here.site = replace(self._site)
            if self._before is None:
                self._stack.enter_context(_ByPlace())

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        _here.site = self._before


def recording(recorded: dict[tuple[str, int], int]) -> AbstractContextManager[Any]:
    """Within it draws draw nothing; how wide each is, is noted."""
    return mock.patch.object(_here, "recorded", recorded)


def hold_features(module: nn.Module, ranges: Ranges) -> None:
    """Makes a module draw for these features, of all: those of the tensors that it is called with."""
    forward = module.forward

    def holding(*args: Any, **kwargs: Any) -> Any:
        before, _here.features = _here.features, ranges
        try:
            return forward(*args, **kwargs)
        finally:
            _here.features = before

    module.forward = holding


class _ByPlace(TorchFunctionMode):
    """Draws by place for whatever module is the current site."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (ours := _OURS.get(function)) is not None:
            return ours(function, *args, **kwargs)
        site = _here.site
        if function in _REFUSED and site is not None and site.training and _is_on(function, args, kwargs):
            name = getattr(function, "__name__", function)
            raise everywhere(
                f"{site.name or 'the model'} calls {name}, whose numbers would be others in each layout: draw with "
                "dropout, rand_like, randn_like, uniform_, normal_, exponential_ or bernoulli_ of a tensor "
                "that has the micro-batch's tokens in its first dims"
            )
        return function(*args, **kwargs)


def _is_on(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Some functions draw only when they are told to."""
    if function is F.multi_head_attention_forward:
        return bool(kwargs.get("training", True)) and bool(args[10] if len(args) > 10 else kwargs.get("dropout_p", 0))
    return bool(kwargs.get("training", True))


def _draw(shape: torch.Size, device: torch.device, how: str) -> tuple[Tensor, Tensor] | None:
    """Keys of the tokens of a tensor and numbers of its features; None where nothing is to be drawn."""
    site = _here.site
    assert site is not None
    key, what = site.next(how)
    width = site.place.width(shape, what)
    if _here.recorded is not None:
        _here.recorded[key] = width
        return None
    word = mixed(of_seed(site.place.seed) ^ zlib.crc32(f"{key[0]}#{key[1]}".encode()))
    return site.place.keys(shape, word, device, what), _features(site, key, width, what, device)


def _features(site: Site, key: tuple[str, int], width: int, what: str, device: torch.device) -> Tensor:
    ranges: Ranges = ((0, width),)
    if _here.features is not None:
        ranges = _here.features
    elif site.widths is not None and (whole := site.widths.get(key)) != width:
        if whole != width * site.place.tp:
            raise everywhere(
                f"{what} {width} numbers for each token, the whole model draws {whole or 'none'}: tp {site.place.tp} "
                "does not split them evenly"
            )
        ranges = ((width * site.place.tp_index, width * (site.place.tp_index + 1)),)
    found = torch.cat([torch.arange(start, stop, device=device) for start, stop in ranges])
    assert len(found) == width, (what, ranges, width)
    return found


def _dropout(function: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:  # noqa: A002 -- torch's name
    if not training or not p or not 0 <= p <= 1:
        return function(input, p, training, inplace)
    drawn = _draw(input.shape, input.device, f"dropout {p:g}")
    if drawn is None:
        return input
    mask = dropped(*drawn, p).view(input.shape)
    scale = 1 / (1 - p) if p < 1 else 1.0
    # As torch's own: a byte for each element is kept for backward.
    return input.masked_fill_(mask, 0).mul_(scale) if inplace else input.masked_fill(mask, 0).mul(scale)


def _filled(transform: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A method that fills a tensor with what `transform` makes of numbers between 0 and 1."""

    def fill(function: Any, tensor: Tensor, *args: Any, generator: Any = None, **kwargs: Any) -> Tensor:
        if generator is not None:
            return function(tensor, *args, generator=generator, **kwargs)  # type: ignore[no-any-return]
        drawn = _draw(tensor.shape, tensor.device, function.__name__)
        if drawn is None:
            return tensor
        numbers = transform(uniform(*drawn).view(tensor.shape), *args, **kwargs)
        with torch.no_grad():
            return tensor.copy_(numbers)

    return fill


def _like(transform: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """A function that makes a tensor like another one of what `transform` makes of numbers between 0 and 1."""

    def make(function: Any, tensor: Tensor, **kwargs: Any) -> Tensor:
        made = torch.empty_like(tensor, **kwargs)
        drawn = _draw(made.shape, made.device, function.__name__)
        if drawn is not None:
            with torch.no_grad():
                made.copy_(transform(uniform(*drawn).view(made.shape)))
        return made

    return make


_OURS: dict[Any, Callable[..., Any]] = {
    F.dropout: _dropout,
    torch.dropout: lambda _, input, p, train: _dropout(F.dropout, input, p, train),  # noqa: A006 -- torch's names
    Tensor.uniform_: _filled(lambda numbers, low=0.0, high=1.0: low + (high - low) * numbers),
    Tensor.exponential_: _filled(lambda numbers, lambd=1.0: -numbers.log() / lambd),
    Tensor.normal_: _filled(lambda numbers, mean=0.0, std=1.0: mean + std * torch.special.ndtri(numbers)),
    Tensor.bernoulli_: _filled(lambda numbers, p=0.5: numbers < p),
    torch.rand_like: _like(lambda numbers: numbers),
    torch.randn_like: _like(torch.special.ndtri),
}

_REFUSED = DRAWING - _OURS.keys() | {F.multi_head_attention_forward}


# Random numbers from the keys of tokens: T tokens, F features of each.

_FEATURES = 0x510E527F
_CHUNK_NUMEL = {"cpu": 2**18}
_LARGE_CHUNK_NUMEL = 2**22
"""Words take 8 bytes each and a few copies: so many are computed at a time. On CPUs they stay in the cache."""
_BITS = 23


def dropped(keys: Tensor, features: Tensor, chance: float) -> Tensor:
    """Which elements are dropped: bool [T, F] from keys [T] and the numbers of the features [F]."""
    found = torch.empty(len(keys), len(features), dtype=torch.bool, device=keys.device)
    border = round(chance * (WORD + 1))
    for tokens in _chunks(keys, features):
        torch.lt(_words(keys[tokens], features), border, out=found[tokens])
    return found


def uniform(keys: Tensor, features: Tensor) -> Tensor:
    """Numbers between 0 and 1, neither of which occurs: float32 [T, F]."""
    found = torch.empty(len(keys), len(features), device=keys.device)
    for tokens in _chunks(keys, features):
        # 2^23 numbers, the centres of equal intervals: every one of them is exact in float32.
        found[tokens] = ((_words(keys[tokens], features) >> (32 - _BITS)) + 0.5) * 2.0**-_BITS
    return found


def _words(keys: Tensor, features: Tensor) -> Tensor:
    return combined(keys.unsqueeze(1), features, _FEATURES)


def _chunks(keys: Tensor, features: Tensor) -> list[slice]:
    numel = _CHUNK_NUMEL.get(keys.device.type, _LARGE_CHUNK_NUMEL)
    step = max(1, numel // max(1, len(features)))
    return [slice(start, start + step) for start in range(0, len(keys), step)]


# How many numbers a whole model draws for each token: a rank that draws fewer holds some of the features.

_ROWS, _LENGTH = 2, 5


def record_widths(model: nn.Module, widths: dict[tuple[str, int], int], sequence_length: int) -> None:
    """Fills `widths`, which `draw_by_place` returned for this model, before it is cut.

    Raises:
        RunError: the model cannot run without values.
    """
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    empty = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors}
    ids = torch.zeros(_ROWS, min(_LENGTH, sequence_length), dtype=torch.int64, device="meta")
    batch: dict[str, Any] = {"input_ids": ids, "position_ids": ids}
    was_training = model.training
    found: dict[tuple[str, int], int] = {}
    model.train()
    try:
        with torch.device("meta"), recording(found), torch.no_grad():
            torch.func.functional_call(model, empty, kwargs=batch)
    except RunError:
        raise
    except Exception as error:  # the module is the user's: it raises what it likes
        raise everywhere(
            f"{type(model).__name__} draws at random, and which of the features a rank draws for cannot be seen: on "
            f"tensors without values its forward fails ({type(error).__name__}: {error}); without tp, or without the "
            "drawing, it trains"
        ) from error
    finally:
        model.train(was_training)
    widths.update(found)
