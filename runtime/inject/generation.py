"""`generate` of an injected Hugging Face model: the text that the whole model would give, between two training steps.

Tensor-parallel ranks generate together, each with its heads: logits are gathered, and random numbers are drawn alike.
Every cp rank has all weights: it generates alone, over whole sequences. Keys are kept from one token to the next.
Ranks that share experts, or shards of weights, generate together too, each its own text: all go on until the last of
them has ended.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parcompile.layout.groups import Axis
from parcompile.runtime.collectives import gather_from_group
from parcompile.runtime.errors import RunError
from parcompile.runtime.groups import Mesh
from parcompile.runtime.micro_batch import ALONE, DOCUMENTS

PAST = ("past_key_values", "cache_params")
"""Under these names a model is called with what it kept of earlier calls."""


def let_generate(model: nn.Module, mesh: Mesh) -> None:
    """Gives an injected model a `generate` that works, or says what to do, and lets it decode by hand.

    A call with `use_cache=True` or with `past_key_values`, and without labels, is a step of decoding: it takes whole
    sequences on every rank of tp, and gives whole logits.
    """
    if hasattr(model, "generate"):
        decoding = _Decoding(model, mesh)
        model.generate = functools.partial(_generate, model, mesh, decoding, model.generate)  # type: ignore[assignment, arg-type]


def _generate(
    model: nn.Module, mesh: Mesh, decoding: _Decoding, generate: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """`generate` of transformers, with its arguments. All ranks of a tp group call it with the same ones.

    With expert parallelism, and at ZeRO stage 3, every rank of the world calls it. The model is in evaluation mode
    meanwhile.

    Raises:
        RunError: the layers are in stages.
    """
    if (pp := mesh.size("pp")) > 1:
        raise RunError(
            f"generate() under pp {pp}: each stage has a part of the layers. Save a checkpoint, write it as a Hugging "
            "Face model with `parcompile checkpoint export DIR --hf OUT`, and generate with "
            "AutoModelForCausalLM.from_pretrained(OUT)",
            everywhere=True,
        )
    if mesh.parallel_group(Axis.EP) is not None or (mesh.plan.spec.shards_weights and mesh.size("dp-cp") > 1):
        kwargs.setdefault("synced_gpus", True)
    with decoding.all_calls(), _evaluating(model), _drawing_alike(mesh):
        return generate(*args, **kwargs)


class _Decoding:
    """Hooks of a model: steps of decoding take whole sequences, padded on the left or not at all."""

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self._group, self._vocabulary = mesh.parallel_group("tp"), mesh.plan.spec.model.shape.vocab_size
        self._sequence_parallel = mesh.plan.spec.parallelism.sequence_parallel
        self._every, self._here = False, False
        model.register_forward_pre_hook(self._enter, with_kwargs=True)
        model.register_forward_hook(self._leave)

    def all_calls(self) -> contextlib.AbstractContextManager[Any]:
        """Within it every call is a step of decoding."""
        return mock.patch.object(self, "_every", True)

    def _enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        past = any(kwargs.get(name) is not None for name in PAST)
        labelled = any(kwargs.get(name) is not None for name in ("labels", "shift_labels"))
        if past and labelled:
            raise RunError(
                "the model was called with past_key_values and with labels: keys of earlier calls are taken for "
                "decoding only. Give the whole sequence, without past_key_values, to train or to compute a loss",
                everywhere=True,
            )
        self._here = self._every or past or (kwargs.get("use_cache") is True and not labelled)
        if not self._here:
            return None
        _refuse_fixed(kwargs.get("past_key_values"))
        kwargs = {**kwargs, ALONE: True}
        mask = kwargs.pop("attention_mask", None)
        if mask is not None and not bool(mask.all()):
            kwargs[DOCUMENTS] = _behind_padding(mask)
        if self._sequence_parallel and kwargs.get("position_ids") is None and kwargs.get("input_ids") is not None:
            # transformers would count positions by a rank's share of tokens.
            kwargs["position_ids"] = _positions(kwargs["input_ids"], kwargs.get("past_key_values"))
        return args, kwargs

    def _leave(self, _: nn.Module, __: Any, output: Any) -> Any:
        if not self._here:
            return None
        logits = output.logits
        logits = logits if self._group is None else gather_from_group(logits, -1, self._group)
        output.logits = logits[..., : self._vocabulary]
        return output


def _refuse_fixed(past: Any) -> None:
    """Of a cache of fixed length the keys that are not there yet would count as earlier ones."""
    from transformers.cache_utils import StaticLayer

    if any(isinstance(layer, StaticLayer) for layer in getattr(past, "layers", ())):
        raise RunError(
            "an injected model decodes with a cache that grows, not with one of fixed length: leave out "
            "cache_implementation='static', and give a DynamicCache as past_key_values",
            everywhere=True,
        )


def _positions(tokens: Tensor, past: Any) -> Tensor:
    """[B, S] behind those that are kept."""
    first = 0 if past is None else int(past.get_seq_length())
    return torch.arange(first, first + tokens.shape[1], device=tokens.device).expand(tokens.shape[0], -1)


def _behind_padding(mask: Tensor) -> list[list[int]]:
    """[B, S] of 0 for padding: the padding of each row is a document of its own, in front of the text."""
    real = mask.bool()
    if mask.dim() != 2 or bool((real[:, :-1] & ~real[:, 1:]).any()):
        raise RunError("generate() takes prompts of different lengths padded on the left (padding_side='left')")
    length = mask.shape[1]
    return [sorted({0, length - int(count), length}) for count in real.sum(1).tolist()]


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextlib.contextmanager
def _drawing_alike(mesh: Mesh) -> Iterator[None]:
    """Within it the ranks of a tp group draw the same numbers at random; afterwards each goes on where it was."""
    group = mesh.parallel_group("tp")
    if group is None:
        yield
        return
    seed = torch.randint(2**62, (1,), device="cpu").to(mesh.device)
    dist.broadcast(seed, group=group, group_src=0)
    devices = [mesh.device] if mesh.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(int(seed))
        yield
