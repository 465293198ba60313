"""What a caller may ask an injected model of transformers for beside its loss: answered whole, or refused by name.

A rank's layers hold a share of each sequence (sequence parallelism) and attend by what a call says of documents and
padding. What goes in or comes out another way than by tokens and logits is cut or put together here; the table is in
docs/generating.md.

`generate` of an injected Hugging Face model: the text that the whole model would give, between two training steps.

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
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parcompile.layout.groups import Axis
from parcompile.runtime import micro_batch
from parcompile.runtime.collectives import gather_from_group, scatter_to_group
from parcompile.runtime.data import ready_inputs
from parcompile.runtime.errors import RunError, everywhere
from parcompile.runtime.groups import Mesh
from parcompile.runtime.micro_batch import ALONE, DOCUMENTS, current

from .adapters import INJECTED_FIRST
from .attention import name_for
from .regions import Call

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
        raise everywhere(
            f"generate() under pp {pp}: each stage has a part of the layers. Save a checkpoint, write it as a Hugging "
            "Face model with `parcompile checkpoint export DIR --hf OUT`, and generate with "
            "AutoModelForCausalLM.from_pretrained(OUT)"
        )
    if mesh.parallel_group(Axis.EP) is not None or (mesh.plan.spec.shards_weights and mesh.size("dp-cp") > 1):
        kwargs.setdefault("synced_gpus", True)
    with mock.patch.object(decoding, "every_call", True), _evaluating(model), _drawing_alike(mesh):
        return generate(*args, **kwargs)


class _Decoding:
    """Hooks of a model: steps of decoding take whole sequences, padded on the left or not at all."""

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self._group, self._vocabulary = mesh.parallel_group("tp"), mesh.plan.spec.model.shape.vocab_size
        self._sequence_parallel = mesh.plan.spec.parallelism.sequence_parallel
        self.every_call, self._here = False, False
        model.register_forward_pre_hook(self._enter, with_kwargs=True)
        model.register_forward_hook(self._leave)

    def _enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        past = any(kwargs.get(name) is not None for name in PAST)
        labelled = any(kwargs.get(name) is not None for name in ("labels", "shift_labels"))
        if past and labelled:
            raise everywhere(
                "the model was called with past_key_values and with labels: keys of earlier calls are taken for "
                "decoding only. Give the whole sequence, without past_key_values, to train or to compute a loss"
            )
        self._here = self.every_call or past or (kwargs.get("use_cache") is True and not labelled)
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
        raise everywhere(
            "an injected model decodes with a cache that grows, not with one of fixed length: leave out "
            "cache_implementation='static', and give a DynamicCache as past_key_values"
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


_PATCHED = "parcompile_patched"
_SETTER = "set_attn_implementation"
_WHOLE = "write the model with `parcompile checkpoint export DIR --hf OUT` and load it with from_pretrained"
_CLOSED = {
    "generate_batch": "continuous batching has an attention of its own. Call generate()",
    "init_continuous_batching": "continuous batching has an attention of its own. Call generate()",
    "set_input_embeddings": "words are dealt to the ranks. Change the whole model before initialize",
    "set_output_embeddings": "words are dealt to the ranks. Change the whole model before initialize",
}
"""Methods that an injected model refuses, whatever they are called with."""


def refuse_changes(model: nn.Module, mesh: Mesh) -> None:
    """Lets copies, pickles, another vocabulary and new adapters of an injected model say what to do."""
    if mesh.size("tp-pp") * mesh.size("cp") > 1 or mesh.parallel_group(Axis.EP) is not None:
        _refuse_adapters()
    model.__reduce_ex__ = _refuse_copy  # type: ignore[method-assign]
    if hasattr(model, "resize_token_embeddings"):
        model.resize_token_embeddings = functools.partial(_resize, model, mesh)  # type: ignore[assignment]
    for name, why in _CLOSED.items():
        if hasattr(model, name):
            setattr(model, name, functools.partial(_refuse, f"{name}() on an injected model: {why}"))
    for module in model.modules() if mesh.plan.spec.model.shape.user_module is None else ():
        if hasattr(module, _SETTER):
            setattr(module, _SETTER, functools.partial(_keep_attention, model.config))


def _refuse(why: str, *_: Any, **__: Any) -> NoReturn:
    raise everywhere(why)


def _keep_attention(config: Any, attn_implementation: Any, *_: Any, **__: Any) -> None:
    if attn_implementation != (kept := name_for(config)):
        raise everywhere(
            f"attn_implementation {attn_implementation!r}: an injected model attends by {kept!r}, around the ring, "
            f"whose kernels the plan chooses. Leave it as it is; for another attention {_WHOLE}"
        )


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
        raise everywhere(
            f"resize_token_embeddings to {wanted} tokens: the plan has model.vocab_size {size}, whose rows are dealt "
            "to the ranks. Resize the whole model before initialize, save it (save_pretrained), and compile a plan of "
            f"its config.json, with vocab_size {wanted}"
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
            raise everywhere(INJECTED_FIRST)
        return original(tuner, model, *args, **options)

    setattr(inject_adapter, _PATCHED, True)
    peft.BaseTuner.inject_adapter = inject_adapter


def name_arguments(model: nn.Module) -> None:
    """Lets every hook of a model find what it is called with by its name."""
    parameters = inspect.signature(type(model).forward).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
    names = [one.name for one in parameters if one.kind in kinds][1:]

    def name(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        return _named(names, args, kwargs)

    model.register_forward_pre_hook(name, with_kwargs=True)


def _named(names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    return args[len(names) :], {**dict(zip(names, args, strict=False)), **kwargs}


def take_inputs(model: nn.Module, mesh: Mesh, *, first: bool = False) -> None:
    """Makes every call of a model ready for its layers; `first`: before the hooks that it has."""
    labels = mesh.plan.spec.model.shape.head.labels

    def take(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        if labels and any(kwargs.get(name) is not None for name in ("labels", "shift_labels")):
            raise everywhere(
                f"a classifier (num_labels {labels}) was called with labels: a plan has no loss of its own for them. "
                "Compute the loss from its logits, as a trainer with its own compute_loss does (trl's RewardTrainer)"
            )
        if args and "input_ids" not in kwargs:
            args, kwargs = args[1:], {"input_ids": args[0], **kwargs}
        return args, ready_inputs(kwargs, mesh)

    model.register_forward_pre_hook(take, with_kwargs=True, prepend=first)


_STATES = ("last_hidden_state", "hidden_states")


def answer_calls(model: nn.Module, base: nn.Module, mesh: Mesh) -> None:
    """Lets a model and its base model answer whole, or refuse by name, what they are asked for.

    The base model may be called by itself: it finds documents and padding as the whole model does.
    """
    answers = _Answers(model, mesh)
    model.register_forward_pre_hook(answers.enter, with_kwargs=True)
    model.register_forward_hook(answers.leave)
    if mesh.size("pp") == 1:
        alone = _OfBase(model, base, mesh)
        base.register_forward_pre_hook(alone.enter, with_kwargs=True, prepend=True)
        base.register_forward_hook(alone.leave)
        base.register_forward_hook(alone.end, always_call=True)


def look_up_whole(embedding: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Lets the embedding, called outside of the model, give whole sequences, not this rank's share of them."""

    def whole(_: nn.Module, args: tuple[Any, ...], rows: Tensor) -> Tensor:
        return rows if micro_batch.in_call() else gather_from_group(rows, 1, group, args[0].shape[1])

    embedding.register_forward_hook(whole)


