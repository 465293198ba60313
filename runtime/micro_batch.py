"""The micro-batch that the layers of a model work on: what they have to know beside hidden states and positions.

A forward pass has one; a layer that is recomputed in backward finds that of its own forward, whichever came last.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from parcompile.runtime.ring_attention import Packing, keep_attention

DOCUMENTS = "documents"
"""The model is called with the borders of packed documents under this name; see `ring_attention`."""

PACKING = "packing"
"""The model is called under this name with the packing of its documents; see `packed_attention`."""

FIRST_SAMPLE = "first_sample"
"""The model is called under this name with the number of its first sequence in the data: dropout depends on it."""

TOKEN_PLACES = "token_places"  # noqa: S105 -- no secret
"""The model is called under this name with the sample and the position in it of each packed token [1, S, 2]."""

REAL_TOKENS = "real_tokens"
"""The model is called under this name with False where a token is padding [B, S]."""

ALONE = "parcompile_alone"
"""The model is called under this name with True where a rank has whole sequences, as for generation."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward pass of a model works on."""

    rows: int | None = None
    """Sequences; None when the model was not called with tokens or positions."""
    sequence_length: int | None = None
    """Tokens of each row that this cp rank holds; None as for `rows`."""
    documents: list[list[int]] | None = None
    """Borders of the documents in each row."""
    packing: Packing | None = None
    """Where the documents are, if each is dealt on its own or is whole on one rank."""
    first_sample: int | None = None
    """The number of the first row in the data."""
    token_places: Tensor | None = None
    """Of packed documents, the sample and the position in it of each token [1, S, 2]."""
    positions: Tensor | None = None
    """Of the tokens of this cp rank, each counted within its document [1 or B, S]."""
    tokens: Tensor | None = None
    """The numbers of these tokens [B, S], which routers that look experts up want on every stage of a pipeline."""
    real: Tensor | None = None
    """False for padding [B, S]; None: there is none, or nobody says where."""
    alone: bool = False
    """Each rank has all tokens, in their order; keys may be there from calls before."""


_NONE = MicroBatch()


class _Here(threading.local):
    """Of the calling thread: autograd recomputes in threads of its own."""

    current: MicroBatch = _NONE
    recomputing: bool = False
    ahead: bool = False


_here = _Here()


def current() -> MicroBatch:
    """What is worked on now; empty outside of a forward pass."""
    return _here.current


def in_call() -> bool:
    """Whether a model is being called."""
    return _here.current is not _NONE


def padding_mask(device: torch.device) -> Tensor | None:
    """[B, S] of 0 where prompts of generation are padded on the left, for the tokens of this call; None without any."""
    borders, length = _here.current.documents, _here.current.sequence_length
    # A single token goes on behind a prompt: it is no padding.
    if not _here.current.alone or borders is None or length is None or length == 1:
        return None
    first = torch.tensor([one[-1] - length for one in borders], device=device)
    text = torch.tensor([one[1] if len(one) > 2 else 0 for one in borders], device=device)
    places = first[:, None] + torch.arange(length, device=device)
    return (places >= text[:, None]).to(torch.int64)


@contextmanager
def working_on(batch: MicroBatch) -> Iterator[None]:
    """Within it a micro-batch is worked on, where no model is followed."""
    before, _here.current = _here.current, batch
    try:
        yield
    finally:
        _here.current = before


def is_repeated() -> bool:
    """Whether what runs now is no forward pass that trains: it is computed again, or looked at before its step."""
    return _here.recomputing or _here.ahead


def looking_ahead() -> AbstractContextManager[Any]:
    """Within it micro-batches go forward that will be trained on later."""
    return mock.patch.object(_here, "ahead", True)


def begin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Takes the micro-batch out of what a model is called with; what is left goes to the model.

    Not every model passes arguments that it does not know on to its attention.
    """
    kwargs = dict(kwargs)
    named = (*(kwargs.get(name) for name in ("input_ids", "inputs_embeds", "position_ids")), *args)
    tokens = next((one for one in named if isinstance(one, Tensor)), None)
    _here.current = MicroBatch(
        None if tokens is None else tokens.shape[0],
        None if tokens is None else tokens.shape[1],
        kwargs.pop(DOCUMENTS, None),
        kwargs.pop(PACKING, None),
        kwargs.pop(FIRST_SAMPLE, None),
        kwargs.pop(TOKEN_PLACES, None),
        kwargs.get("position_ids"),
        kwargs.get("input_ids"),
        kwargs.pop(REAL_TOKENS, None),
        kwargs.pop(ALONE, False),
    )
    return kwargs


def end() -> None:
    """The forward pass is over."""
    _here.current = _NONE


def follow_calls(model: nn.Module) -> None:
    """Every call of `model` is one micro-batch's."""
    model.register_forward_pre_hook(lambda _, args, kwargs: (args, begin(args, kwargs)), with_kwargs=True)
    model.register_forward_hook(lambda *_: end(), always_call=True)


def recompute_context(
    *further: AbstractContextManager[Any], **moves: Any
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The `context_fn` of activation checkpointing.

    A recomputation works on the micro-batch of its forward pass. Attention is kept: it would send keys and values
    around the ring a second time; `moves` are those of `keep_attention`. It runs within `further` contexts, too.
    """
    keeping, taking = keep_attention(**moves)
    return keeping, _Restored(_here.current, taking, *further)


class _Restored:
    """Within it a micro-batch is worked on again."""

    def __init__(self, micro_batch: MicroBatch, *contexts: AbstractContextManager[Any]) -> None:
        self._micro_batch, self._contexts = micro_batch, contexts
        self._stack = ExitStack()

    def __enter__(self) -> None:
        for context in self._contexts:
            self._stack.enter_context(context)
        self._before = _here.current, _here.recomputing
        _here.current, _here.recomputing = self._micro_batch, True

    def __exit__(self, *_: object) -> None:
        _here.current, _here.recomputing = self._before
        self._stack.close()
