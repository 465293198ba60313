"""Calls of an injected model: forward, `generate`, and what people do to a model that it does not survive.

Tensor-parallel ranks generate together, each with its heads: logits are gathered, and random numbers are drawn alike.
Every cp rank has all weights: it generates alone, over whole sequences. Keys are kept from one token to the next.
Ranks that share experts, or shards of weights, generate together too, each its own text: all go on until the last of
them has ended.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parcompile.layout.groups import Axis
from parcompile.runtime.collectives import gather_from_group
from parcompile.runtime.data.inputs import ready_inputs
from parcompile.runtime.errors import RunError
from parcompile.runtime.groups import Mesh
from parcompile.runtime.micro_batch import ALONE, DOCUMENTS

from .adapters import INJECTED_FIRST

# What people do to a model of transformers that an injected one does not survive: each says what to do instead.

_PATCHED = "parcompile_patched"


def refuse_changes(model: nn.Module, mesh: Mesh) -> None:
    """Lets copies, pickles, another vocabulary and new adapters of an injected model say what to do."""
    if mesh.size("tp-pp") * mesh.size("cp") > 1 or mesh.parallel_group(Axis.EP) is not None:
        _refuse_adapters()
    model.__reduce_ex__ = _refuse_copy  # type: ignore[method-assign]
    if hasattr(model, "resize_token_embeddings"):
        model.resize_token_embeddings = functools.partial(_resize, model, mesh)  # type: ignore[assignment]


def _refuse_copy(_: object) -> NoReturn:
    raise RunError(
        "an injected model cannot be copied or pickled: its layers hold the process groups of this run. Copy the whole "
        "model before initialize (copy.deepcopy); for the weights of a run, save(engine, folder, step), and write them "
        "with `parcompile checkpoint export DIR --hf OUT`"
    )


def _resize(
    model: Any, mesh: Mesh, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, *_: Any, **__: Any
) -> nn.Module:
    """`resize_token_embeddings` of transformers, as far as it changes nothing.

    Raises:
        RunError: it asks for another vocabulary.
    """
    size = mesh.plan.spec.model.shape.vocab_size
    wanted = size if new_num_tokens is None else new_num_tokens
    if pad_to_multiple_of is not None:
        wanted = -(-wanted // pad_to_multiple_of) * pad_to_multiple_of
    if wanted != size:
        raise RunError(
            f"resize_token_embeddings to {wanted} tokens: the plan has model.vocab_size {size}, whose rows are dealt "
            "to the ranks. Resize the whole model before initialize, save it (save_pretrained), and compile a plan of "
            f"its config.json, with vocab_size {wanted}",
            everywhere=True,
        )
    found: nn.Module = model.get_input_embeddings()
    return found


def _refuse_adapters() -> None:
    """Lets peft, where a program has imported it, say how adapters come to a model that is injected."""
    peft: Any = sys.modules.get("peft.tuners.tuners_utils")
    if peft is None or hasattr(peft.BaseTuner.inject_adapter, _PATCHED):
        return
    original = peft.BaseTuner.inject_adapter

    @functools.wraps(original)
    def inject_adapter(tuner: Any, model: Any, *args: Any, **options: Any) -> Any:
        if getattr(model, "parcompile_mesh", None) is not None:
            raise RunError(INJECTED_FIRST, everywhere=True)
        return original(tuner, model, *args, **options)

    setattr(inject_adapter, _PATCHED, True)
    peft.BaseTuner.inject_adapter = inject_adapter


# The one place where an injected model is called: what people give it becomes what its layers work on.

_Call = tuple[tuple[Any, ...], dict[str, Any]]


def name_arguments(model: nn.Module) -> None:
    """Lets every hook of a model find what it is called with by its name."""
    parameters = inspect.signature(type(model).forward).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
    names = [one.name for one in parameters if one.kind in kinds][1:]

    def name(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        return args[len(names) :], {**dict(zip(names, args, strict=False)), **kwargs}

    model.register_forward_pre_hook(name, with_kwargs=True)


def take_inputs(model: nn.Module, mesh: Mesh, *, first: bool = False) -> None:
    """Makes every call of a model ready for its layers; `first`: before the hooks that it has."""
    labels = mesh.plan.spec.model.shape.head.labels

    def take(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        if labels and any(kwargs.get(name) is not None for name in ("labels", "shift_labels")):
            raise RunError(
                f"a classifier (num_labels {labels}) was called with labels: a plan has no loss of its own for them. "
                "Compute the loss from its logits, as a trainer with its own compute_loss does (trl's RewardTrainer)",
                everywhere=True,
            )
        if args and "input_ids" not in kwargs:
            args, kwargs = args[1:], {"input_ids": args[0], **kwargs}
        return args, ready_inputs(kwargs, mesh)

    model.register_forward_pre_hook(take, with_kwargs=True, prepend=first)


# `generate` of an injected Hugging Face model: the text that the whole model would give, between two training steps.

_PAST = ("past_key_values", "cache_params")
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
        self._every, self._here, self._kept = False, False, 0
        model.register_forward_pre_hook(self._enter, with_kwargs=True)
        model.register_forward_hook(self._leave)

    @contextlib.contextmanager
    def all_calls(self) -> Iterator[None]:
        """Within it every call is a step of decoding."""
        self._every = True
        try:
            yield
        finally:
            self._every = False

    def _enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        past = any(kwargs.get(name) is not None for name in _PAST)
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
        kwargs = {**kwargs, ALONE: True}
        mask = kwargs.pop("attention_mask", None)
        if mask is not None and not bool(mask.all()):
            kwargs[DOCUMENTS] = _behind_padding(mask)
        self._kept = 0
        if self._sequence_parallel:
            # The last token is on one rank only, and transformers would count positions by a rank's share of tokens.
            self._kept, kwargs["logits_to_keep"] = kwargs.get("logits_to_keep") or 0, 0
            if kwargs.get("position_ids") is None and kwargs.get("input_ids") is not None:
                kwargs["position_ids"] = _positions(kwargs["input_ids"], kwargs.get("past_key_values"))
        return args, kwargs

    def _leave(self, _: nn.Module, __: Any, output: Any) -> Any:
        if not self._here:
            return None
        logits = output.logits
        logits = logits if self._group is None else gather_from_group(logits, -1, self._group)
        output.logits = logits[:, -self._kept :, : self._vocabulary]
        return output


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