class _Asked:
    """What a model is asked for, and how a rank answers."""

    def __init__(self, model: Any, mesh: Mesh) -> None:
        self.mesh, self.config = mesh, model.config
        axes = mesh.plan.spec.parallelism
        self.group = mesh.parallel_group("tp") if axes.sequence_parallel else None
        self.balances = hasattr(sys.modules[type(model).__module__], "load_balancing_loss_func")
        self.as_tuple = False

    def take(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments, without what is answered here.

        Raises:
            RunError: something is asked for that no rank has.
        """
        _keep_attention(self.config, self.config._attn_implementation)
        if self._wants("output_attentions", kwargs):
            raise everywhere(
                "output_attentions: no kernel of an injected model keeps the weights of its attention. Set "
                f"model.config.output_attentions to False and leave the argument out; for the weights {_WHOLE} "
                "(OUT, attn_implementation='eager')"
            )
        if self.balances and self._wants("output_router_logits", kwargs):
            raise everywhere(
                "output_router_logits in a call, or set after initialize: the balancing loss of the class knows "
                "nothing of other ranks. Set output_router_logits in the configuration before initialize, or "
                "training.router in the spec, and leave the argument out"
            )
        self.as_tuple = not self._wants("return_dict", kwargs)
        return {**kwargs, "return_dict": True} if self.as_tuple else kwargs

    def _wants(self, name: str, kwargs: dict[str, Any]) -> bool:
        asked = kwargs.get(name)
        return bool(getattr(self.config, name, name == "return_dict") if asked is None else asked)

    def whole(self, output: Any) -> Any:
        """The output with hidden states of all tokens of this cp rank."""
        for name in _STATES if self.group is not None else ():
            if (states := output.get(name)) is not None:
                output[name] = self._whole(states)
        return output

    def _whole(self, states: Any) -> Any:
        if isinstance(states, Sequence):
            return tuple(map(self._whole, states))
        length = current().sequence_length
        return states if states is None else gather_from_group(states, 1, self.group, length)


class _Answers(_Asked):
    """Of a whole model."""

    kept: Any = 0

    def enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        kwargs = self.take(kwargs)
        kept = kwargs.get("logits_to_keep")
        self.kept = 0
        if kept is None or (not isinstance(kept, Tensor) and kept == 0):
            return args, kwargs
        if self.mesh.size("cp") > 1 and not kwargs.get(ALONE):
            raise everywhere(
                f"logits_to_keep {kept!r} under cp {self.mesh.size('cp')}, where a rank has part of the tokens: leave "
                "it out, and choose from parcompile.runtime.loss.whole_sequences(logits, mesh)"
            )
        if self.group is not None:
            # A rank has a share of the hidden states: the head gives all logits, of which some are kept.
            self.kept = kwargs.pop("logits_to_keep")
        return args, kwargs

    def leave(self, _: nn.Module, __: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return None  # of a stage
        output = self.whole(output)
        if isinstance(self.kept, Tensor) or self.kept:
            from transformers.modeling_utils import slice_logits_to_keep

            output.logits = slice_logits_to_keep(output.logits, self.kept)
        return output.to_tuple() if self.as_tuple else output


class _OfBase(_Asked):
    """Of a base model, which the whole model calls, or a caller."""

    def __init__(self, model: Any, base: nn.Module, mesh: Mesh) -> None:
        super().__init__(model, mesh)
        self.parameters = inspect.signature(type(base).forward).parameters
        self.takes_all = any(one.kind is one.VAR_KEYWORD for one in self.parameters.values())
        self.here = False

    def enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        args, kwargs = _named(list(self.parameters)[1:], args, kwargs)
        if not micro_batch.in_call():
            kwargs = self._begin(kwargs)
        rows = kwargs.get("inputs_embeds")
        # A stage that another one precedes is called with tokens, and hands on a share.
        if self.group is not None and rows is not None and current().tokens is None:
            kwargs["inputs_embeds"] = scatter_to_group(rows, 1, self.group, pad=True)
        return args, kwargs

    def _begin(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        if kwargs.get("use_cache") or any(kwargs.get(name) is not None for name in PAST):
            raise everywhere(
                "the base model of an injected model was called with use_cache or past_key_values: decode with the "
                "whole model, by generate() or by model(..., use_cache=True)"
            )
        kwargs = micro_batch.begin((), ready_inputs(self.take(kwargs), self.mesh))
        self.here = True
        return {name: one for name, one in kwargs.items() if self.takes_all or name in self.parameters}

    def leave(self, _: nn.Module, __: Any, output: Any) -> Any:
        if not self.here:
            return None
        output = self.whole(output)
        return output.to_tuple() if self.as_tuple else output

    def end(self, *_: Any) -> None:
        if self.here:
            self.here = False
            micro_batch.end()
